//! Label selectors with Kubernetes' meaning.

use std::collections::{BTreeMap, BTreeSet};

use super::Labels;

/// A requirement on one label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Requirement {
    /// The label is present with one of these values. `matchLabels` gives one value.
    In(BTreeSet<String>),
    /// The label is absent, or has none of these values.
    NotIn(BTreeSet<String>),
    /// The label is present.
    Exists,
    /// The label is absent.
    DoesNotExist,
}

/// Requirements that must all hold. A selector without requirements selects everything; an *absent* selector is `Option::None` where it is
/// used.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selector(BTreeSet<(String, Requirement)>);

impl Selector {
    /// Creates the selector that requires all of these.
    pub fn new(requirements: impl IntoIterator<Item = (String, Requirement)>) -> Self {
        Self(requirements.into_iter().collect())
    }

    /// Creates the selector that everything matches.
    pub fn everything() -> Self {
        Self::default()
    }

    /// Creates the selector that requires one value of one label.
    pub fn label(key: &str, value: &str) -> Self {
        Self::from_labels([(key.to_owned(), value.to_owned())].into())
    }

    /// Creates the selector that `matchLabels` stands for.
    pub fn from_labels(labels: BTreeMap<String, String>) -> Self {
        Self::new(labels.into_iter().map(|(key, value)| (key, Requirement::In([value].into()))))
    }

    /// Its requirements, label by label.
    pub fn requirements(&self) -> impl Iterator<Item = (&str, &Requirement)> {
        self.0.iter().map(|(key, requirement)| (key.as_str(), requirement))
    }

    /// Returns whether it requires nothing.
    pub fn is_everything(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns labels that satisfy it; none if its requirements contradict each other.
    pub fn satisfying(&self) -> Option<Labels> {
        let mut labels = Labels::new();
        for (key, requirement) in &self.0 {
            let value = match requirement {
                Requirement::In(values) => values.iter().find(|value| self.allows(key, value))?.clone(),
                Requirement::Exists => labels.get(key).cloned().unwrap_or_default(),
                Requirement::NotIn(_) | Requirement::DoesNotExist => continue,
            };
            labels.insert(key.clone(), value);
        }
        self.matches(&labels).then_some(labels)
    }

    /// Returns whether every requirement on a label allows this value.
    fn allows(&self, key: &str, value: &str) -> bool {
        self.0.iter().filter(|(of, _)| of == key).all(|(_, requirement)| match requirement {
            Requirement::In(values) => values.contains(value),
            Requirement::NotIn(values) => !values.contains(value),
            Requirement::Exists => true,
            Requirement::DoesNotExist => false,
        })
    }

    /// Returns whether labels satisfy it.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.matches_with(|key| labels.get(key).map(String::as_str))
    }

    /// Returns whether labels satisfy it; `label` returns the value of a label.
    pub fn matches_with<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.0.iter().all(|(key, requirement)| match (requirement, label(key)) {
            (Requirement::In(values), Some(value)) => values.contains(value),
            (Requirement::NotIn(values), Some(value)) => !values.contains(value),
            (Requirement::Exists, present) => present.is_some(),
            (Requirement::DoesNotExist, present) => present.is_none(),
            (Requirement::In(_), None) => false,
            (Requirement::NotIn(_), None) => true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(values: &[&str]) -> BTreeSet<String> {
        values.iter().map(|v| (*v).to_owned()).collect()
    }

    #[test]
    fn each_operator_has_kubernetes_meaning() {
        let labels: Labels = [("app".to_owned(), "web".to_owned())].into();
        let check = |key: &str, requirement, expected| {
            let selector = Selector::new([(key.to_owned(), requirement)]);
            assert_eq!(selector.matches(&labels), expected, "{selector:?}");
        };
        check("app", Requirement::In(values(&["web", "db"])), true);
        check("app", Requirement::In(values(&["db"])), false);
        check("tier", Requirement::In(values(&["db"])), false);
        check("app", Requirement::NotIn(values(&["db"])), true);
        check("app", Requirement::NotIn(values(&["web"])), false);
        check("tier", Requirement::NotIn(values(&["web"])), true);
        check("app", Requirement::Exists, true);
        check("tier", Requirement::Exists, false);
        check("app", Requirement::DoesNotExist, false);
        check("tier", Requirement::DoesNotExist, true);
        assert!(Selector::everything().matches(&labels));
    }

    #[test]
    fn labels_that_satisfy_a_selector_match_it() {
        let selector = |requirements: &[(&str, Requirement)]| {
            Selector::new(requirements.iter().map(|(key, requirement)| ((*key).to_owned(), requirement.clone())))
        };
        let given = |requirements: &[(&str, Requirement)]| selector(requirements).satisfying();
        let (web, either) = (values(&["web"]), values(&["db", "web"]));
        for requirements in [
            &[][..],
            &[("app", Requirement::In(either.clone())), ("app", Requirement::NotIn(values(&["db"])))],
            &[("app", Requirement::In(either.clone())), ("app", Requirement::In(web.clone()))],
            &[("app", Requirement::Exists), ("app", Requirement::In(web.clone()))],
            &[
                ("app", Requirement::Exists),
                ("tier", Requirement::DoesNotExist),
                ("tier", Requirement::NotIn(web.clone())),
            ],
        ] {
            let labels = given(requirements).unwrap();
            assert!(selector(requirements).matches(&labels), "{requirements:?}: {labels:?}");
        }
        for requirements in [
            &[("app", Requirement::In(web.clone())), ("app", Requirement::In(values(&["db"])))][..],
            &[("app", Requirement::Exists), ("app", Requirement::DoesNotExist)],
            &[("app", Requirement::In(values(&[])))],
        ] {
            assert_eq!(given(requirements), None, "{requirements:?}");
        }
    }
}
