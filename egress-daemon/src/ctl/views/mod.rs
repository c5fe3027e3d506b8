//! Views: the output of commands, as pure functions of the maps and of the agent's report.

mod blocks;
mod endpoints;
mod flows;
mod gateways;
mod ips;
mod policies;
mod stats;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod top;

pub use blocks::{BlockRow, blocks};
pub use endpoints::{EndpointRow, endpoints};
pub use flows::{FlowFilter, FlowRow, FlowsView, flows};
pub(crate) use flows::{TRANSLATED, protocol, row};
pub use gateways::{GatewayRow, gateways};
pub(crate) use ips::epoch;
pub use ips::{IpRow, ips};
pub use policies::{PolicyRow, SlotRow, policies};
pub use stats::{CounterRow, StatsView, stats};
pub use top::{By, DropRate, Sample, TopRow, TopView, top};

use super::{dump::Dump, print::List};
use crate::observe::state::{AgentState, ConditionState};
use std::collections::{BTreeMap, BTreeSet};

/// The two sources of a view.
#[derive(Clone, Copy)]
pub struct ViewSources<'a> {
    /// The maps.
    pub dump: &'a Dump,
    /// The agent's report, if it answers.
    pub agent: Option<&'a AgentState>,
}

impl ViewSources<'_> {
    /// Returns the node's name.
    pub fn node(&self) -> Option<String> {
        let told = self.agent.map(|agent| agent.node.name.clone()).filter(|name| !name.is_empty());
        told.or_else(|| self.dump.own_name())
    }

    fn list<R>(&self, items: Vec<R>) -> List<R> {
        List { node: self.node(), agent_answered: self.agent.is_some(), items }
    }
}

/// Returns the policies of each class.
fn policies_by_class(dump: &Dump) -> BTreeMap<u32, BTreeSet<u32>> {
    let mut all: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for (class, _, policy) in dump.routes().filter(|(_, _, policy)| *policy != 0) {
        all.entry(class).or_default().insert(policy);
    }
    all
}

/// Formats the condition `Ready`, or the first condition, for one cell: its status, and its reason unless the status is True.
fn ready(conditions: &[ConditionState]) -> Option<String> {
    let condition = conditions.iter().find(|c| c.kind == "Ready").or_else(|| conditions.first())?;
    let good = condition.status == "True" || condition.reason.is_empty();
    Some(if good { condition.status.clone() } else { format!("{} ({})", condition.status, condition.reason) })
}
