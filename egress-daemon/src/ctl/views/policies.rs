//! `egressctl policies`.

use super::{ViewSources, policies_by_class, ready};
use crate::{
    ctl::{
        dump::Dump,
        print::{List, Row, or_dash},
    },
    observe::state::{ConditionState, PolicyState},
};
use egress_common::endpoint::{Policy, policy_flags};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// A policy in force on this node, or known to its agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyRow {
    /// Its name: `web`, `cegp/web`, `egress/web`.
    pub name: String,
    /// `PerFlow` or `PerEndpoint`; null for a policy whose distribution the agent does not report.
    pub distribution: Option<String>,
    /// Its slots in the maps, sorted by address; empty for a policy that selects no pod here.
    pub slots: Vec<SlotRow>,
    /// The number of pods of this node that it selects.
    pub endpoints: usize,
    /// The number of destinations that lead to it, over all classes.
    pub prefixes: usize,
    /// `Drop` or `NodeIP`, for new flows without a usable slot; null for a policy that is not in the maps.
    pub on_no_gateway: Option<String>,
    /// `Keep` or `Drop`, for connections from before the policy; null as above.
    pub existing_connections: Option<String>,
    /// The condition `Ready`; null if the agent does not answer.
    pub ready: Option<String>,
    /// The problems that the agent reports for it: the messages of `Ready`, `Degraded` and `Conflicting`.
    pub problems: Vec<String>,
}

/// One slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SlotRow {
    /// The egress IP.
    pub egress_ip: IpAddr,
    /// Its weight.
    pub weight: u32,
    /// Its owner; null for none.
    pub owner: Option<String>,
    /// Whether new flows may choose it.
    pub usable: bool,
    /// Its share of the table that new flows of its address family are hashed into, in percent, rounded.
    pub share_percent: u32,
}

impl Row for PolicyRow {
    const HEADER: &'static [&'static str] =
        &["POLICY", "DISTRIBUTION", "EGRESS IPS (share, owner)", "PODS HERE", "NO GATEWAY", "READY"];
    const NONE: &'static str = "no policy selects a pod of this node";
    fn cells(&self) -> Vec<String> {
        let slot = |s: &SlotRow| {
            let down = if s.usable { "" } else { ", not for new flows" };
            format!("{} ({} %, {}{down})", s.egress_ip, s.share_percent, or_dash(s.owner.as_ref()))
        };
        vec![
            self.name.clone(),
            or_dash(self.distribution.as_ref()),
            if self.slots.is_empty() { "-".into() } else { self.slots.iter().map(slot).collect::<Vec<_>>().join("\n") },
            self.endpoints.to_string(),
            or_dash(self.on_no_gateway.as_ref()),
            self.problems.iter().fold(or_dash(self.ready.as_ref()), |cell, problem| format!("{cell}\n{problem}")),
        ]
    }
}

/// Returns every policy in the maps, and the policies that only the agent knows.
pub fn policies(sources: ViewSources<'_>) -> List<PolicyRow> {
    let dump = sources.dump;
    let by_class = policies_by_class(dump);
    let mut endpoints: BTreeMap<u32, usize> = BTreeMap::new();
    for (endpoint, _) in dump.endpoints().values() {
        for policy in by_class.get(&endpoint.class).into_iter().flatten() {
            *endpoints.entry(*policy).or_default() += 1;
        }
    }
    let mut prefixes: BTreeMap<u32, usize> = BTreeMap::new();
    for (_, _, policy) in dump.routes() {
        *prefixes.entry(policy).or_default() += 1;
    }
    let indices: BTreeSet<u32> = dump.tables.policies.keys().map(|key| key.policy).collect();
    let mut rows: BTreeMap<String, PolicyRow> = BTreeMap::new();
    for index in indices {
        let [v4, v6] = [false, true].map(|ipv6| dump.policy(index, ipv6));
        // The entry of a family that waits for port blocks lacks the bit for `NodeIP`.
        let flags = [v4, v6].into_iter().flatten().fold(0, |flags, policy| flags | policy.flags);
        let either = |flag, yes: &str, no: &str| Some(if flags & flag != 0 { yes } else { no }.to_owned());
        let name = dump.policy_name(index);
        let row = PolicyRow {
            name: name.clone(),
            distribution: either(policy_flags::PER_ENDPOINT, "PerEndpoint", "PerFlow"),
            slots: slots(dump, index, [v4, v6]),
            endpoints: endpoints.get(&index).copied().unwrap_or(0),
            prefixes: prefixes.get(&index).copied().unwrap_or(0),
            on_no_gateway: either(policy_flags::ON_NO_GATEWAY_NODE_IP, "NodeIP", "Drop"),
            existing_connections: either(policy_flags::EXISTING_DROP, "Drop", "Keep"),
            ready: None,
            problems: Vec::new(),
        };
        rows.insert(name, row);
    }
    for told in sources.agent.iter().flat_map(|agent| &agent.policies) {
        let row = rows.entry(told.name.clone()).or_insert_with(|| elsewhere(told));
        row.ready = ready(&told.conditions);
        // A policy that is not Programmed is not Ready either, and the condition `Ready` states the reason.
        let says = |c: &&ConditionState| c.kind != "Programmed" && !c.message.is_empty();
        let wrong = |c: &&ConditionState| says(c) && (c.kind == "Ready") != (c.status == "True");
        row.problems = told.conditions.iter().filter(wrong).map(|c| c.message.clone()).collect();
    }
    sources.list(rows.into_values().collect())
}

/// Returns the row of a policy that selects no pod of this node.
fn elsewhere(told: &PolicyState) -> PolicyRow {
    PolicyRow {
        name: told.name.clone(),
        distribution: Some(told.distribution.clone()).filter(|text| !text.is_empty()),
        slots: Vec::new(),
        endpoints: 0,
        prefixes: 0,
        on_no_gateway: None,
        existing_connections: None,
        ready: None,
        problems: Vec::new(),
    }
}

fn slots(dump: &Dump, policy: u32, families: [Option<&Policy>; 2]) -> Vec<SlotRow> {
    let mut entries: BTreeMap<u32, u32> = BTreeMap::new();
    for table in families.into_iter().flatten() {
        for egress in (0..table.table_len).filter_map(|at| dump.maglev(table, at)) {
            *entries.entry(egress).or_default() += 1;
        }
    }
    let members = dump.tables.members.iter().filter(|(key, _)| key.policy == policy);
    let mut slots: Vec<SlotRow> = members
        .filter_map(|(key, member)| {
            let (egress_ip, e) = dump.egress_ip(key.egress)?;
            let len = families[usize::from(egress_ip.is_ipv6())].map_or(0, |table| table.table_len);
            let entries = entries.get(&key.egress).copied().unwrap_or(0);
            Some(SlotRow {
                egress_ip,
                weight: member.weight,
                owner: dump.node_name(e.gateway),
                usable: member.usable != 0 && member.generation == e.generation,
                share_percent: (entries * 100 + len / 2).checked_div(len).unwrap_or(0),
            })
        })
        .collect();
    slots.sort_by_key(|slot| slot.egress_ip);
    slots
}
