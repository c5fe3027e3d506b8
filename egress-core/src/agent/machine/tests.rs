//! Tests the order of the machine's actions and how it handles failures.

mod hosts;
mod pace;

use super::*;
use crate::{
    agent::{
        facts::LeftInUse,
        ports::Ports,
        view_tests::{FactsFixture, OWNED, carried_by, ip, report},
    },
    encode::{
        NodeView,
        fit::Refused,
        tables::{Overflow, Table},
    },
    model::{Announce, Bandwidth, Endpoint, EndpointId, PolicyId, PolicyKind, Transport},
    network::{
        Route,
        links::{Link, LinkKind},
    },
    testing::link,
};
use egress_common::config::{self, flags};

const POD: u32 = 9;

/// Stands in for the agent around the machine: it carries out all actions except those in `fails`.
struct Shell {
    machine: Machine,
    now: Duration,
    fails: BTreeSet<&'static str>,
    /// How long a write of the tables takes.
    takes: Duration,
    /// How long a count of ports takes.
    count_takes: Duration,
    /// The actions of the last run, each with its name.
    done: Vec<(String, Action)>,
    /// The errors that were published last.
    published: Vec<String>,
}

impl Shell {
    fn new(world: &FactsFixture) -> Self {
        Self::after(world, Left::default())
    }

    /// Creates an agent that follows one that has `left` something.
    fn after(world: &FactsFixture, left: Left) -> Self {
        let settings = MachineSettings {
            rules: InterfaceRules::default(),
            probe: Default::default(),
            lease_duration: Duration::from_secs(15),
            deadline: Duration::from_secs(10),
            start_limit: Duration::from_secs(60),
            transport: Transport::Device,
            tunnel_mtu: 1500,
            config: config::DatapathConfig { flags: flags::RESPECT_FIREWALL, ..config::UNSET },
            clock: Duration::ZERO,
        };
        let mut links = world.links.clone();
        let pod = Link { kind: LinkKind::Veth, peer_netns: Some(1), ..link(POD, "veth0") };
        links.links.insert(POD, pod);
        links.host_routes.insert(ip("10.1.0.1"), POD);
        let (node, objects, links) = ("me".into(), objects(world), Arc::new(links));
        let facts = Facts { node, objects, links, tunnel: 8, ..Facts::default() };
        let machine = Machine::new(settings, left, facts);
        let [now, takes, count_takes] = [Duration::ZERO; 3];
        Self { machine, now, fails: BTreeSet::new(), takes, count_takes, done: Vec::new(), published: Vec::new() }
    }

    /// Carries out the actions. Returns their names, except for probes.
    fn run(&mut self) -> Vec<String> {
        self.done.clear();
        while let Some(action) = self.machine.poll_action(self.now) {
            let name = name(&action);
            match self.fails.contains(&*name) {
                true => self.fail(&action, &name),
                false => self.answer(action.clone()),
            }
            self.done.push((name, action));
        }
        self.done.iter().map(|(name, _)| name.clone()).filter(|name| name != "Probe").collect()
    }

    fn answer(&mut self, action: Action) {
        if matches!(action, Action::Write { .. }) {
            self.now += self.takes;
        }
        let (machine, now) = (&mut self.machine, self.now);
        match action {
            // Other nodes probe this one all the time.
            Action::ReadCounters => machine.handle_counters(now.as_millis() as u64, 0, now),
            Action::CountPorts(growth) => {
                let ports = Some(Ports::count([], &growth));
                self.now += self.count_takes;
                machine.handle_ports(Counted { ports, began: now, took: self.count_takes }, self.now);
            }
            Action::FindInterfaces(_) => machine.handle_interfaces(BTreeMap::new()),
            Action::SeeIfCovered => machine.handle_covered(),
            Action::MakeStackPath { .. } => machine.handle_stack_path(),
            Action::MakeShaper(wanted) => machine.handle_shaper(wanted.then_some(ShaperEnds { near: 20, far: 21 })),
            Action::FindRoutes(to) => {
                let route = Route { oif: 1, gateway: None, mtu: None, encapsulated: false };
                machine.handle_routes(to.into_iter().map(|to| (to, Ok(route.clone()))).collect());
            }
            Action::Write { view, .. } => machine.handle_written(&view, &Refused::default(), now),
            Action::WriteStatus => machine.handle_status(true),
            Action::Publish => self.published = machine.outcome().errors.clone(),
            _ => {}
        }
    }

    fn fail(&mut self, action: &Action, name: &str) {
        match action {
            Action::SeeIfCovered => {}
            Action::Write { .. } => self.machine.handle_not_written("it is full", self.machine.flags),
            _ => self.machine.handle_error(name),
        }
    }

    /// Does the same after something in the cluster has changed.
    fn round(&mut self, world: &FactsFixture) -> Vec<String> {
        self.machine.handle_objects(objects(world));
        self.run()
    }

    /// Lets the gateways that live answer the probes that were sent last.
    fn answer_probes(&mut self, lives: impl Fn(&NodeName) -> bool) {
        for (_, action) in self.done.clone() {
            if let Action::Probe(name, request) = action
                && lives(&name)
            {
                self.machine.handle_probe(&request.answered(5), self.now);
            }
        }
    }

    fn views(&self) -> impl Iterator<Item = &NodeView> {
        self.done.iter().filter_map(|(_, action)| match action {
            Action::Write { view, .. } => Some(&**view),
            _ => None,
        })
    }

    fn announced(&self) -> BTreeSet<IpAddr> {
        let mut sets = self.done.iter().filter_map(|(_, action)| match action {
            Action::Announce(wanted) => Some(wanted.keys().copied().collect()),
            _ => None,
        });
        sets.next_back().unwrap()
    }

    /// Returns whether the programs and the rules hold, in the order in which they were set.
    fn holding(&self) -> Vec<(&'static str, bool)> {
        let holding = self.done.iter().filter_map(|(_, action)| match action {
            Action::MakeStackPath { hold, .. } => Some(("rules", hold.is_some())),
            Action::Write { view, .. } => Some(("programs", view.config.unwrap().flags & flags::HOLD != 0)),
            _ => None,
        });
        holding.collect()
    }
}

/// Returns the name of an action's variant.
fn name(action: &Action) -> String {
    format!("{action:?}").chars().take_while(|c| c.is_alphanumeric()).collect()
}

fn objects(world: &FactsFixture) -> Arc<Objects> {
    Arc::new(Objects { snapshot: world.snapshot.clone(), plan: world.plan.clone(), ..Objects::default() })
}

/// Returns a pod of this node that a policy selects.
fn pod(name: &str, ips: &[&str]) -> Endpoint {
    let labels = [("app".to_owned(), "web".to_owned())].into();
    let ips = ips.iter().map(|text| ip(text)).collect();
    Endpoint { id: EndpointId::new("default", name, name), node: "me".into(), ips, labels }
}

#[test]
fn round_writes_before_it_announces_and_publishes_at_the_end() {
    let mut shell = Shell::new(&FactsFixture::new());
    let order = [
        "FindInterfaces",
        "MakeStackPath",
        "Attach",
        "FindRoutes",
        "Write",
        "Advertise",
        "MakeShaper",
        "Forward",
        "Heartbeat",
        "Announce",
        "KeepLease",
        "Publish",
        "WriteStatus",
    ];
    assert_eq!(shell.run(), order);
    assert_eq!(shell.run(), [] as [&str; 0], "nothing has changed");
}

#[test]
fn egress_ips_are_neither_announced_nor_reported_if_the_write_fails() {
    let (mut world, own) = (FactsFixture::new(), ip(OWNED[2].0));
    let mut shell = Shell::new(&world);
    shell.fails.insert("Write");
    assert!(!shell.run().iter().any(|name| name == "Advertise"));
    assert_eq!((shell.announced(), &shell.machine.outcome().carries), ([].into(), &[].into()));
    assert_eq!(shell.machine.report(0).0, 0);
    shell.fails.clear();
    shell.round(&world);
    assert_eq!((shell.announced(), &shell.machine.outcome().carries), ([own].into(), &[own].into()));
    assert_eq!(shell.machine.report(0).0, 5);
    // The tables do not know the address, or do not answer for it, although it is this node's turn.
    carried_by(&mut world, 0, &["me", "g1"]);
    carried_by(&mut world, 2, &["g2"]);
    world.plan.lease_revision = 6;
    shell.fails.insert("Write");
    shell.round(&world);
    assert_eq!((shell.announced(), &shell.machine.outcome().carries), ([].into(), &[own].into()), "it is g2's turn");
    assert_eq!(shell.machine.report(0).0, 5);
    carried_by(&mut world, 2, &["me"]);
    shell.round(&world);
    assert_eq!(shell.announced(), [].into(), "the tables may no longer answer for it");
    shell.fails.clear();
    shell.round(&world);
    assert_eq!(shell.announced(), [own, ip(OWNED[0].0)].into());
    assert_eq!(shell.machine.report(0).0, 5);
}

#[test]
fn hold_rules_are_added_after_and_removed_before_the_programs_hold() {
    let mut world = FactsFixture::new();
    let mut shell = Shell::new(&world);
    shell.run();
    assert_eq!(shell.holding(), [("rules", false), ("programs", false)]);
    world.add(pod("web-2", &[]));
    shell.round(&world);
    assert_eq!(shell.holding(), [("rules", false), ("programs", true), ("rules", true)]);
    shell.round(&world);
    assert_eq!(shell.holding(), [("rules", true), ("programs", true)], "both still hold");
    // The pod has an address, and its interface may have no programs yet.
    world.add(pod("web-2", &["10.1.0.2"]));
    shell.fails.insert("SeeIfCovered");
    shell.round(&world);
    assert_eq!(shell.holding(), [("rules", true), ("programs", true)]);
    let known = |view: &NodeView| view.endpoints.values().filter(|pod| !pod.ips.is_empty()).count();
    assert_eq!(shell.views().map(known).collect::<Vec<_>>(), [2], "the pod is written while its packets are held");
    // The rules could not be removed, so the programs still note what they match.
    shell.fails = ["MakeStackPath"].into();
    shell.round(&world);
    assert_eq!(shell.holding(), [("rules", false), ("programs", true)]);
    shell.fails.clear();
    shell.round(&world);
    assert_eq!(shell.holding(), [("rules", false), ("programs", false)]);
}

#[test]
fn no_hold_rule_exists_where_the_programs_do_not_hold() {
    let mut world = FactsFixture::new();
    let mut shell = Shell::new(&world);
    world.add(pod("web-2", &[]));
    shell.fails.insert("Write");
    shell.round(&world);
    assert_eq!(shell.holding(), [("rules", false), ("programs", true)]);
}

/// `egressctl` shows what is published.
#[test]
fn every_failure_in_a_round_is_published() {
    let world = FactsFixture::new();
    for what in ["MakeStackPath", "MakeShaper", "Attach", "Write", "Advertise", "Forward", "Announce", "KeepLease"] {
        let mut shell = Shell::new(&world);
        shell.fails.insert(what);
        shell.run();
        assert_eq!(shell.published.len(), 1, "{what}: {:?}", shell.published);
        shell.fails.clear();
        shell.round(&world);
        assert_eq!(shell.published, [] as [&str; 0], "{what}");
    }
    // The action runs a second time in a round, after the programs hold.
    let (mut world, mut shell) = (FactsFixture::new(), Shell::new(&world));
    world.add(pod("web-2", &[]));
    shell.fails.insert("MakeStackPath");
    shell.round(&world);
    assert_eq!(shell.published.len(), 2, "{:?}", shell.published);
}

#[test]
fn blocks_are_used_once_the_carrier_knows_them_and_survive_a_restart() {
    let (mut world, address) = (FactsFixture::new(), ip(OWNED[0].0));
    let blocks = |shell: &Shell| shell.views().last().map(|view| view.egress_ips[&address].blocks.clone());
    let left = |carrier: &str| {
        let in_use = LeftInUse { carriers: vec![carrier.into()], blocks: [7].into() };
        Left { used: [(address, in_use)].into(), ..Left::default() }
    };
    // A carrier may never have known the blocks that were in use with another one.
    for (left, at_first) in [(Left::default(), [].into()), (left("g2"), [].into()), (left("g1"), BTreeSet::from([7]))] {
        let mut shell = Shell::after(&world, left);
        shell.run();
        assert_eq!(blocks(&shell), Some(at_first));
        shell.machine.handle_start(shell.now);
        shell.machine.handle_timeout(shell.now);
        shell.run();
        shell.answer_probes(|_| true);
        shell.run();
        assert_eq!(blocks(&shell), Some([7].into()), "revision 5 is known");
        // A lease that is newer than what was left in use, of a block with the same number.
        world.plan.blocks.get_mut(&address).unwrap().get_mut(&7).unwrap().revision = 6;
        shell.round(&world);
        assert_eq!(blocks(&shell), Some([].into()));
        world = FactsFixture::new();
    }
}

/// docs/failures.md: lapse-order.
#[test]
fn lapse_order_lease_is_told_immediately_and_until_its_renewal_is_late() {
    let ms = Duration::from_millis;
    let mut shell = Shell::new(&FactsFixture::new());
    shell.run();
    let mut told = |now, until| {
        shell.now = ms(now);
        shell.machine.handle_lease(ms(until));
        shell.machine.handle_timeout(shell.now);
        shell.run();
        let told = |(_, action): &(String, Action)| match action {
            Action::Heartbeat { held, .. } => Some(held.as_millis()),
            _ => None,
        };
        shell.done.iter().find_map(told)
    };
    assert_eq!(told(50, 0), None, "it has none, and a heartbeat is not due");
    assert_eq!(told(100, 13_600), Some(8_500));
    assert_eq!(told(200, 13_600), None);
    assert_eq!(told(8_550, 13_600), Some(50));
    assert_eq!(told(8_650, 13_600), None, "no gateway is told");
    assert_eq!(told(8_700, 22_100), Some(8_400), "it was late");
}

#[test]
fn stopping_gateway_says_so_only_if_others_take_over() {
    let (mut world, own) = (FactsFixture::new(), 2);
    let mut shell = Shell::new(&world);
    shell.run();
    assert!(!shell.machine.handle_stop(shell.now), "no other gateway carries its egress IP");
    carried_by(&mut world, own, &["me", "g1"]);
    shell.round(&world);
    assert!(!shell.machine.handle_stop(shell.now), "nothing is known of g1");
    shell.machine.handle_timeout(shell.now);
    shell.run();
    shell.answer_probes(|_| true);
    shell.run();
    let stops = shell.machine.handle_stop(shell.now);
    assert!(stops);
    assert_eq!(shell.run(), ["Heartbeat", "Advertise"]);
    let Action::Heartbeat { able, .. } = shell.done[0].1 else { panic!("{:?}", shell.done) };
    assert_eq!(able, Duration::ZERO);
}

#[test]
fn takeover_length_is_the_time_without_an_answer() {
    let (mut world, own) = (FactsFixture::new(), 2);
    carried_by(&mut world, own, &["g1", "me"]);
    let mut shell = Shell::new(&world);
    shell.run();
    shell.machine.handle_start(shell.now);
    let mut pass = |until: u64, answered: bool| {
        while shell.now <= Duration::from_millis(until) {
            shell.machine.handle_timeout(shell.now);
            shell.run();
            if answered {
                shell.answer_probes(|_| true);
                shell.run();
            }
            shell.now = shell.machine.next_wake().max(shell.now + Duration::from_millis(1));
        }
        shell.machine.takeovers()
    };
    assert_eq!(pass(2_000, true), Lengths::default(), "the carrier is alive");
    let lengths = pass(4_000, false);
    assert_eq!(lengths.counts.iter().sum::<u64>(), 1, "{lengths:?}");
    let expected = Duration::from_millis(150)..Duration::from_millis(400);
    assert!(expected.contains(&lengths.sum), "{lengths:?}");
}

#[test]
fn connections_are_opened_again_once_the_tables_avoid_their_gateway() {
    let ms = Duration::from_millis;
    let (mut world, address) = (FactsFixture::new(), ip(OWNED[0].0));
    world.add(pod("web-1", &["10.1.0.1"]));
    report(&mut world, "g2").carries.insert(address);
    carried_by(&mut world, 0, &["g1", "g2"]);
    let mut shell = Shell::new(&world);
    shell.run();
    shell.machine.handle_start(shell.now);
    let mut opened = Vec::new();
    // Both are alive; the plan puts g2 first; g2 is dead and no write succeeds; the tables can be written again.
    for (until, living, fails) in [(500, "g1 g2", ""), (1_000, "g1 g2", ""), (2_000, "g1", "Write"), (3_000, "g1", "")]
    {
        if until == 1_000 {
            carried_by(&mut world, 0, &["g2", "g1"]);
        }
        shell.fails = BTreeSet::from([fails]);
        shell.machine.handle_objects(objects(&world));
        while shell.now < ms(until) {
            shell.machine.handle_timeout(shell.now);
            let order = shell.run();
            shell.answer_probes(|name| living.contains(name.as_str()));
            let again = shell.done.iter().filter_map(|(_, action)| match action {
                Action::OpenAgain(egress_ips) => Some((until, egress_ips.clone())),
                _ => None,
            });
            opened.extend(again);
            let place = |name: &str| order.iter().position(|n| n == name);
            assert!(place("OpenAgain").is_none() || place("Write") < place("OpenAgain"), "{order:?}");
            shell.now += ms(50);
        }
    }
    assert_eq!(opened, [1_000, 3_000].map(|until| (until, BTreeSet::from([address]))));
}
