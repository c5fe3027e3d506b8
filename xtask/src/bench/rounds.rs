//! The interleaved rounds: each load in each family, in each variant in turn, so that a change of the machine affects
//! all of them.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result};
use lab::Family;
use lab::stats::Percentiles;

use super::load::{self, Load, Metric, Windows};
use super::variant::{BenchLab, Variant};
use crate::interrupt;
use crate::progress::Step;

/// A figure: what, in which family.
pub type Key = (Metric, Family);

/// The values of each figure of each variant, one for each round.
#[derive(Debug, Default)]
pub struct Rounds {
    values: BTreeMap<(Key, Variant), Vec<f64>>,
}

/// The middle of several values, and their range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// `None` for no values.
    pub fn of(values: &[f64]) -> Option<Spread> {
        let (min, max) = (values.iter().copied().reduce(f64::min)?, values.iter().copied().reduce(f64::max)?);
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Some(Spread { median: (low + high) / 2.0, min, max })
    }
}

impl Rounds {
    /// The values of one variant.
    pub fn spread(&self, key: Key, variant: Variant) -> Option<Spread> {
        Spread::of(self.values.get(&(key, variant))?)
    }

    /// The values of one variant relative to another one's of the same round.
    pub fn ratio(&self, key: Key, variant: Variant, to: Variant) -> Option<Spread> {
        let (ours, theirs) = (self.values.get(&(key, variant))?, self.values.get(&(key, to))?);
        Spread::of(&ours.iter().zip(theirs).map(|(a, b)| a / b).collect::<Vec<_>>())
    }

    /// How many rounds there are.
    pub fn count(&self) -> usize {
        self.values.values().map(Vec::len).max().unwrap_or(0)
    }
}

/// Makes `count` rounds of these loads.
pub fn run(places: &[BenchLab], loads: &[Load], count: usize, windows: &Windows) -> Result<Rounds> {
    let mut rounds = Rounds::default();
    let began = Instant::now();
    for round in 0..count {
        let step = Step::start(&format!("round {} of {count}", round + 1));
        for &load in loads {
            for family in Family::BOTH {
                step.at(&format!("{load:?} {family:?}"));
                // The first in a round is the last in the next one.
                let mut order: Vec<&BenchLab> = places.iter().collect();
                order.rotate_left(round % places.len());
                for ((metric, variant), values) in in_turns(order, load, family, windows)? {
                    rounds.values.entry(((metric, family), variant)).or_default().push(mean(&values));
                }
            }
        }
        let left = began.elapsed() / (round + 1) as u32 * (count - round - 1) as u32;
        step.end("✓", &format!("about {} s of rounds left", left.as_secs()));
    }
    Ok(rounds)
}

/// One load of a round, in short windows that go through the variants there and back, so that a machine that becomes slower or
/// faster meanwhile does so for all.
fn in_turns(
    mut order: Vec<&BenchLab>,
    load: Load,
    family: Family,
    windows: &Windows,
) -> Result<BTreeMap<(Metric, Variant), Vec<f64>>> {
    let mut found: BTreeMap<_, Vec<f64>> = BTreeMap::new();
    for _ in 0..windows.turns {
        for place in &order {
            let values = load::run(place, load, family, windows)
                .with_context(|| format!("{load:?} {family:?}, {}", place.variant.title()))?;
            for (metric, value) in values {
                found.entry((metric, place.variant)).or_default().push(value);
            }
            interrupt::wait_if_interrupted();
        }
        order.reverse();
    }
    Ok(found)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The median of what `measure` returns in several turns.
pub fn median(turns: usize, mut measure: impl FnMut() -> Result<f64>) -> Result<f64> {
    let values: Vec<f64> = (0..turns).map(|_| measure()).collect::<Result<_>>()?;
    Ok(Percentiles::of(values).p50)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_round_by_round() {
        let key = (Metric::UdpSmall, Family::V4);
        let mut rounds = Rounds::default();
        // The machine is twice as fast in the second round and four times as fast in the third.
        rounds.values.insert((key, Variant::Plain), vec![100.0, 200.0, 400.0]);
        rounds.values.insert((key, Variant::Device), vec![50.0, 90.0, 240.0]);
        let ratio = rounds.ratio(key, Variant::Device, Variant::Plain).unwrap();
        assert_eq!((ratio.median, ratio.min, ratio.max), (0.5, 0.45, 0.6));
        assert_eq!(rounds.spread(key, Variant::Device).unwrap().median, 90.0);
        assert_eq!(rounds.ratio(key, Variant::Direct, Variant::Plain), None);
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(Spread::of(&[4.0, 1.0, 3.0, 2.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of(&[]), None);
    }
}
