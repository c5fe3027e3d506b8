//! `egressctl state`: everything that the agent created on this node, and the agent's state.

use super::{
    inventory::{Inventory, Map, Program},
    print::{Printable, Row, or_dash, table},
};
use crate::observe::state::{AgentState, ConditionState, NodeState, ProblemState};
use serde::Serialize;
use std::fmt::Write;

/// The state of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StateView {
    /// The node's name.
    pub node: Option<String>,
    /// The agent's report about itself; null if it does not answer.
    pub agent: Option<NodeState>,
    /// The node's conditions, as the agent reports them.
    pub conditions: Vec<ConditionState>,
    /// The problems that the agent reports.
    pub problems: Vec<ProblemState>,
    /// The memory of all maps, in bytes.
    pub map_memory_bytes: u64,
    /// Everything that the agent created.
    #[serde(flatten)]
    pub inventory: Inventory,
}

/// Assembles the state.
pub fn state(inventory: Inventory, agent: Option<&AgentState>, own: Option<String>) -> StateView {
    let told = agent.map(|agent| agent.node.name.clone()).filter(|name| !name.is_empty());
    StateView {
        node: told.or(own),
        agent: agent.map(|agent| agent.node.clone()),
        conditions: agent.map(|agent| agent.conditions.clone()).unwrap_or_default(),
        problems: agent.map(|agent| agent.problems.clone()).unwrap_or_default(),
        map_memory_bytes: inventory.maps.iter().filter_map(|map| map.memory_bytes).sum(),
        inventory,
    }
}

impl Row for Map {
    const HEADER: &'static [&'static str] =
        &["MAP", "KIND", "CAPACITY", "KEY (bytes)", "VALUE (bytes)", "MEMORY (KiB)"];
    const NONE: &'static str = "no pinned maps";
    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.kind.clone(),
            self.capacity.to_string(),
            self.key_bytes.to_string(),
            self.value_bytes.to_string(),
            or_dash(self.memory_bytes.map(|bytes| bytes.div_ceil(1024))),
        ]
    }
}

impl Row for Program {
    const HEADER: &'static [&'static str] = &["PROGRAM", "ID", "VERIFIED INSTRUCTIONS", "MEMORY (KiB)", "ATTACHED TO"];
    const NONE: &'static str = "no programs";
    fn cells(&self) -> Vec<String> {
        let places: Vec<String> = self
            .attached
            .iter()
            .map(|hook| {
                let name = hook.interface.clone().unwrap_or_else(|| format!("(gone) {}", hook.ifindex));
                format!("{name} {} ({})", hook.direction, hook.mode)
            })
            .collect();
        vec![
            self.name.clone(),
            self.id.to_string(),
            or_dash(self.verified_instructions),
            or_dash(self.memory_bytes.map(|bytes| bytes.div_ceil(1024))),
            if places.is_empty() { "-".into() } else { places.join("\n") },
        ]
    }
}

fn agent_text(agent: &NodeState) -> String {
    let lease = match agent.lease_held {
        None => "no gateway",
        Some(true) => "gateway, holds its lease",
        Some(false) => "gateway, does NOT hold its lease",
    };
    let store = if agent.store_connected { "" } else { ", NOT CONNECTED" };
    let addresses: Vec<String> = agent.tunnel_addresses.iter().map(ToString::to_string).collect();
    let bypass = agent.bypass.iter().map(|stranger| {
        format!("  SYN+ACKs of selected pods are not checked: packets may be delivered to pods without passing our programs,\n    by {stranger}\n")
    });
    let bypass: String = bypass.collect();
    format!(
        "version {}, process {}, up {} s, {lease}\n  objects: {}{store}\n  transport {}, firewall {}, attached by {}, \
         tunnel address {}, blocks up to revision {}\n{bypass}",
        agent.version,
        agent.pid,
        agent.uptime_seconds,
        agent.store,
        agent.transport,
        agent.firewall,
        agent.attach,
        if addresses.is_empty() { "-".into() } else { addresses.join(" ") },
        agent.lease_revision,
    )
}

/// Writes a heading and its lines, or `none`.
fn section(text: &mut String, heading: &str, lines: impl IntoIterator<Item = String>) {
    let mut lines = lines.into_iter().peekable();
    if lines.peek().is_none() {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{heading}: none");
        return;
    }
    let _ = writeln!(text, "{heading}:");
    for line in lines {
        let _ = writeln!(text, "  {line}");
    }
}

impl Printable for StateView {
    fn text(&self) -> String {
        let inventory = &self.inventory;
        let mut text = format!("NODE {}\n", or_dash(self.node.as_ref()));
        text += "AGENT: ";
        text += &self.agent.as_ref().map_or_else(|| "does not answer\n".to_owned(), agent_text);
        let condition = |c: &ConditionState| format!("{}={} {} {}", c.kind, c.status, c.reason, c.message);
        let problem = |p: &ProblemState| {
            let field = p.field.as_ref().map(|field| format!(" {field}")).unwrap_or_default();
            format!("{}{field}: {}; {}", p.object, p.message, p.remedy)
        };
        if self.agent.is_some() {
            section(&mut text, "CONDITIONS", self.conditions.iter().map(condition));
            section(&mut text, "PROBLEMS", self.problems.iter().map(problem));
        }
        text += &format!("\n{}\n{}", table(&inventory.programs), table(&inventory.maps));
        let _ = writeln!(text, "all maps: {} KiB\n", self.map_memory_bytes.div_ceil(1024));
        section(
            &mut text,
            "TUNNEL DEVICES",
            inventory.tunnels.iter().map(|device| format!("{} (ifindex {})", device.name, device.ifindex)),
        );
        section(
            &mut text,
            "CHANGED KERNEL SETTINGS",
            inventory
                .sysctls
                .iter()
                .map(|change| format!("{} = {} (was {})", change.key, change.value, change.previous)),
        );
        section(&mut text, "RULES", inventory.rules.iter().cloned());
        section(&mut text, "FILES", inventory.files.iter().map(|file| file.display().to_string()));
        let pins = inventory.pins.len();
        let _ = writeln!(
            text,
            "PINS: {pins}{}",
            inventory.pins.last().map_or(String::new(), |root| format!(" in {}", root.display()))
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ctl::{
        inventory::{Attachment, SysctlChange, TunnelDevice},
        print::{Output, print},
    };

    fn inventory() -> Inventory {
        let hook = Attachment {
            interface: Some("veth1".into()),
            ifindex: 7,
            direction: "ingress".into(),
            mode: "tcx".into(),
            pin: Some("/sys/fs/bpf/spillway/v1/links/pod_egress-7".into()),
        };
        Inventory {
            programs: vec![Program {
                name: "pod_egress".into(),
                id: 41,
                verified_instructions: Some(9_000),
                memory_bytes: Some(8_192),
                attached: vec![hook.clone(), Attachment { interface: None, ifindex: 9, ..hook }],
            }],
            maps: vec![Map {
                name: "FLOWS_V4".into(),
                id: 3,
                kind: "Hash".into(),
                capacity: 131_072,
                key_bytes: 16,
                value_bytes: 36,
                memory_bytes: Some(5_000),
            }],
            pins: vec!["/sys/fs/bpf/spillway/v1".into(), "/sys/fs/bpf/spillway".into()],
            tunnels: vec![TunnelDevice { name: "spillway0".into(), ifindex: 4 }],
            sysctls: vec![SysctlChange { key: "net/ipv4/ip_forward".into(), value: "1".into(), previous: "0".into() }],
            rules: vec![],
            files: vec!["/run/spillway/a.lock".into()],
        }
    }

    #[test]
    fn state_works_without_an_agent() {
        let view = state(inventory(), None, Some("worker1".into()));
        let text = print(&view, Output::Table).unwrap();
        for part in [
            "NODE worker1\nAGENT: does not answer\n",
            "veth1 ingress (tcx)",
            "(gone) 9",
            "all maps: 5 KiB",
            "spillway0 (ifindex 4)",
            "net/ipv4/ip_forward = 1 (was 0)",
            "RULES: none",
            "PINS: 2 in /sys/fs/bpf/spillway",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        let json: serde_json::Value = serde_json::from_str(&print(&view, Output::Json).unwrap()).unwrap();
        assert_eq!(json["programs"][0]["attached"][0]["interface"], "veth1");
        assert_eq!((&json["mapMemoryBytes"], &json["agent"]), (&5_000.into(), &serde_json::Value::Null));
    }

    #[test]
    fn the_agents_state_is_printed() {
        let problem = ProblemState {
            object: "EgressGatewayPolicy web".into(),
            field: Some("spec.zone".into()),
            message: "unknown mode".into(),
            remedy: "write Any".into(),
        };
        let bypass = Some("program cil_from_netdev at eth0 ingress (tcx)".into());
        let node = NodeState { name: "gw1".into(), lease_held: Some(false), bypass, ..NodeState::default() };
        let agent = AgentState { node, problems: vec![problem], ..AgentState::default() };
        let text = state(Inventory::default(), Some(&agent), None).text();
        for part in [
            "NODE gw1\n",
            "does NOT hold its lease",
            "NOT CONNECTED",
            "spec.zone: unknown mode; write Any",
            "by program cil_from_netdev at eth0",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
}
