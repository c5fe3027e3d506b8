//! `egressctl stats`.

use super::ViewSources;
use crate::ctl::print::{Printable, Row, table};
use egress_node::host::firewall::Dropped;
use serde::Serialize;

/// All counters: those of the programs since the maps were made, those of the rules since the nftables table was.
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

impl Printable for StatsView {
    fn text(&self) -> String {
        let (dropped, done): (Vec<_>, Vec<_>) = self.items.iter().partition(|row| row.dropped);
        format!("{}\nDROPPED\n{}", table(done), table(dropped))
    }
}

/// All counters, drops last. `rules`: what nftables rules have dropped.
pub fn stats(sources: ViewSources<'_>, rules: &[Dropped]) -> StatsView {
    let row = |name: &str, help: &str, value: u64| CounterRow {
        name: name.into(),
        value,
        help: help.into(),
        dropped: name.starts_with("drop_"),
    };
    let programs = sources.dump.counters.iter().map(|(counter, value)| row(counter.name(), counter.help(), *value));
    let rules = rules.iter().map(|rule| row(rule.name, rule.help, rule.packets));
    let mut items: Vec<CounterRow> = programs.chain(rules).collect();
    items.sort_by_key(|row| row.dropped);
    StatsView { node: sources.node(), items }
}
