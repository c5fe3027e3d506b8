//! `egressctl top`.

use super::flows::protocol;
use crate::ctl::{
    dump::{Dump, FlowEntry},
    print::{Printable, Row, or_dash, table},
};
use clap::ValueEnum;
use egress_node::host::firewall::Dropped;
use serde::Serialize;
use std::{cmp::Reverse, collections::BTreeMap, fmt, net::SocketAddr};

/// A flow is active if it had a packet within this number of seconds. The value corresponds to two ticks, the unit of idle time.
const ACTIVE: u64 = 2;

/// The key by which flows are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// Their pod
    #[default]
    Pod,
    /// Their egress IP, which the outside sees
    EgressIp,
    /// The node that carries their egress IP
    Gateway,
    /// The policy that they belong to
    Policy,
    /// The remote address
    Remote,
    /// All of it: pod, egress IP, gateway and destination
    Path,
}

/// The data read at one time.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// The maps, with the flows.
    pub dump: Dump,
    /// The drops of nftables rules.
    pub rules: Vec<Dropped>,
}

/// The changes between two samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TopView {
    /// The node's name.
    pub node: Option<String>,
    /// Seconds between the samples.
    pub seconds: f64,
    /// Flows in the table.
    pub flows: usize,
    /// Flows with a packet in the last two seconds.
    pub active: usize,
    /// Flows that appeared, per second. Flows that began and ended between the samples are not counted.
    pub opened_per_second: f64,
    /// Flows that disappeared, per second.
    pub ended_per_second: f64,
    /// Drops by reason, without the reasons that had none.
    pub dropped: Vec<DropRate>,
    /// The key by which flows are counted.
    pub by: By,
    /// The number of items before the limit.
    pub total: usize,
    /// The busiest items.
    pub items: Vec<TopRow>,
}

/// The rate of one drop reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DropRate {
    /// The counter's name.
    pub name: String,
    /// Packets per second.
    pub per_second: f64,
}

/// The path of a pod's flows to one destination.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Path {
    /// `namespace/name`; an address if the pod is gone.
    pub pod: String,
    /// The policy; null for flows that are left alone.
    pub policy: Option<String>,
    /// The egress IP; null as above.
    pub egress_ip: Option<String>,
    /// The node that carries the egress IP; null as above, and while no node does.
    pub gateway: Option<String>,
    /// The destination, as for `egressctl explain --to`.
    pub to: String,
}

/// Flows with the same key.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TopRow {
    /// The pod, egress IP, gateway, policy, remote address or path; `-` for flows without one.
    pub name: String,
    /// The path, if flows are counted by path; otherwise absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<Path>,
    /// Flows in the table.
    pub flows: usize,
    /// Flows with a packet in the last two seconds.
    pub active: usize,
    /// Flows that appeared, per second.
    pub opened_per_second: f64,
}

impl Row for TopRow {
    const HEADER: &'static [&'static str] = &["NAME", "OPENED/s", "ACTIVE", "FLOWS"];
    const NONE: &'static str = "no flows";
    fn cells(&self) -> Vec<String> {
        let opened = format!("{:.1}", self.opened_per_second);
        vec![self.name.clone(), opened, self.active.to_string(), self.flows.to_string()]
    }
}

impl Printable for TopView {
    fn text(&self) -> String {
        let mut text = format!(
            "{}: {} flows, {} active; {:.1} opened/s, {:.1} ended/s, over {:.1} s\n",
            self.node.as_deref().unwrap_or("-"),
            self.flows,
            self.active,
            self.opened_per_second,
            self.ended_per_second,
            self.seconds
        );
        for drop in &self.dropped {
            text += &format!("{} {:.1}/s\n", drop.name, drop.per_second);
        }
        text += &format!("\n{}", table(&self.items));
        if self.total > self.items.len() {
            text += &format!("and {} more\n", self.total - self.items.len());
        }
        text
    }
}

/// Returns a key that distinguishes a flow from every other flow, including an earlier flow with the same 5-tuple.
fn identity(flow: &FlowEntry) -> impl Ord + use<> {
    (flow.key(), flow.flow.created)
}

/// Returns the flows of `all` that are not in `others`. Both must be sorted like dumps.
fn without<'a>(all: &'a [FlowEntry], others: &'a [FlowEntry]) -> impl Iterator<Item = &'a FlowEntry> {
    let mut others = others.iter().map(identity).peekable();
    all.iter().filter(move |flow| {
        let wanted = identity(flow);
        while others.next_if(|other| *other < wanted).is_some() {}
        others.peek() != Some(&wanted)
    })
}

/// Returns the changes between two samples, with the `limit` busiest items.
pub fn top(before: &Sample, now: &Sample, by: By, limit: usize) -> TopView {
    let dump = &now.dump;
    let seconds = (dump.now.saturating_sub(before.dump.now) as f64 / 1e9).max(f64::EPSILON);
    let per_second = |count: usize| count as f64 / seconds;
    let mut groups: BTreeMap<Name, [usize; 3]> = BTreeMap::new();
    for flow in &dump.flows {
        let [flows, active, _] = groups.entry(name(dump, flow, by)).or_default();
        (*flows, *active) = (*flows + 1, *active + usize::from(dump.seconds_since(flow.last_seen()) <= ACTIVE));
    }
    for flow in without(&dump.flows, &before.dump.flows) {
        groups.entry(name(dump, flow, by)).or_default()[2] += 1;
    }
    let mut groups: Vec<(Name, [usize; 3])> = groups.into_iter().collect();
    groups.sort_by_key(|(name, [flows, active, opened])| (Reverse((*opened, *active, *flows)), name.clone()));
    let sum = |which: usize| groups.iter().map(|(_, counts)| counts[which]).sum::<usize>();
    let (active, opened) = (sum(1), sum(2));
    let row = |((name, path), [flows, active, opened]): (Name, [usize; 3])| TopRow {
        name,
        path,
        flows,
        active,
        opened_per_second: per_second(opened),
    };
    TopView {
        node: dump.own_name(),
        seconds,
        flows: dump.flows.len(),
        active,
        opened_per_second: per_second(opened),
        ended_per_second: per_second(without(&before.dump.flows, &dump.flows).count()),
        dropped: dropped(before, now, seconds),
        by,
        total: groups.len(),
        items: groups.into_iter().take(limit).map(row).collect(),
    }
}

/// The key of flows, and their path if they are counted by path.
type Name = (String, Option<Path>);

fn name(dump: &Dump, flow: &FlowEntry, by: By) -> Name {
    let ours = !flow.untouched;
    let egress = dump.egress_ip(flow.flow.egress).filter(|_| ours);
    let pod = || dump.pod_of(flow).unwrap_or_else(|| flow.pod.to_string());
    let egress_ip = || egress.map(|(ip, _)| ip.to_string());
    let gateway = || egress.and_then(|(_, e)| dump.node_name(e.gateway));
    let policy = || ours.then(|| dump.policy_name(flow.flow.policy.into()));
    let found = match by {
        By::Pod => Some(pod()),
        By::EgressIp => egress_ip(),
        By::Gateway => gateway(),
        By::Policy => policy(),
        By::Remote => Some(flow.remote.to_string()),
        By::Path => {
            let to = destination(flow);
            let path = Path { pod: pod(), policy: policy(), egress_ip: egress_ip(), gateway: gateway(), to };
            return (path.to_string(), Some(path));
        }
    };
    (found.unwrap_or_else(|| "-".to_owned()), None)
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Path { pod, egress_ip, gateway, to, .. } = self;
        match egress_ip {
            Some(egress_ip) => write!(f, "{pod} > {egress_ip} > {} > {to}", or_dash(gateway.as_ref())),
            None => write!(f, "{pod} > {to}"),
        }
    }
}

/// Formats a flow's destination as for `egressctl explain --to`.
fn destination(flow: &FlowEntry) -> String {
    let protocol = protocol(flow.proto);
    match flow.remote_port {
        0 => format!("{}/{protocol}", flow.remote),
        port => format!("{}/{protocol}", SocketAddr::new(flow.remote, port)),
    }
}

fn dropped(before: &Sample, now: &Sample, seconds: f64) -> Vec<DropRate> {
    let programs = now.dump.counters.iter().filter(|(counter, _)| counter.name().starts_with("drop_"));
    let programs = programs.map(|(counter, value)| {
        (counter.name(), value.saturating_sub(before.dump.counters.get(counter).copied().unwrap_or(*value)))
    });
    let rules = now.rules.iter().map(|rule| {
        let last = before.rules.iter().find(|last| last.name == rule.name).map_or(rule.packets, |last| last.packets);
        (rule.name, rule.packets.saturating_sub(last))
    });
    let rate = |(name, count): (&str, u64)| DropRate { name: name.to_owned(), per_second: count as f64 / seconds };
    let mut rates: Vec<DropRate> = programs.chain(rules).filter(|(_, count)| *count > 0).map(rate).collect();
    rates.sort_by(|a, b| b.per_second.total_cmp(&a.per_second));
    rates
}

#[cfg(test)]
mod tests {
    use super::super::testing::{dump, flow};
    use super::*;
    use egress_common::verdict::Counter;

    const SECOND: u64 = 1_000_000_000;

    /// Returns two samples two seconds apart. Between them, one flow of web-0 ended, and two flows of web-0 and one of pin-0 began.
    fn samples() -> (Sample, Sample) {
        let before = Sample { dump: dump(), rules: vec![Dropped { name: "drop_astray", help: "", packets: 3 }] };
        let mut now = before.clone();
        now.dump.now += 2 * SECOND;
        now.dump.flows.pop();
        let new = |pod, port, egress| flow(&now.dump, (pod, port), ("203.0.113.9", 443), "web", (egress, port));
        let new =
            [new("10.10.0.5", 5, "192.0.2.10"), new("10.10.0.5", 6, "192.0.2.11"), new("10.10.0.6", 7, "192.0.2.11")];
        now.dump.flows.extend(new);
        now.dump.flows.sort_by_key(identity);
        *now.dump.counters.get_mut(&Counter::DropNoPort).unwrap() += 8;
        *now.dump.counters.get_mut(&Counter::FlowsCreated).unwrap() += 8;
        now.rules[0].packets += 2;
        (before, now)
    }

    fn top_by(by: By, limit: usize) -> TopView {
        let (mut before, now) = samples();
        before.dump.flows.sort_by_key(identity);
        top(&before, &now, by, limit)
    }

    #[test]
    fn top_counts_flows_that_began_or_ended_between_samples() {
        let top = top_by(By::Pod, 10);
        assert_eq!((top.flows, top.opened_per_second, top.ended_per_second), (5, 1.5, 0.5));
        let items: Vec<_> = top.items.iter().map(|row| (row.name.as_str(), row.flows, row.opened_per_second)).collect();
        assert_eq!(items, [("prod/web-0", 4, 1.0), ("prod/pin-0", 1, 0.5)]);
        let dropped: Vec<_> = top.dropped.iter().map(|drop| (drop.name.as_str(), drop.per_second)).collect();
        assert_eq!(dropped, [("drop_no_port", 4.0), ("drop_astray", 1.0)]);
    }

    #[test]
    fn top_groups_flows_by_the_requested_key_and_counts_the_rest() {
        let names = |by| top_by(by, 10).items.into_iter().map(|row| row.name).collect::<Vec<_>>();
        assert_eq!(names(By::EgressIp), ["192.0.2.11", "192.0.2.10", "-"]);
        assert_eq!(names(By::Gateway), ["gw2", "gw1", "-"]);
        assert_eq!(names(By::Policy), ["web", "-"]);
        assert_eq!(names(By::Remote), ["203.0.113.9", "198.51.100.9", "203.0.113.7"]);
        let paths = top_by(By::Path, 1);
        assert_eq!(paths.items[0].name, "prod/pin-0 > 192.0.2.11 > gw2 > 203.0.113.9:443/tcp");
        let path = serde_json::to_value(&paths.items[0]).unwrap()["path"].clone();
        assert_eq!((&path["policy"], &path["to"]), (&"web".into(), &"203.0.113.9:443/tcp".into()));
        let text = top_by(By::Remote, 1).text();
        assert!(text.starts_with("worker1: 5 flows, ") && text.ends_with("and 2 more\n"), "{text}");
        assert!(text.contains("drop_no_port 4.0/s\n") && text.lines().all(|line| line.len() <= 100), "{text}");
    }

    #[test]
    fn top_counts_a_flow_with_a_reused_5_tuple_as_new() {
        let (before, mut now) = samples();
        now.dump.flows = before.dump.flows.clone();
        now.dump.flows[0].flow.created += 1;
        let top = top(&before, &now, By::Pod, 1);
        assert_eq!((top.opened_per_second, top.ended_per_second), (0.5, 0.5));
    }
}
