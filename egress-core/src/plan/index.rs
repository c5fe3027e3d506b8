//! Finds the items that a label selector matches without looking at all of them.
//!
//! Only labels whose keys some selector mentions are indexed: the others cannot distinguish two items.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Labels, Requirement, Selector};

/// Returns the label keys that selectors mention.
pub fn mentioned_keys<'a>(selectors: impl IntoIterator<Item = &'a Selector>) -> BTreeSet<&'a str> {
    selectors.into_iter().flat_map(|selector| selector.requirements().map(|(key, _)| key)).collect()
}

/// Labelled items, numbered in the order in which they were added.
#[derive(Debug)]
pub struct LabelIndex<'a> {
    labels: Vec<&'a Labels>,
    with_value: BTreeMap<&'a str, BTreeMap<&'a str, Vec<u32>>>,
    with_key: BTreeMap<&'a str, Vec<u32>>,
}

impl<'a> LabelIndex<'a> {
    /// Indexes items by those of their labels that have one of these keys.
    pub fn new(items: impl IntoIterator<Item = &'a Labels>, keys: &BTreeSet<&'a str>) -> Self {
        let mut index = Self { labels: Vec::new(), with_value: BTreeMap::new(), with_key: BTreeMap::new() };
        for labels in items {
            let item = index.labels.len() as u32;
            for (key, value) in labels.iter().filter(|(key, _)| keys.contains(key.as_str())) {
                index.with_value.entry(key).or_default().entry(value).or_default().push(item);
                index.with_key.entry(key).or_default().push(item);
            }
            index.labels.push(labels);
        }
        index
    }

    /// Returns the items that match, in ascending order. Every key that the selector mentions must have been indexed.
    pub fn matching(&self, selector: &Selector) -> Vec<u32> {
        let verify = |item: &u32| selector.matches(self.labels[*item as usize]);
        match self.narrowest(selector) {
            Some(candidates) => {
                let mut found: Vec<u32> = candidates.into_iter().flatten().copied().filter(verify).collect();
                found.sort_unstable();
                found
            }
            None => (0..self.labels.len() as u32).filter(verify).collect(),
        }
    }

    /// Returns how many items [`Self::matching`] looks at.
    pub fn reach(&self, selector: &Selector) -> usize {
        self.narrowest(selector).map_or(self.labels.len(), |lists| length(&lists))
    }

    fn with_value(&self, key: &str, value: &str) -> &[u32] {
        self.with_value.get(key).and_then(|of_key| of_key.get(value)).map_or(&[], Vec::as_slice)
    }

    /// Returns the shortest lists of items that together contain everything that can match; `None` if the selector has no requirement that
    /// a label be present.
    fn narrowest(&self, selector: &Selector) -> Option<Vec<&[u32]>> {
        selector
            .requirements()
            .filter_map(|(key, requirement)| match requirement {
                Requirement::In(values) => Some(values.iter().map(|value| self.with_value(key, value)).collect()),
                Requirement::Exists => Some(vec![self.with_key.get(key).map_or(&[][..], Vec::as_slice)]),
                Requirement::NotIn(_) | Requirement::DoesNotExist => None,
            })
            .min_by_key(|lists: &Vec<&[u32]>| length(lists))
    }
}

fn length(lists: &[&[u32]]) -> usize {
    lists.iter().map(|list| list.len()).sum()
}
