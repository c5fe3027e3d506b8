//! `egressctl stats`.

use super::ViewSources;
use crate::ctl::print::{Printable, Row, table};
use egress_node::host::firewall::Dropped;
use serde::Serialize;

/// All counters: of the programs since the maps were created, and of the rules since the nftables table was created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StatsView {
    /// The node's name.
    pub node: Option<String>,
    /// The counters, with drops last.
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
    /// A description of what it counts.
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

/// Returns all counters, drops last. `rules` are the drops of nftables rules.
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
