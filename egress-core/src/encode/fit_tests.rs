//! Tests that whatever overflows, less than the whole write is refused, and that repeated writes converge.

use super::*;
use crate::{
    encode::{EndpointView, PolicyView, SlotView},
    model::PolicyKind,
};
use egress_common::{config, endpoint::policy_flags, limits};

fn id(n: usize) -> PolicyId {
    PolicyId::new(PolicyKind::Native, &format!("policy-{n:05}"))
}

fn pod(n: usize) -> EndpointId {
    EndpointId::new("default", &format!("pod-{n:05}"), "uid")
}

fn net(n: u32) -> IpNet {
    IpNet::new(IpAddr::from((n << 8).to_be_bytes()), 24).unwrap()
}

fn empty() -> NodeView {
    let config = DatapathConfig { mss_v4: 1, ..config::UNSET };
    NodeView { node: Some("me".into()), config: Some(config), ..NodeView::default() }
}

/// Adds a pod with the policies of its class, and the routes of that class.
fn add(view: &mut NodeView, n: usize, class: &[usize], table: Vec<(IpNet, Option<PolicyId>)>) {
    let class: BTreeSet<PolicyId> = class.iter().map(|n| id(*n)).collect();
    for policy in &class {
        let flags = policy_flags::ON_NO_GATEWAY_NODE_IP;
        view.policies.insert(policy.clone(), PolicyView { flags, ..PolicyView::default() });
    }
    view.classes.insert(class.clone(), table);
    let ips = [IpAddr::from((0x0a00_0000 + n as u32).to_be_bytes())].into();
    view.endpoints.insert(pod(n), EndpointView { ips, class, ..EndpointView::default() });
}

/// Returns a view with a pod that these policies select, each with its own destination.
fn policies(range: std::ops::Range<usize>) -> NodeView {
    let mut view = empty();
    let table = range.clone().map(|n| (net(n as u32), Some(id(n)))).collect();
    add(&mut view, 0, &range.collect::<Vec<_>>(), table);
    view
}

/// Returns a view of a class with this many routes, all of one policy.
fn routes(first: u32, count: usize) -> NodeView {
    let mut view = empty();
    add(&mut view, 0, &[0], (first..).take(count).map(|n| (net(n), Some(id(0)))).collect());
    view
}

impl Refused {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

struct World {
    encoder: Encoder,
    present: Tables,
}

impl World {
    fn new() -> Self {
        Self { encoder: Encoder::recover(&Tables::default()), present: Tables::default() }
    }

    /// Fits the view into the tables. Returns what was refused.
    fn write(&mut self, view: &NodeView) -> Refused {
        let (tables, refused) = self.encoder.fit(&mut view.clone(), &self.present).unwrap();
        assert!(tables.check(&self.present).is_ok());
        self.present = tables;
        refused
    }

    /// Returns whether packets from a pod to this network are steered, but not sent.
    fn drops(&self, pod: usize, to: IpNet) -> bool {
        let class = self.present.v4.endpoints[&[(0x0a00_0000 + pod as u32).to_be()]].class;
        let routes = self.present.v4.routes.iter().filter(|((key, _), _)| key.class == class);
        let covers = |(key, len): &(RouteKey<[u32; 1]>, u32)| {
            IpNet::new(net::from_v4(key.addr).into(), (len - 32) as u8).unwrap().contains(&to)
        };
        let longest = routes.filter(|(key, _)| covers(key)).max_by_key(|((_, len), _)| *len);
        let number = longest.map_or(NO_POLICY, |(_, policy)| *policy);
        let records = self.present.policies.iter().filter(|(key, _)| key.policy == number);
        number != NO_POLICY && records.into_iter().all(|(_, p)| p.table_len == 0 && !p.leaves_as_node())
    }
}

#[test]
fn policies_without_room_are_refused_and_drop() {
    let most = limits::MAX_POLICIES / 2;
    let mut world = World::new();
    // More than fit, in one write and after a restart.
    for _ in 0..2 {
        let refused = world.write(&policies(0..most + 3));
        assert_eq!(refused.policies.len(), 3);
        assert_eq!(world.present.policies.len(), limits::MAX_POLICIES);
        let nets = refused.policies.keys().map(|refused| (0..most + 3).find(|n| id(*n) == *refused).unwrap());
        nets.for_each(|n| assert!(world.drops(0, net(n as u32)), "policy {n}"));
        world.encoder = Encoder::recover(&world.present);
    }
}

#[test]
fn a_policy_that_waits_for_ports_does_not_leave_with_the_nodes_address() {
    let mut view = policies(0..1);
    let leaves = |view: &NodeView| {
        let mut world = World::new();
        world.write(view);
        let records = world.present.policies.iter().map(|(key, policy)| (key.family, policy.leaves_as_node()));
        records.collect::<Vec<_>>()
    };
    assert_eq!(leaves(&view), [(4, true), (6, true)]);
    view.policies.get_mut(&id(0)).unwrap().waits = [Family::V4].into();
    assert_eq!(leaves(&view), [(4, false), (6, true)]);
}

#[test]
fn policies_are_replaced_by_as_many_in_two_steps() {
    let most = limits::MAX_POLICIES / 2;
    for (count, at_first) in [(1_025, 2), (most, most)] {
        let mut world = World::new();
        assert!(world.write(&policies(0..count)).is_empty());
        let next = policies(count..2 * count);
        assert_eq!(world.write(&next).policies.len(), at_first, "there was no room beside the old ones");
        assert!(world.write(&next).is_empty());
        assert_eq!(world.present.policies.len(), 2 * count);
    }
}

#[test]
fn exclusions_count_for_their_policy_and_are_refused_with_it() {
    // 20 policies with exclusions in networks of their own, in classes of different subsets, and one without exclusions in all classes.
    let (count, exclusions) = (20, 1_024);
    let mut view = empty();
    for n in 0..14 {
        let class: Vec<usize> = (0..count).filter(|policy| *policy != n).collect();
        let mut table = vec![(net(0x00c0_0000), Some(id(count)))];
        for policy in &class {
            let base = 0x0010_0000 + ((*policy as u32) << 12);
            table.push((IpNet::new(net(base).addr(), 12).unwrap(), Some(id(*policy))));
            table.extend((0..exclusions).map(|i| (net(base + 1 + i), None)));
        }
        table.push((net(0x00c0_0100), Some(id(count))));
        add(&mut view, n, &[&class[..], &[count]].concat(), table);
    }
    let mut world = World::new();
    let refused = world.write(&view);
    assert!(!refused.policies.is_empty() && refused.policies.len() < count, "{}", refused.policies.len());
    assert!(!refused.policies.contains_key(&id(count)), "it has few routes");
    let first = (0..count).find(|n| refused.policies.contains_key(&id(*n))).unwrap();
    let base = 0x0010_0000 + ((first as u32) << 12);
    assert!(world.drops(13, net(base)) && world.drops(13, net(base + 1)), "what it selects, and what it excludes");
    let refused_again = world.write(&view);
    assert_eq!(refused_again.policies.len(), refused.policies.len(), "what fits stays as it is");
}

#[test]
fn exclusions_of_a_refused_policy_are_dropped_and_those_of_others_are_not() {
    let mut view = empty();
    let wide = |text: &str| text.parse::<IpNet>().unwrap();
    let table = vec![
        (wide("10.0.0.0/8"), Some(id(0))),
        (wide("10.1.0.0/16"), None),
        (wide("172.16.0.0/12"), Some(id(1))),
        (wide("172.16.1.0/24"), None),
    ];
    add(&mut view, 0, &[0, 1], table);
    refuse(&mut view, &id(0), Table::RoutesV4);
    let rest: BTreeMap<_, _> = view.classes.values().flatten().cloned().collect();
    let expected =
        [(wide("0.0.0.0/0"), Some(id(0))), (wide("172.16.0.0/12"), Some(id(1))), (wide("172.16.1.0/24"), None)];
    assert_eq!(rest, expected.into());
    assert_eq!(view.policies[&id(0)].flags, 0, "it does not leave with the node's address");
}

#[test]
fn destinations_of_a_refused_policy_are_neither_taken_over_nor_excluded() {
    let wide = |text: &str| text.parse::<IpNet>().unwrap();
    let refused = |table: &[(&str, Option<usize>)]| {
        let mut view = empty();
        let table = table.iter().map(|(net, policy)| (wide(net), policy.map(id))).collect();
        add(&mut view, 0, &[0, 1], table);
        refuse(&mut view, &id(0), Table::RoutesV4);
        view.classes.into_values().flatten().map(|(net, policy)| (net.to_string(), policy)).collect::<Vec<_>>()
    };
    let is = |net: &str, policy: Option<usize>| (net.to_owned(), policy.map(id));
    let default = refused(&[("0.0.0.0/0", Some(1)), ("203.0.113.0/24", Some(0))]);
    assert_eq!(default, [is("0.0.0.0/0", Some(0))]);
    let excluded = refused(&[("0.0.0.0/0", Some(1)), ("10.0.0.0/8", None), ("10.1.0.0/16", Some(0))]);
    assert_eq!(excluded, [is("0.0.0.0/0", Some(1)), is("10.0.0.0/8", Some(0))]);
    let nested = [("10.0.0.0/8", Some(0)), ("10.1.0.0/16", Some(1)), ("10.1.2.0/24", Some(0)), ("10.1.3.0/24", None)];
    let expected = [is("0.0.0.0/0", Some(0)), is("10.1.0.0/16", Some(0)), is("10.1.3.0/24", None)];
    assert_eq!(refused(&nested), expected, "the last one is what policy 1 excludes, and policy 0 does not steer");
    let other_family = refused(&[("0.0.0.0/0", Some(1)), ("::/0", Some(1)), ("2001:db8::/32", Some(0))]);
    assert_eq!(other_family, [is("0.0.0.0/0", Some(1)), is("::/0", Some(0))]);
}

#[test]
fn repeatedly_refused_policy_does_not_cause_others_to_be_refused() {
    // Policy 1 steers everything that pod 1 sends, and policy 0 fills the table; then policy 2 wants a destination within policy 1.
    let default: IpNet = "0.0.0.0/0".parse().unwrap();
    let mut view = routes(0, limits::MAX_ROUTES - 1);
    add(&mut view, 1, &[1, 2], vec![(default, Some(id(1)))]);
    let mut world = World::new();
    assert!(world.write(&view).is_empty());
    add(&mut view, 1, &[1, 2], vec![(default, Some(id(1))), (net(1), Some(id(2)))]);
    for _ in 0..3 {
        assert_eq!(world.write(&view).policies.into_keys().collect::<Vec<_>>(), [id(2)]);
        assert!(world.drops(1, net(1)));
    }
}

#[test]
fn an_agent_that_starts_has_room_for_the_routes_that_are_there() {
    let most = limits::MAX_ROUTES / 2 + 1_000;
    let mut world = World::new();
    let view = routes(0, most);
    assert!(world.write(&view).is_empty());
    let before = world.present.clone();
    world.encoder = Encoder::recover(&world.present);
    assert!(world.write(&view).is_empty());
    assert_eq!(world.present, before, "with the same numbers");
}

#[test]
fn routes_that_replace_others_are_written_once_those_are_gone() {
    let most = limits::MAX_ROUTES / 2 + 1_000;
    let mut world = World::new();
    assert!(world.write(&routes(0, most)).is_empty());
    let next = routes(most as u32, most);
    assert_eq!(world.write(&next).policies.len(), 1);
    assert!(world.drops(0, net(0)) && world.drops(0, net(most as u32)));
    assert!(world.write(&next).is_empty());
    assert_eq!(world.present.v4.routes.len(), most);
}

#[test]
fn new_pods_without_room_are_held() {
    let many = |range: std::ops::Range<usize>| {
        let mut view = empty();
        range.for_each(|n| add(&mut view, n, &[0], vec![(net(1), Some(id(0)))]));
        view
    };
    let most = limits::MAX_ENDPOINTS;
    let mut world = World::new();
    assert!(world.write(&many(0..most)).is_empty());
    let refused = world.write(&many(0..most + 2));
    assert_eq!(refused.pods.keys().collect::<Vec<_>>(), [&pod(most), &pod(most + 1)]);
    let told = refused.troubles(&BTreeMap::new());
    assert_eq!(
        told.iter().map(|trouble| trouble.pod.clone()).collect::<Vec<_>>(),
        [most, most + 1].map(|n| Some(pod(n)))
    );
    assert!(world.present.config.unwrap().flags & flags::HOLD != 0);
    let more = many(2..most + 2);
    assert_eq!(world.write(&more).pods.len(), 2, "two leave, and make room");
    assert!(world.write(&more).is_empty());
    assert!(world.present.config.unwrap().flags & flags::HOLD == 0);
}

#[test]
fn classes_without_room_leave_their_pods_held_until_others_are_gone() {
    let most = limits::MAX_CLASSES - 1;
    let each = |first: usize| {
        let mut view = empty();
        // Few policies, in different sets.
        for n in first..first + most {
            let class: Vec<usize> = (0..13).filter(|bit| (n + 1) >> bit & 1 == 1).collect();
            add(&mut view, n - first, &class, vec![(net(1), Some(id(class[0])))]);
        }
        view
    };
    let mut world = World::new();
    assert!(world.write(&each(0)).is_empty());
    let next = each(10);
    assert_eq!(world.write(&next).pods.len(), 10);
    assert!(world.present.config.unwrap().flags & flags::HOLD != 0);
    assert!(world.write(&next).is_empty());
}

#[test]
fn exceptions_without_room_are_left_out_and_told() {
    let most = limits::MAX_EXCEPTS as u32;
    let with = |range: std::ops::Range<u32>| NodeView { excepts: range.map(net).collect(), ..empty() };
    let mut world = World::new();
    assert!(world.write(&with(0..most)).is_empty());
    let refused = world.write(&with(1..most + 1));
    assert_eq!(refused.excepts.keys().collect::<Vec<_>>(), [&net(most)]);
    assert!(refused.errors().is_some_and(|error| error.contains("EXCEPTS_V4")));
    assert!(world.write(&with(1..most + 1)).is_empty());
}

#[test]
fn if_nothing_can_be_left_out_unknown_sources_are_held() {
    let with = |count: usize| NodeView { uplinks: (1..=count as u32).map(|i| (i, [2; 6])).collect(), ..empty() };
    let mut world = World::new();
    world.write(&with(limits::MAX_UPLINKS));
    let overflow = world.encoder.fit(&mut with(limits::MAX_UPLINKS + 1), &world.present).unwrap_err();
    assert_eq!(overflow.table, Table::Uplinks);
    let held = held(&world.present);
    assert_eq!(held.config.map(|config| config.flags & flags::HOLD), Some(flags::HOLD));
    assert_eq!(Tables { config: world.present.config, ..held }, world.present);
}

#[test]
fn slots_without_room_cost_the_policy_that_grows() {
    let addresses = |count: u32| (0..count).map(|i| IpAddr::from((0xc000_0200 + i).to_be_bytes()));
    let with = |slots: &[u32]| {
        let mut view = empty();
        view.egress_ips = addresses(1_000).map(|ip| (ip, Default::default())).collect();
        for (n, count) in slots.iter().enumerate() {
            add(&mut view, n, &[n], vec![(net(n as u32), Some(id(n)))]);
            let slots = addresses(*count).map(|address| SlotView { address, weight: 1, usable: false }).collect();
            view.policies.get_mut(&id(n)).unwrap().slots = slots;
        }
        view
    };
    let mut world = World::new();
    let mut slots = vec![1_000; 65];
    assert!(world.write(&with(&slots)).is_empty());
    slots[3] = 1;
    assert!(world.write(&with(&slots)).is_empty());
    slots.push(900);
    slots[3] = 1_000;
    assert_eq!(world.write(&with(&slots)).policies.into_keys().collect::<Vec<_>>(), [id(3)], "it grows most");
}

#[test]
fn classes_with_the_same_routes_keep_their_numbers_over_a_restart() {
    // The second policy steers nothing in its class, and the last class has no routes at all.
    let mut view = empty();
    add(&mut view, 0, &[0], vec![(net(1), Some(id(0)))]);
    add(&mut view, 1, &[0, 1], vec![(net(1), Some(id(0)))]);
    add(&mut view, 2, &[1], vec![]);
    let mut world = World::new();
    world.write(&view);
    let before = world.present.clone();
    world.encoder = Encoder::recover(&world.present);
    world.write(&view);
    assert_eq!(world.present, before);
}
