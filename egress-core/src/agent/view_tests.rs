//! Tests what a node should do, in small clusters.

use super::{
    carriers::Carriers,
    effective::Effective,
    facts::{Facts, Objects},
    late::Late,
    view::{Decided, classes_of, cut_off, interfaces, uplink, view},
};
use crate::{
    encode::{NodeView, PolicyView, SlotView},
    health::ProbeState,
    model::*,
    network::{classify::Roles, links::LinkTable},
    plan::{BlockLease, BlockState, EgressIpPlan, OwnerReason, Plan},
    testing::{default_route, link, world},
};
use egress_common::{config, endpoint::policy_flags};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

/// Egress IPs and their owners.
pub(super) const OWNED: [(&str, &str); 3] = [("192.0.2.1", "g1"), ("192.0.2.2", "g2"), ("192.0.2.3", "me")];

pub(super) struct FactsFixture {
    pub(super) snapshot: Snapshot,
    pub(super) plan: Plan,
    pub(super) links: LinkTable,
    pub(super) roles: Roles,
    pub(super) probes: BTreeMap<NodeName, ProbeState>,
    /// The revision up to which each gateway knows this node's leases.
    pub(super) known: BTreeMap<NodeName, u64>,
    pub(super) except: Vec<IpNet>,
    pub(super) silent: bool,
    pub(super) able: bool,
    pub(super) partial: bool,
}

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn policy_id() -> PolicyId {
    PolicyId::new(PolicyKind::Native, "web")
}

/// Returns a policy for the pods with the label `app: web`, all IPv4 destinations.
pub(super) fn web() -> Policy {
    Policy {
        selectors: vec![EndpointSelector { pod: Some(Selector::label("app", "web")), ..Default::default() }],
        ..world::policy("web", Source::Pools(Vec::new()))
    }
}

fn pod(name: &str, node: &str, app: &str, ips: &[&str]) -> Endpoint {
    Endpoint {
        id: EndpointId::new("default", name, name),
        node: node.into(),
        ips: ips.iter().map(|a| ip(a)).collect(),
        labels: [("app".to_owned(), app.to_owned())].into(),
    }
}

fn node(name: &str, zone: &str, address: &str) -> Node {
    Node {
        name: name.into(),
        labels: Labels::new(),
        zone: Some(zone.to_owned()),
        addresses: [ip(address)].into(),
        ready: true,
        draining: false,
        pod_cidrs: BTreeSet::new(),
        max_egress_ips: None,
        report: Some(NodeReport::default()),
    }
}

impl FactsFixture {
    /// Creates this node (zone a) with a selected pod, gateways g1 (zone a) and g2 (zone b), a slot on each, and a block of each.
    pub(super) fn new() -> Self {
        let mut snapshot = Snapshot::default();
        for mut n in [node("me", "a", "10.0.0.1"), node("g1", "a", "10.0.0.2"), node("g2", "b", "10.0.0.3")] {
            let own = OWNED.iter().filter(|(_, owner)| n.name == NodeName::from(*owner));
            n.report.as_mut().unwrap().carries = own.map(|(address, _)| ip(address)).collect();
            snapshot.nodes.insert(n.name.clone(), n);
        }
        snapshot.policies.insert(policy_id(), web());
        let mut plan = Plan { lease_revision: 5, ..Plan::default() };
        for (address, owner) in OWNED {
            plan.egress_ips.insert(
                ip(address),
                EgressIpPlan {
                    pool: None,
                    fixed: false,
                    interface: None,
                    owner: Some(owner.into()),
                    carriers: vec![owner.into()],
                    preferred: None,
                    epoch: 1,
                    users: [(policy_id(), 1)].into(),
                    reason: OwnerReason::Preferred,
                    share: 1,
                    scarce: false,
                    starved: false,
                    attachment: Default::default(),
                    draining: false,
                },
            );
            let lease = BlockLease { node: "me".into(), revision: 5, state: BlockState::Leased };
            plan.blocks.insert(ip(address), [(7, lease)].into());
        }
        let mut links = LinkTable::default();
        for (index, name, addresses) in [(1, "eth0", &["10.0.0.1/24"][..]), (2, "eth1", &["192.0.2.200/24"])] {
            let mut l = link(index, name);
            l.addresses = addresses.iter().map(|a| a.parse().unwrap()).collect();
            links.links.insert(index, l);
        }
        links.default_routes.insert(default_route(1, "10.0.0.254"));
        let mut world = Self {
            snapshot,
            plan,
            links,
            roles: Roles { uplinks: [1, 2].into(), ..Roles::default() },
            probes: BTreeMap::new(),
            known: [("g1".into(), 5), ("g2".into(), 5)].into(),
            except: Vec::new(),
            silent: false,
            able: true,
            partial: false,
        };
        world.add(pod("web-1", "me", "web", &["10.1.0.1"]));
        world
    }

    pub(super) fn add(&mut self, pod: Endpoint) {
        self.snapshot.endpoints.insert(pod.id.clone(), pod);
    }

    pub(super) fn policy(&mut self) -> &mut Policy {
        self.snapshot.policies.get_mut(&policy_id()).unwrap()
    }

    pub(super) fn egress(&mut self, n: usize) -> &mut EgressIpPlan {
        self.plan.egress_ips.get_mut(&ip(OWNED[n].0)).unwrap()
    }

    /// Updates `carriers` with the state of the cluster at `now`.
    pub(super) fn decide(&self, carriers: &mut Carriers, now: Duration) {
        carriers.update(&Facts { now, ..self.facts() });
    }

    fn facts(&self) -> Facts {
        let (snapshot, plan, partial) = (self.snapshot.clone(), self.plan.clone(), self.partial);
        Facts {
            node: "me".into(),
            objects: Arc::new(Objects { snapshot, plan, partial, ..Objects::default() }),
            links: Arc::new(self.links.clone()),
            roles: self.roles.clone(),
            interfaces: interfaces(&self.links, &self.roles, &BTreeMap::new(), &BTreeMap::new()).0,
            probes: self.probes.clone(),
            known: self.known.clone(),
            able: self.able,
            left_alone: self.except.clone(),
            silent: self.silent,
            ..Facts::default()
        }
    }

    pub(super) fn view_with(&self, carriers: &Carriers) -> NodeView {
        let decided = Decided { carriers: carriers.clone(), ..Decided::default() };
        view(&self.facts(), &decided, config::UNSET, &mut Effective::default())
    }

    pub(super) fn view(&self) -> NodeView {
        let mut carriers = Carriers::default();
        self.decide(&mut carriers, Duration::ZERO);
        self.view_with(&carriers)
    }

    /// Returns which of the three slots new flows may choose.
    pub(super) fn usable(&self) -> [bool; 3] {
        let view = self.view();
        let slots = &view.policies[&policy_id()].slots;
        assert_eq!(slots.iter().map(|s| s.address).collect::<Vec<_>>(), OWNED.map(|(a, _)| ip(a)));
        [slots[0].usable, slots[1].usable, slots[2].usable]
    }
}

#[test]
fn unknown_sources_are_held_only_while_a_selected_pod_is_starting() {
    let held = |w: &FactsFixture| {
        let (mut late, classes) = (Late::default(), classes_of(&w.snapshot, &"me".into()));
        late.update(&Facts { classes, ..w.facts() });
        late.holds(Duration::from_secs(60), Duration::from_secs(59))
    };
    let mut world = FactsFixture::new();
    assert!(!held(&world));
    world.add(pod("db", "me", "db", &[]));
    world.add(pod("web-2", "g1", "web", &[]));
    assert!(!held(&world), "neither an unselected pod nor a pod of another node");
    world.add(pod("web-3", "me", "web", &[]));
    assert!(held(&world));
    world.add(pod("web-3", "me", "web", &["10.1.0.3"]));
    assert!(!held(&world));
}

#[test]
fn new_flows_avoid_gateways_that_do_not_answer() {
    let mut world = FactsFixture::new();
    assert_eq!(world.usable(), [true; 3], "nothing is known yet: that is no reason to avoid it");
    world.probes = [("g1".into(), ProbeState::Dead), ("g2".into(), ProbeState::Alive)].into();
    assert_eq!(world.usable(), [false, true, true]);
    world.probes.insert("me".into(), ProbeState::Dead);
    assert_eq!(world.usable(), [false, true, true], "this node needs no tunnel to itself");
    (world.egress(1).owner, world.egress(1).carriers) = (None, Vec::new());
    assert_eq!(world.usable(), [false, false, true]);
}

#[test]
fn a_slot_needs_blocks_that_its_owner_knows_of() {
    let mut world = FactsFixture::new();
    let lease = |world: &mut FactsFixture, n: usize, change: fn(&mut BlockLease)| {
        change(world.plan.blocks.get_mut(&ip(OWNED[n].0)).unwrap().get_mut(&7).unwrap());
    };
    lease(&mut world, 0, |l| l.revision = 6);
    assert_eq!(world.usable(), [false, true, true], "the owner has only programmed revision 5");
    lease(&mut world, 2, |l| l.revision = 6);
    assert_eq!(world.usable(), [false, true, true], "what this node owns it programs itself");
    world.known.insert("g1".into(), 6);
    assert_eq!(world.usable(), [true; 3]);
    lease(&mut world, 0, |l| l.state = BlockState::Quarantined);
    lease(&mut world, 1, |l| l.node = "g1".into());
    assert_eq!(world.usable(), [false, false, true], "blocks that are given back, or another node's");
    world.snapshot.nodes.get_mut(&NodeName::from("g2")).unwrap().report = None;
    lease(&mut world, 1, |l| l.node = "me".into());
    assert_eq!(world.usable(), [false, false, true], "an owner that has reported nothing has programmed nothing");
    lease(&mut world, 0, |l| l.state = BlockState::Leased);
    assert_eq!(world.usable(), [true, false, true]);
    report(&mut world, "g1").carries.clear();
    assert_eq!(world.usable(), [false, false, true], "the owner has not read of the egress IP yet");
    lease(&mut world, 0, |l| l.state = BlockState::Quarantined);
    let view = world.view();
    assert!(view.egress_ips[&ip(OWNED[1].0)].blocks.is_empty());
    assert_eq!(
        view.egress_ips[&ip(OWNED[0].0)].leases.len(),
        1,
        "replies for a quarantined block still reach their pods"
    );
}

#[test]
fn recreated_policy_leaves_its_destinations_to_others_until_it_can_serve() {
    let world = FactsFixture::new();
    let id = policy_id();
    let mut effective = Effective::default();
    effective.update(&BTreeMap::new(), &BTreeMap::new(), Duration::ZERO);
    let mut takes_over = |uid: &str, usable: bool, now: u64| {
        let slot = SlotView { address: ip(OWNED[0].0), weight: 1, usable };
        let views = [(id.clone(), PolicyView { slots: vec![slot], ..PolicyView::default() })].into();
        let policy = Policy { uid: uid.into(), ..world.snapshot.policies[&id].clone() };
        effective.update(&[(id.clone(), policy)].into(), &views, Duration::from_secs(now));
        effective.comes_first(&id)
    };
    assert!(!takes_over("1", false, 0), "new, and it cannot serve");
    assert!(takes_over("1", true, 1));
    assert!(takes_over("1", false, 2), "it drops what it cannot serve");
    assert!(!takes_over("2", false, 3), "it was created again");
    assert!(!takes_over("2", false, 12));
    assert!(takes_over("2", false, 13), "for ten seconds and no longer");
    assert!(takes_over("2", false, 14));
}

#[test]
fn policy_is_new_to_an_agent_and_not_to_the_first_of_its_pods() {
    let (pay, narrow) = (PolicyId::new(PolicyKind::Native, "pay"), "203.0.113.0/24".parse::<IpNet>().unwrap());
    let selector = |pod| vec![EndpointSelector { pod: Some(pod), ..Default::default() }];
    // The policy has no egress IP.
    let selectors = selector(Selector::label("app", "pay"));
    let of_pay = Policy { id: pay.clone(), selectors, destinations: vec![narrow], ..web() };
    let winner = |world: &FactsFixture, effective: &mut Effective, now: u64| {
        let facts = Facts { now: Duration::from_secs(now), ..world.facts() };
        let classes = view(&facts, &Decided::default(), config::UNSET, effective).classes;
        let table = classes.into_iter().find(|(class, _)| class.contains(&pay)).map(|(_, table)| table);
        table.into_iter().flatten().find(|(net, _)| *net == narrow).and_then(|(_, policy)| policy)
    };
    let mut world = FactsFixture::new();
    world.policy().selectors = selector(Selector::everything());
    let (mut effective, mut restarted) = (Effective::default(), Effective::default());
    assert_eq!(winner(&world, &mut effective, 0), None);
    world.snapshot.policies.insert(pay.clone(), of_pay);
    assert_eq!(winner(&world, &mut effective, 1), None, "it has no pod here");
    let mut early = effective.clone();
    world.add(pod("pay-1", "me", "pay", &["10.1.0.9"]));
    assert_eq!(winner(&world, &mut early, 2), Some(policy_id()), "the other policy continues while this one is new");
    assert_eq!(winner(&world, &mut early, 11), Some(pay.clone()));
    assert_eq!(
        winner(&world, &mut effective, 60),
        Some(pay.clone()),
        "the pod's first packets do not leave with another egress IP"
    );
    assert_eq!(winner(&world, &mut restarted, 0), Some(pay.clone()), "nor while an agent starts");
}

#[test]
fn a_link_that_is_down_cuts_off_only_addresses_that_the_node_may_carry() {
    let mut world = FactsFixture::new();
    world.links.links.get_mut(&2).unwrap().up = false;
    let mut cut = |own: AddressSource| {
        let others = world::gateway(Selector::label("role", "egress"), AddressSource::Ip(ip(OWNED[0].0)));
        world.policy().source = Source::Gateways(vec![world::gateway(Selector::everything(), own), others]);
        cut_off(&world.facts()).into_keys().collect::<Vec<_>>()
    };
    let own = ip(OWNED[2].0);
    assert_eq!(cut(AddressSource::Ip(own)), [own], "the others are for other nodes");
    assert_eq!(cut(AddressSource::Configured(own)), [] as [IpAddr; 0], "it never floats");
}

#[test]
fn tenant_namespaced_policy_releases_no_pod_from_a_cluster_scoped_one() {
    let mut world = FactsFixture::new();
    let own = PolicyId::new(PolicyKind::Namespaced, "default/own");
    let stray = |id: &PolicyId| Policy { id: id.clone(), on_no_gateway: OnNoGateway::NodeIp, ..web() };
    world.snapshot.policies = [(own.clone(), stray(&own))].into();
    let leaves = |world: &FactsFixture, id: &PolicyId| {
        world.view().policies[id].flags & policy_flags::ON_NO_GATEWAY_NODE_IP != 0
    };
    assert!(leaves(&world, &own), "without it, packets would leave with the node's address, too");
    let databases = EndpointSelector { pod: Some(Selector::label("app", "db")), ..Default::default() };
    let of_others = Policy { selectors: vec![databases], ..web() };
    world.snapshot.policies.insert(policy_id(), of_others);
    assert!(leaves(&world, &own), "it selects other pods");
    world.snapshot.policies.insert(policy_id(), web());
    assert!(!leaves(&world, &own));
    // An administrator's own decision.
    world.snapshot.policies.insert(policy_id(), stray(&policy_id()));
    assert!(leaves(&world, &policy_id()) && !leaves(&world, &own));
}

#[test]
fn a_node_that_has_no_blocks_yet_is_not_without_a_gateway() {
    fn waits(change: impl Fn(&mut FactsFixture)) -> BTreeSet<Family> {
        let mut world = FactsFixture::new();
        change(&mut world);
        world.view().policies[&policy_id()].waits.clone()
    }
    assert_eq!(waits(|_| {}), [].into(), "slots are usable");
    assert_eq!(waits(|world| world.plan.blocks.clear()), [Family::V4].into());
    for state in [ProbeState::Dead, ProbeState::Unable] {
        let waiting = waits(|world| {
            world.plan.blocks.clear();
            (world.probes, world.partial) = (["g1", "g2"].map(|gateway| (gateway.into(), state)).into(), true);
        });
        assert_eq!(waiting, [].into(), "{state:?}");
    }
    let draining = waits(|world| {
        world.plan.blocks.clear();
        world.plan.egress_ips.values_mut().for_each(|e| e.draining = true);
    });
    assert_eq!(draining, [].into(), "they get no new blocks");
    let alone = waits(|world| {
        world.plan.blocks.clear();
        world.snapshot.nodes.clear();
    });
    assert_eq!(alone, [].into(), "the gateways' nodes are gone");
}

/// Gives an egress IP of the world these carriers.
pub(super) fn carried_by(world: &mut FactsFixture, n: usize, carriers: &[&str]) {
    let e = world.egress(n);
    e.carriers = carriers.iter().map(|name| NodeName::from(*name)).collect();
    e.owner = e.carriers.first().cloned();
}

pub(super) fn report<'a>(world: &'a mut FactsFixture, node: &str) -> &'a mut NodeReport {
    world.snapshot.nodes.get_mut(&NodeName::from(node)).unwrap().report.as_mut().unwrap()
}

#[test]
fn zones_and_the_local_node_narrow_the_choice() {
    let mut world = FactsFixture::new();
    world.policy().zone = ZoneMode::Require;
    assert_eq!(world.usable(), [true, false, true]);
    world.policy().zone = ZoneMode::Prefer;
    assert_eq!(world.usable(), [true, false, true]);
    world.policy().prefer_local_node = true;
    assert_eq!(world.usable(), [false, false, true]);
    carried_by(&mut world, 2, &["g2"]);
    report(&mut world, "g2").carries.insert(ip(OWNED[2].0));
    assert_eq!(world.usable(), [true, false, false]);
    world.probes.insert("g1".into(), ProbeState::Dead);
    assert_eq!(world.usable(), [false, true, true], "preferred is not required");
    world.policy().zone = ZoneMode::Require;
    assert_eq!(world.usable(), [false; 3]);
    // A node without a zone is near no other node.
    world.snapshot.nodes.get_mut(&NodeName::from("me")).unwrap().zone = None;
    world.snapshot.nodes.get_mut(&NodeName::from("g2")).unwrap().zone = None;
    assert_eq!(world.usable(), [false; 3]);
    world.policy().zone = ZoneMode::Prefer;
    assert_eq!(world.usable(), [false, true, true]);
}

#[test]
fn the_uplink_is_configured_or_has_the_address_its_network_or_the_default_route() {
    let mut world = FactsFixture::new();
    let found = |w: &FactsFixture, address: &str, interface: Option<&str>| {
        let mut e = w.plan.egress_ips[&ip(OWNED[2].0)].clone();
        e.interface = interface.map(str::to_owned);
        uplink(&w.links, &w.roles, ip(address), &e)
    };
    assert_eq!(found(&world, "192.0.2.3", None), Some(2));
    assert_eq!(found(&world, "192.0.2.3", Some("eth0")), Some(1));
    assert_eq!(found(&world, "192.0.2.200", None), Some(2));
    assert_eq!(found(&world, "198.51.100.9", None), Some(1));
    assert_eq!(found(&world, "2001:db8::9", None), None, "no IPv6 default route");
    world.links.links.get_mut(&2).unwrap().up = false;
    assert_eq!(found(&world, "192.0.2.3", None), Some(1), "a link that is down leads nowhere");
    let view = FactsFixture::new().view();
    assert_eq!(view.egress_ips.values().map(|e| e.interface).collect::<Vec<_>>(), [None, None, Some(2)]);
}

#[test]
fn nodes_pods_and_the_administrators_networks_are_excepted() {
    let mut world = FactsFixture::new();
    world.except = vec!["172.16.5.9/12".parse().unwrap()];
    let nodes = &mut world.snapshot.nodes;
    nodes.get_mut(&NodeName::from("g1")).unwrap().pod_cidrs.insert("10.2.0.0/24".parse().unwrap());
    // An address that only another node claims is not excepted.
    for (node, net) in [("me", "203.0.113.1/24"), ("g1", "203.0.113.2/24")] {
        let (interface, net) = ("eth9".into(), net.parse().unwrap());
        let report = &mut nodes.get_mut(&NodeName::from(node)).unwrap().report;
        report.get_or_insert_default().addresses.insert(InterfaceAddress { interface, net, default_route: false });
    }
    let expected =
        ["10.0.0.1/32", "10.0.0.2/32", "10.0.0.3/32", "10.1.0.1/32", "10.2.0.0/24", "172.16.0.0/12", "203.0.113.1/32"];
    assert_eq!(world.view().excepts, expected.iter().map(|n| n.parse::<IpNet>().unwrap()).collect());
}

#[test]
fn services_and_pods_that_no_node_names_are_excepted() {
    let mut world = FactsFixture::new();
    let before = world.view().excepts;
    let told: [IpNet; 2] = ["10.96.0.0/16".parse().unwrap(), "10.9.0.4/31".parse().unwrap()];
    world.snapshot.services.insert(told[0]);
    world.snapshot.pod_networks.insert(told[1]);
    assert_eq!(world.view().excepts.difference(&before).copied().collect::<Vec<_>>(), [told[1], told[0]]);
}

#[test]
fn addresses_of_other_owners_and_silenced_ones_are_not_answered_for() {
    let silent = |w: &FactsFixture| w.view().egress_ips.into_values().map(|e| e.silent).collect::<Vec<_>>();
    let mut world = FactsFixture::new();
    assert_eq!(silent(&world), [true, true, false]);
    world.silent = true;
    assert_eq!(silent(&world), [true; 3]);
}

#[test]
fn only_policies_of_this_nodes_pods_are_in_force() {
    let mut world = FactsFixture::new();
    world.snapshot.endpoints.values_mut().for_each(|e| e.node = "g1".into());
    let view = world.view();
    assert!(view.policies.is_empty() && view.classes.is_empty() && view.endpoints.is_empty());
    assert_eq!(view.egress_ips.len(), 3, "as a gateway it knows every egress IP");
}
