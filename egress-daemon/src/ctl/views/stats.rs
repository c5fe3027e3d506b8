//! `egressctl stats`.

use super::Sources;
use crate::ctl::print::{Row, View, table};
use serde::Serialize;

/// All counters since the maps were made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StatsView {
    /// The node's name.
    pub node: Option<String>,
    /// What was done, then what was dropped.
    pub items: Vec<CounterRow>,
}

/// One counter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CounterRow {
    /// Its name. Names that begin with `drop_` count dropped packets.
    pub name: String,
    /// Its value, summed over the CPUs.
    pub value: u64,
    /// What it counts.
    pub help: String,
    /// Whether it counts dropped packets.
    pub dropped: bool,
}

impl Row for CounterRow {
    const HEADER: &'static [&'static str] = &["COUNTER", "VALUE", "WHAT IT COUNTS"];
    const NONE: &'static str = "no counters";
    fn cells(&self) -> Vec<String> {
        vec![self.name.clone(), self.value.to_string(), self.help.clone()]
    }
}

impl View for StatsView {
    fn text(&self) -> String {
        let (dropped, done): (Vec<_>, Vec<_>) = self.items.iter().partition(|row| row.dropped);
        format!("{}\nDROPPED\n{}", table(done), table(dropped))
    }
}

/// All counters, drops last.
pub fn stats(sources: Sources<'_>) -> StatsView {
    let mut items: Vec<CounterRow> = sources
        .dump
        .counters
        .iter()
        .map(|(counter, value)| CounterRow {
            name: counter.name().into(),
            value: *value,
            help: counter.help().into(),
            dropped: counter.name().starts_with("drop_"),
        })
        .collect();
    items.sort_by_key(|row| row.dropped);
    StatsView { node: sources.node(), items }
}
