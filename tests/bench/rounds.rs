//! Interleaved rounds: each load in each family runs with all variants in turn, so that a change of the machine affects all of them.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result};
use lab::Family;

use super::figures::{Column, Figure, family_name};
use super::load::{self, Load, METRICS, Metric, Windows};
use super::variant::{BenchLab, Variant};
use xtask::progress::Step;

/// The key of a figure: metric and family.
pub type Key = (Metric, Family);

/// The figures of all loads in both families.
pub struct Rounds(BTreeMap<Key, Figure>);

impl Default for Rounds {
    fn default() -> Self {
        let figure = |(metric, name, unit, _): (Metric, &str, &str, bool), family| {
            ((metric, family), Figure::new(&format!("{name}, {}", family_name(family)), unit, []))
        };
        let figures = METRICS.into_iter().flat_map(|row| Family::BOTH.map(|family| figure(row, family)));
        Self(figures.collect())
    }
}

impl Rounds {
    /// Returns all figures, in the order of the tables.
    pub fn figures(&self) -> impl Iterator<Item = &Figure> {
        self.0.values()
    }

    /// Returns one figure.
    pub fn figure(&self, key: Key) -> &Figure {
        &self.0[&key]
    }

    /// Returns the number of rounds.
    pub fn count(&self) -> usize {
        self.figures().flat_map(|figure| figure.values.values()).map(Vec::len).max().unwrap_or(0)
    }
}

/// Runs `count` rounds of these loads.
pub fn run(places: &[BenchLab], loads: &[Load], count: usize, windows: &Windows) -> Result<Rounds> {
    let mut rounds = Rounds::default();
    let began = Instant::now();
    for round in 0..count {
        let step = Step::start(&format!("round {} of {count}", round + 1));
        for &load in loads {
            for family in Family::BOTH {
                step.at(&format!("{load:?} {family:?}"));
                // The first variant of a round is the last of the next round.
                let mut order: Vec<&BenchLab> = places.iter().collect();
                order.rotate_left(round % places.len());
                for ((metric, variant), values) in run_alternating(order, load, family, windows)? {
                    let figure = rounds.0.get_mut(&(metric, family)).context("a figure")?;
                    figure.values.entry(variant).or_default().push(mean(&values));
                }
            }
        }
        let left = began.elapsed() / (round + 1) as u32 * (count - round - 1) as u32;
        step.end("✓", &format!("about {} s of rounds left", left.as_secs()));
    }
    Ok(rounds)
}

/// Runs one load of a round in short windows that go through the variants back and forth, so that all variants share
/// any change in the machine's speed.
fn run_alternating(
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
        }
        order.reverse();
    }
    Ok(found)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}
