//! Numbers, tables and positions in the maps keep their guarantees over arbitrary histories and restarts.

use super::{
    rig,
    scenes::{self, history},
};
use egress_common::{
    abi::NameKey,
    endpoint::{NO_POLICY, RouteKey},
    limits::{self, MAGLEV_CHUNK},
    net,
};
use egress_core::{
    encode::{
        Encoder, EndpointView, NodeView, PolicyView, SlotView,
        fit::Refused,
        tables::{FamilyTables, Tables},
    },
    model::{Policy, PolicyId},
    plan::classes,
};
use ipnet::IpNet;
use proptest::{collection::vec, prelude::*, sample::subsequence};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// Encodes a history step by step. `check` sees the view, the present tables and the wanted ones.
fn each_step(history: &[(NodeView, bool)], mut check: impl FnMut(&NodeView, &Tables, &Tables)) {
    let mut encoder = Encoder::recover(&Tables::default());
    let mut present = Tables::default();
    for (view, restart) in history {
        if *restart {
            encoder = Encoder::recover(&present);
        }
        let wanted = encoder.encode(view, &present).unwrap();
        check(view, &present, &wanted);
        present = wanted;
    }
}

/// Returns the meaning of each class number, by the endpoints that have it.
fn class_numbers(view: &NodeView, tables: &Tables) -> BTreeMap<u32, BTreeSet<PolicyId>> {
    let mut numbers = BTreeMap::new();
    for endpoint in view.endpoints.values() {
        for ip in &endpoint.ips {
            let found = match ip {
                IpAddr::V4(a) => tables.v4.endpoints[&net::v4(*a)],
                IpAddr::V6(a) => tables.v6.endpoints[&net::v6(*a)],
            };
            let before = numbers.insert(found.class, endpoint.class.clone());
            assert!(before.is_none_or(|b| b == endpoint.class), "one number, two classes");
        }
    }
    numbers
}

fn chunks_of(tables: &Tables) -> BTreeSet<u32> {
    let chunks = |p: &egress_common::endpoint::Policy| p.table..p.table + p.table_len.div_ceil(MAGLEV_CHUNK as u32);
    tables.policies.values().flat_map(chunks).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn indices_of_objects_that_remain_do_not_change(history in history()) {
        each_step(&history, |_, present, wanted| {
            let names = |t: &Tables| -> BTreeMap<(u32, [u8; egress_common::abi::NAME_LEN]), u32> {
                t.names.iter().map(|(NameKey { kind, id }, n)| ((*kind, n.bytes), *id)).collect()
            };
            let before = names(present);
            for (name, id) in names(wanted) {
                assert!(before.get(&name).is_none_or(|b| *b == id), "another number for the same thing");
            }
        });
    }

    #[test]
    fn reassigned_egress_index_gets_a_higher_generation(history in history()) {
        each_step(&history, |view, present, wanted| {
            for (index, new) in &wanted.egress_ips {
                let Some(old) = present.egress_ips.get(index) else { continue };
                if old.addr == new.addr {
                    assert_eq!(old.generation, new.generation);
                } else {
                    assert!(new.generation > old.generation);
                }
            }
            for address in view.egress_ips.keys() {
                let with_it = wanted.egress_ips.values().filter(|e| e.addr == net::any(*address));
                assert_eq!(with_it.count(), 1);
            }
        });
    }

    #[test]
    fn class_number_in_the_maps_is_not_reassigned(history in history()) {
        let mut before = BTreeMap::new();
        each_step(&history, |view, present, wanted| {
            let now = class_numbers(view, wanted);
            let routed: BTreeSet<u32> = present.v4.routes.keys().map(|(k, _)| k.class).collect();
            for (number, class) in now.iter().filter(|(n, _)| **n != 0) {
                assert!(before.get(number).is_none_or(|b| b == class), "number {number} changes its meaning");
                assert!(!routed.contains(number) || before.get(number) == Some(class));
            }
            before = now;
        });
    }

    #[test]
    fn changed_maglev_table_does_not_overlap_tables_in_use(history in history()) {
        each_step(&history, |_, present, wanted| {
            let in_use = chunks_of(present);
            for (place, chunk) in &wanted.maglev {
                assert!(!in_use.contains(place) || present.maglev.get(place) == Some(chunk));
            }
            let own: usize =
                wanted.policies.values().map(|p| p.table_len.div_ceil(MAGLEV_CHUNK as u32) as usize).sum();
            assert_eq!(chunks_of(wanted).len(), own, "two tables overlap");
            assert_eq!(chunks_of(wanted), wanted.maglev.keys().copied().collect());
        });
    }

    #[test]
    fn the_same_view_over_the_same_maps_gives_the_same_tables(history in history()) {
        each_step(&history, |view, present, _| {
            let first = Encoder::recover(present).encode(view, present).unwrap();
            let second = Encoder::recover(present).encode(view, present).unwrap();
            assert_eq!(first, second);
            // Once the tables are in the maps, nothing is left to do.
            let mut encoder = Encoder::recover(present);
            let first = encoder.encode(view, present).unwrap();
            assert_eq!(&encoder.encode(view, &first).unwrap(), &first);
        });
    }

    #[test]
    fn unused_block_list_entries_repeat_the_nodes_own_blocks(history in history()) {
        each_step(&history, |view, _, wanted| {
            for (address, e) in &view.egress_ips {
                let index = wanted.egress_ips.iter().find(|(_, r)| r.addr == net::any(*address)).unwrap().0;
                match wanted.blocks.get(index) {
                    None => assert!(e.blocks.is_empty()),
                    Some(list) => {
                        assert_eq!(list.count as usize, e.blocks.len());
                        let head: BTreeSet<u16> = list.blocks[..list.count as usize].iter().copied().collect();
                        assert_eq!(&head, &e.blocks);
                        assert!(list.blocks.iter().all(|b| e.blocks.contains(b)));
                    }
                }
            }
        });
    }
}

#[test]
fn map_full_view_that_does_not_fit_is_refused_as_a_whole() {
    let small = NodeView { node: Some(scenes::node(0)), config: Some(scenes::settings()), ..NodeView::default() };
    let mut encoder = Encoder::recover(&Tables::default());
    let present = encoder.encode(&small, &Tables::default()).unwrap();
    let mut uplinks = small.clone();
    uplinks.uplinks = (0..=limits::MAX_UPLINKS as u32).map(|i| (i, [0; 6])).collect();
    let mut excepts = small.clone();
    excepts.excepts = (0..=limits::MAX_EXCEPTS as u32).map(|i| IpNet::from(IpAddr::from(i.to_be_bytes()))).collect();
    let mut egress = small.clone();
    egress.egress_ips =
        (0..limits::MAX_EGRESS_IPS as u32).map(|i| (IpAddr::from(i.to_be_bytes()), Default::default())).collect();
    let mut nodes = small.clone();
    let addresses: Vec<IpAddr> =
        (0..=limits::MAX_NODE_ADDRESSES as u32).map(|i| IpAddr::from(i.to_be_bytes())).collect();
    nodes.nodes.insert(scenes::node(1), addresses);
    // A packet's note has room for the numbers of these classes and no more.
    let mut classes = with_policies(&[]);
    let subset = |n: usize| (0..13).filter(|i| n >> i & 1 != 0).map(scenes::policy_id).collect();
    for n in 1..=limits::MAX_CLASSES {
        let (class, ips): (BTreeSet<_>, _) = (subset(n), [IpAddr::from((n as u32).to_be_bytes())].into());
        classes.classes.insert(class.clone(), Vec::new());
        classes.endpoints.insert(scenes::endpoint_id(n), EndpointView { ips, class, ..EndpointView::default() });
    }
    let mut fits = classes.clone();
    fits.endpoints.remove(&scenes::endpoint_id(limits::MAX_CLASSES));
    fits.classes.remove(&subset(limits::MAX_CLASSES));
    let tables = Encoder::recover(&Tables::default()).encode(&fits, &Tables::default()).unwrap();
    assert_eq!(tables.v4.endpoints.values().map(|e| e.class as usize).max(), Some(limits::MAX_CLASSES - 1));
    for (view, map) in [
        (uplinks, "UPLINKS"),
        (excepts, "EXCEPTS_V4"),
        (egress, "EGRESS_IPS"),
        (nodes, "NODE_INDEX"),
        (classes, "CLASSES"),
    ] {
        let refused = encoder.encode(&view, &present).unwrap_err();
        assert_eq!((refused.table.name(), refused.wanted), (map, refused.capacity + 1), "{refused}");
        assert_eq!(encoder.encode(&small, &present).unwrap(), present, "the encoder remembers what was refused");
    }
}

#[test]
fn retired_egress_ip_regains_its_index_which_is_reused_last() {
    let with = |addresses: &[u32]| NodeView {
        egress_ips: addresses.iter().map(|a| (IpAddr::from(a.to_be_bytes()), Default::default())).collect(),
        ..NodeView::default()
    };
    let mut encoder = Encoder::recover(&Tables::default());
    let first = encoder.encode(&with(&[10]), &Tables::default()).unwrap();
    let gone = encoder.encode(&with(&[]), &first).unwrap();
    let record = gone.egress_ips[&1];
    assert_eq!(
        record.addr,
        net::any(IpAddr::from(10u32.to_be_bytes())),
        "flows that are left find their other half by it"
    );
    assert!(record.gateway == 0 && record.flags == 0 && gone.v4.egress_index.is_empty());
    assert_eq!(encoder.encode(&with(&[10]), &gone).unwrap(), first);
    // Other addresses take unused indices as long as there are any.
    let all: Vec<u32> = (20..20 + limits::MAX_EGRESS_IPS as u32 - 2).collect();
    let others = encoder.encode(&with(&all), &gone).unwrap();
    assert_eq!(others.egress_ips[&1], record);
    let last = encoder.encode(&with(&[&all[..], &[9]].concat()), &others).unwrap();
    assert_eq!(last.egress_ips[&1].generation, record.generation + 1);
}

#[test]
fn slots_without_weight_get_no_flows() {
    let mut view = NodeView::default();
    view.egress_ips.insert(scenes::egress_ip(0), Default::default());
    let slot = SlotView { address: scenes::egress_ip(0), weight: 0, usable: true };
    let policy = PolicyView { slots: vec![slot], ..PolicyView::default() };
    view.policies.insert(scenes::policy_id(0), policy);
    let tables = Encoder::recover(&Tables::default()).encode(&view, &Tables::default()).unwrap();
    assert!(tables.policies.values().all(|p| p.table_len == 0));
}

const PLACES: [&str; 7] =
    ["0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "10.1.2.3/32", "::/0", "2001:db8::/32"];
const DESTINATIONS: [&str; 7] = ["10.1.2.3", "10.1.2.4", "10.1.9.9", "10.9.9.9", "9.9.9.9", "2001:db8::1", "2a00::1"];

fn nets() -> impl Strategy<Value = Vec<IpNet>> {
    subsequence(PLACES.to_vec(), 0..PLACES.len()).prop_map(|n| n.iter().map(|t| t.parse().unwrap()).collect())
}

fn policies() -> impl Strategy<Value = Vec<Policy>> {
    vec((nets(), nets(), 0i64..2), 1..4).prop_map(|all| {
        let one = |(n, (destinations, excluded, created))| Policy {
            destinations,
            excluded,
            created,
            ..scenes::policy(&format!("p{n}"))
        };
        all.into_iter().enumerate().map(one).collect()
    })
}

/// Reads the policies literally: the longest matching destination among the policies that do not exclude it wins.
fn naive(policies: &[Policy], excepts: &[IpNet], destination: IpAddr) -> Option<PolicyId> {
    if excepts.iter().any(|e| e.contains(&destination)) {
        return None;
    }
    let longest = |p: &Policy| p.destinations.iter().filter(|n| n.contains(&destination)).map(IpNet::prefix_len).max();
    let mut matching: Vec<(u8, &Policy)> = policies
        .iter()
        .filter(|p| !p.excluded.iter().any(|n| n.contains(&destination)))
        .filter_map(|p| Some((longest(p)?, p)))
        .collect();
    matching.sort_by(|(a, p), (b, q)| b.cmp(a).then(p.precedence(q)));
    matching.first().map(|(_, p)| p.id.clone())
}

/// Performs the lookups of `classify.rs`, entry by entry.
fn look_up<A: Ord + Copy>(t: &FamilyTables<A>, class: u32, addr: A, bits: impl Fn(A) -> u128, width: u32) -> u32 {
    let matches = |key: A, len: u32| len == 0 || bits(key) >> (width - len) == bits(addr) >> (width - len);
    if t.excepts.keys().any(|(key, len)| matches(*key, *len)) {
        return NO_POLICY;
    }
    let routes =
        t.routes.iter().filter(|((RouteKey { class: c, addr }, len), _)| *c == class && matches(*addr, len - 32));
    routes.max_by_key(|((_, len), _)| *len).map_or(NO_POLICY, |(_, policy)| *policy)
}

proptest! {
    #[test]
    fn lookups_in_the_tables_agree_with_the_policies(policies in policies(), excepts in nets()) {
        let excepts: Vec<IpNet> = excepts.into_iter().filter(|n| n.prefix_len() > 16).collect();
        let by_id: BTreeMap<PolicyId, Policy> = policies.iter().map(|p| (p.id.clone(), p.clone())).collect();
        let class: BTreeSet<PolicyId> = by_id.keys().cloned().collect();
        let mut view = NodeView { excepts: excepts.iter().copied().collect(), ..NodeView::default() };
        view.classes.insert(class.clone(), classes::merge(&by_id, class.iter()));
        let none = PolicyView { slots: Vec::new(), ..PolicyView::default() };
        view.policies = class.iter().map(|p| (p.clone(), none.clone())).collect();
        let endpoint = EndpointView { ips: [IpAddr::from([10, 2, 0, 1])].into(), class, history_until: 0, interfaces: BTreeMap::new() };
        view.endpoints.insert(scenes::endpoint_id(0), endpoint);
        let t = Encoder::recover(&Tables::default()).encode(&view, &Tables::default()).unwrap();
        let number = t.v4.endpoints.values().next().unwrap().class;
        for destination in DESTINATIONS {
            let destination: IpAddr = destination.parse().unwrap();
            let found = match destination {
                IpAddr::V4(a) => look_up(&t.v4, number, net::v4(a), |a| u32::from_be(a[0]).into(), 32),
                IpAddr::V6(a) => look_up(&t.v6, number, net::v6(a), |a| net::from_v6(a).into(), 128),
            };
            let names = t.names.iter().filter(|(k, _)| k.kind == egress_common::abi::name_kind::POLICY && k.id == found);
            let found = names.map(|(_, n)| egress_core::encode::name_text(n).parse::<PolicyId>().unwrap()).next();
            prop_assert_eq!(found, naive(&policies, &excepts, destination), "{}", destination);
        }
    }
}

/// Returns a small view: one pod per policy, and each policy with its prefixes and one slot.
fn with_policies(policies: &[(usize, u32)]) -> NodeView {
    let mut view = NodeView { node: Some(scenes::node(0)), config: Some(scenes::settings()), ..NodeView::default() };
    view.egress_ips.insert(scenes::egress_ip(0), Default::default());
    for (n, prefixes) in policies {
        let (id, class) = (scenes::policy_id(*n), BTreeSet::from([scenes::policy_id(*n)]));
        let slot = SlotView { address: scenes::egress_ip(0), weight: 1, usable: true };
        view.policies.insert(id.clone(), PolicyView { slots: vec![slot], ..PolicyView::default() });
        let nets = (0..*prefixes).map(|i| (IpNet::from(IpAddr::from((i << 8).to_be_bytes())), Some(id.clone())));
        view.classes.insert(class.clone(), nets.collect());
        let ips = [IpAddr::from([10, 1, 0, *n as u8])].into();
        view.endpoints.insert(scenes::endpoint_id(*n), EndpointView { ips, class, ..EndpointView::default() });
    }
    view
}

/// docs/failures.md: overflow-open.
#[test]
fn overflow_open_only_the_policy_that_does_not_fit_is_refused() {
    let mut encoder = Encoder::recover(&Tables::default());
    let (present, refused) = encoder.fit(&mut with_policies(&[(0, 3)]), &Tables::default()).unwrap();
    assert_eq!(refused, Refused::default());
    // A policy that is too large, then a new pod with a new policy, with and without a restart of the agent.
    for restart in [false, true] {
        if restart {
            encoder = Encoder::recover(&present);
        }
        let too_many = limits::MAX_ROUTES as u32;
        let mut view = with_policies(&[(0, 3), (1, too_many), (2, 2)]);
        let (tables, refused) = encoder.fit(&mut view, &present).unwrap();
        assert_eq!(refused.policies.keys().collect::<Vec<_>>(), [&scenes::policy_id(1)]);
        let slots = tables.members.keys().map(|k| k.policy).collect::<BTreeSet<_>>();
        let number = |n: usize| {
            let id = tables.v4.endpoints[&net::v4([10, 1, 0, n as u8].into())];
            let routes = tables.v4.routes.iter().filter(move |((key, _), _)| key.class == id.class);
            let policies: BTreeSet<u32> = routes.clone().map(|(_, policy)| *policy).collect();
            (routes.count(), policies)
        };
        for (n, routes) in [(0, 3), (2, 2)] {
            let (count, policies) = number(n);
            assert!(count == routes && policies.is_subset(&slots), "policy {n}");
        }
        // A refused policy drops: no packet of its pods leaves with another address.
        let (count, policies) = number(1);
        assert!(count == 1 && policies.len() == 1 && policies.is_disjoint(&slots));
        let all = RouteKey { class: tables.v4.endpoints[&net::v4([10, 1, 0, 1].into())].class, addr: [0] };
        assert!(tables.v4.routes.contains_key(&(all, 32)));
        // And it is reported by name.
        let told = refused.troubles(&BTreeMap::new());
        assert_eq!(told.iter().map(|t| &t.policy).collect::<Vec<_>>(), [&scenes::policy_id(1)]);
        assert!(told[0].message.contains("ROUTES_V4"), "{}", told[0].message);
    }
    // An existing policy stays whatever is added. A refused one is accepted when there is room.
    let (full, refused) = encoder.fit(&mut with_policies(&[(0, 3), (1, 200_000)]), &present).unwrap();
    assert_eq!(refused, Refused::default());
    let mut both = with_policies(&[(0, 3), (1, 200_000), (2, 100_000)]);
    let (without, refused) = encoder.fit(&mut both, &full).unwrap();
    assert_eq!(refused.policies.keys().collect::<Vec<_>>(), [&scenes::policy_id(2)]);
    let (_, refused) = encoder.fit(&mut with_policies(&[(0, 3), (2, 100_000)]), &without).unwrap();
    assert_eq!(refused.policies.len(), 1, "the old entries are still there");
    let (rest, _) = encoder.fit(&mut with_policies(&[(0, 3)]), &without).unwrap();
    let (_, refused) = encoder.fit(&mut with_policies(&[(0, 3), (2, 100_000)]), &rest).unwrap();
    assert_eq!(refused, Refused::default());
}

/// docs/failures.md: overflow-open, for egress IPs.
#[test]
fn overflow_open_only_egress_ips_that_do_not_fit_are_refused() {
    let addresses = |n: u32| (1..=n).map(|i| IpAddr::from([10, 9, (i >> 8) as u8, i as u8]));
    let places = limits::MAX_EGRESS_IPS as u32 - 1;
    let with = |n: u32| {
        let mut view = with_policies(&[(0, 3)]);
        view.egress_ips = addresses(n).map(|address| (address, Default::default())).collect();
        for policy in view.policies.values_mut() {
            policy.slots = addresses(n).map(|address| SlotView { address, weight: 1, usable: true }).collect();
        }
        view
    };
    let mut encoder = Encoder::recover(&Tables::default());
    let (present, refused) = encoder.fit(&mut with(places), &Tables::default()).unwrap();
    assert_eq!(refused, Refused::default());
    let mut view = with(places + 1);
    // This address sorts first, but existing ones stay.
    let late = IpAddr::from([10, 8, 0, 1]);
    view.egress_ips.insert(late, Default::default());
    view.egress_ips.remove(&addresses(places + 1).next_back().unwrap());
    let new = with_policies(&[(3, 1)]);
    view.policies.extend(new.policies);
    view.classes.extend(new.classes);
    view.endpoints.extend(new.endpoints);
    let (tables, refused) = encoder.fit(&mut view, &present).unwrap();
    assert_eq!(refused.egress_ips.keys().collect::<Vec<_>>(), [&late]);
    assert!(!view.egress_ips.contains_key(&late), "it is not announced or reported as carried");
    assert_eq!(tables.egress_ips, present.egress_ips);
    assert_eq!(tables.v4.endpoints.len(), 2, "a new pod");
    assert_eq!(tables.policies.len(), 4, "a new policy");
}

#[test]
fn reused_pod_ip_new_pod_gets_a_new_endpoint_number() {
    let mut view = rig::scene();
    let (mut encoder, mut present) = (Encoder::recover(&Tables::default()), Tables::default());
    let number = |tables: &Tables| tables.v4.endpoints[&net::v4([10, 1, 0, 2].into())].id;
    let mut seen = std::collections::BTreeSet::new();
    for uid in ["a", "b", "c"] {
        let pod = view.endpoints.values().find(|e| e.ips.contains(&rig::addr(rig::POD4))).unwrap().clone();
        view.endpoints.retain(|_, e| !e.ips.contains(&rig::addr(rig::POD4)));
        // The pod is gone for a while, so its number is free by then.
        for _ in 0..2 {
            present = encoder.encode(&view, &present).unwrap();
        }
        view.endpoints.insert(egress_core::model::EndpointId::new("prod", "web-0", uid), pod);
        present = encoder.encode(&view, &present).unwrap();
        assert!(seen.insert(number(&present)), "{uid} has the number of another pod");
        // The pod keeps its number over a restart.
        encoder = Encoder::recover(&present);
        let again = encoder.encode(&view, &present).unwrap();
        assert_eq!(number(&again), number(&present));
    }
}
