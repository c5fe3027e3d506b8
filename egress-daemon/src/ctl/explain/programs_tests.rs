//! Compares the answer of `egressctl explain` for a packet with the action of the loaded programs, for arbitrary tables and random packets.

use super::{PacketAction, Protocol, Question, explain};
use crate::ctl::{dump::Dump, views::ViewSources};
use egress_common::verdict::Counter;
use egress_core::encode::NodeView;
use egress_node::datapath::{
    load::Sizes,
    testing::{
        Random,
        frames::{ICMP, ICMPV6, TCP, UDP, icmp, ip, read, seal, tcp, udp},
        rig::*,
        scenes,
        tables::FlowTables,
    },
};
use proptest::{
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};
use std::{cell::RefCell, collections::BTreeMap, net::IpAddr};

const SYN: u8 = 2;
const ACK: u8 = 16;
/// The number of packets for each set of tables.
const PACKETS: u16 = 24;
/// Addresses that belong to pods in some views, and one that belongs to no pod.
const OTHER_PODS: [&str; 3] = ["10.1.0.1", "10.1.0.99", "fd00::2"];
/// Destinations inside and outside each prefix of `scenes::view`, excepted destinations, and destinations that never leave the node.
const TARGETS: [&str; 11] = [
    "198.51.100.5",
    "198.51.100.200",
    "203.0.113.7",
    "203.0.113.8",
    "10.0.0.4",
    "224.0.0.5",
    "169.254.1.1",
    "2001:db8:f::5",
    "2001:db8:a::5",
    "fd00::77",
    "ff02::5",
];
/// Drop reasons of a gateway that lacks interfaces. The tables do not determine these drops.
const OUTSIDE: [Counter; 2] = [Counter::DropNoUplink, Counter::DropNoNextHop];

/// A packet to explain.
#[derive(Clone, Copy, Debug)]
struct Asked {
    pod: IpAddr,
    to: IpAddr,
    protocol: Protocol,
    port: u16,
    from_port: u16,
}

impl Asked {
    fn random(random: &mut Random, pods: &[IpAddr], from_port: u16) -> Self {
        let pod = random.of(pods);
        let targets: Vec<IpAddr> =
            TARGETS.iter().map(|target| addr(target)).filter(|target| target.is_ipv4() == pod.is_ipv4()).collect();
        let protocol = random.of(&[Protocol::Tcp, Protocol::Tcp, Protocol::Udp, Protocol::Icmp, Protocol::Other(47)]);
        let port = if matches!(protocol, Protocol::Tcp | Protocol::Udp) { random.of(&[443, 53]) } else { 0 };
        Self { pod, to: random.of(&targets), protocol, port, from_port }
    }

    fn question(&self) -> Question {
        let Self { pod, to, protocol, port, from_port } = *self;
        Question { pod: pod.to_string(), to, port, protocol, from_port: Some(from_port) }
    }

    fn frame(&self, flags: u8) -> Vec<u8> {
        let (proto, body) = match self.protocol {
            Protocol::Tcp => (TCP, tcp(self.from_port, self.port, flags, &[])),
            Protocol::Udp => (UDP, udp(self.from_port, self.port, b"question")),
            Protocol::Icmp if self.pod.is_ipv4() => (ICMP, icmp(8, self.from_port, b"ping")),
            Protocol::Icmp => (ICMPV6, icmp(128, self.from_port, b"ping")),
            Protocol::Other(number) => return ip(self.pod, self.to, number, &[], b"another protocol"),
        };
        seal(ip(self.pod, self.to, proto, &[], &body))
    }
}

/// The actions, with drop reasons, that must each occur more than twenty times.
const ACTIONS: [&str; 5] =
    ["Sent ", "Passed ", "Dropped drop_no_gateway", "Dropped drop_no_port", "Dropped drop_protocol"];

struct Explained {
    rig: Rig,
    tables: FlowTables,
    /// The number of correct explanations for each action.
    right: BTreeMap<String, usize>,
}

impl Explained {
    /// Compares the program's action with the explanation from the maps. Returns a description of any difference.
    fn compare(&mut self, asked: &Asked, dump: &Dump) -> Result<(), String> {
        let said = explain(ViewSources { dump, agent: None }, &asked.question()).unwrap();
        // For a connection that does not exist, `explain` describes its first segment.
        let flags = if said.flow.is_some() { ACK } else { SYN };
        let counters = self.rig.writer.maps().counters().unwrap();
        let frame = asked.frame(flags);
        let Some((code, out)) = self.rig.try_run("pod_egress", &frame) else { return Ok(()) };
        let now = self.rig.writer.maps().counters().unwrap();
        let dropped: Vec<&str> = Counter::ALL
            .iter()
            .filter(|counter| counter.name().starts_with("drop_") && now[counter] > counters[counter])
            .map(|counter| counter.name())
            .collect();
        let outcome = &said.outcome;
        let right = match outcome.action {
            PacketAction::Sent => {
                let source = read(&out).map(|frame| frame.src);
                code == REDIRECT && source == outcome.egress_ip
                    || code == SHOT && OUTSIDE.iter().any(|counter| dropped == [counter.name()])
            }
            PacketAction::Passed => code == NEXT && out == frame,
            PacketAction::Dropped => code == SHOT && outcome.counter.is_some_and(|counter| dropped == [counter]),
            PacketAction::Depends => false,
        };
        if !right {
            let source = read(&out).map(|frame| frame.src);
            return Err(format!(
                "{asked:?}, flags {flags}: code {code}, source {source:?}, {dropped:?}, but {said:#?}"
            ));
        }
        *self.right.entry(format!("{:?} {}", outcome.action, outcome.counter.unwrap_or_default())).or_default() += 1;
        Ok(())
    }

    fn case(&mut self, mut view: NodeView, seed: u64) -> Result<(), String> {
        self.tables.clear();
        // For a packet that no policy covers the explanation would end early.
        for (class, table) in &mut view.classes {
            for everything in ["0.0.0.0/0", "::/0"].map(|net| net.parse().unwrap()) {
                if table.iter().all(|(net, _)| *net != everything) {
                    table.push((everything, class.first().cloned()));
                }
            }
        }
        for (egress, block) in view.egress_ips.values_mut().zip(6..).step_by(2) {
            egress.gateway.get_or_insert_with(|| scenes::node(1));
            egress.blocks.insert(block);
            egress.leases.insert(block, scenes::node(0));
        }
        view.nodes.entry(scenes::node(1)).or_insert_with(|| vec![addr("10.0.0.1")]);
        self.rig.write(&view);
        let selected = view.endpoints.values().filter(|endpoint| !endpoint.class.is_empty());
        let mut pods: Vec<IpAddr> = selected.flat_map(|endpoint| endpoint.ips.iter().copied()).collect();
        pods.extend(OTHER_PODS.map(addr));
        let mut random = Random(seed);
        let all: Vec<Asked> = (0..PACKETS).map(|n| Asked::random(&mut random, &pods, 40_000 + n)).collect();
        // The first round sends the first packets of flows, the second round packets of existing flows.
        for _ in 0..2 {
            let dump = Dump::read(self.rig.pins(), true).unwrap();
            all.iter().try_for_each(|asked| self.compare(asked, &dump))?;
        }
        Ok(())
    }
}

#[test]
fn explain_agrees_with_the_loaded_programs() {
    let Some(rig) = Rig::of_size("explain", &scene(), Sizes { max_flows: 4096, ..Sizes::default() }) else {
        return;
    };
    let tables = FlowTables::open(rig.pins());
    let explained = RefCell::new(Explained { rig, tables, right: BTreeMap::new() });
    let case = |(view, seed): (NodeView, u64)| explained.borrow_mut().case(view, seed).map_err(TestCaseError::fail);
    // Random views do not cause each action equally often.
    for _ in 0..10 {
        let mut runner = TestRunner::new(Config {
            cases: 150,
            max_shrink_iters: 100,
            failure_persistence: None,
            ..Config::default()
        });
        runner.run(&(scenes::view(), any::<u64>()), case).unwrap_or_else(|error| panic!("{error}"));
        let right = &explained.borrow().right;
        if ACTIONS.iter().all(|action| right.get(*action).is_some_and(|count| *count > 20)) {
            return;
        }
    }
    panic!("the test has lost its subject: {:?}", explained.into_inner().right);
}
