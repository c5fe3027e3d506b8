//! The order of writing, interrupted at every step, and the writing of real maps.

use super::{BpfDir, scenes};
use crate::datapath::{
    load::{Programs, Sizes},
    maps::{Maps, MapsError},
    write::{MapKind, MapUpdate, MapWriter, Sink},
};
use egress_common::{
    abi::{NameKey, name_kind},
    config::{DatapathConfig, flags},
    endpoint::{MemberKey, PolicyKey},
    limits::MAGLEV_CHUNK,
    net,
    traffic::REFUSED,
};
use egress_core::encode::{EgressView, Encoder, EndpointView, NodeView, PolicyView, SlotView, tables::Tables};
use ipnet::IpNet;
use proptest::{
    prelude::*,
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};
use std::{collections::BTreeSet, net::IpAddr, os::fd::AsRawFd};

/// Maps that accept a number of operations and then fail, as when the agent dies.
struct Failing {
    tables: Tables,
    left: usize,
}

impl Failing {
    fn spend(&mut self) -> Result<(), MapsError> {
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(MapsError::Access { map: "any", source: aya::maps::MapError::KeyNotFound }),
        }
    }
}

impl Sink for Failing {
    fn set<K: MapKind>(&mut self, key: &K::Key, value: &K::Value) -> Result<(), MapsError> {
        self.spend()?;
        K::entries_mut(&mut self.tables).insert(*key, *value);
        Ok(())
    }
    fn remove<K: MapKind>(&mut self, key: &K::Key) -> Result<(), MapsError> {
        self.spend()?;
        K::entries_mut(&mut self.tables).remove(key);
        Ok(())
    }
    fn configure(&mut self, config: DatapathConfig) -> Result<(), MapsError> {
        self.spend()?;
        self.tables.config = Some(config);
        Ok(())
    }
}

/// Checks that everything an entry names exists.
fn consistent(t: &Tables) -> Result<(), String> {
    let fail = |what: String| Err(what);
    let named = |kind, id| t.names.contains_key(&NameKey { kind, id });
    let policy = |id| named(name_kind::POLICY, id) && t.policies.contains_key(&PolicyKey { policy: id, family: 4 });
    let nodes = |i: u32| i == 0 || t.nodes.contains_key(&i);
    for winner in t.v4.routes.values().chain(t.v6.routes.values()).filter(|p| **p != 0) {
        if !policy(*winner) {
            return fail(format!("a route names policy {winner}"));
        }
    }
    for e in t.v4.endpoints.values().chain(t.v6.endpoints.values()) {
        if !named(name_kind::ENDPOINT, e.id) || t.config.is_none() {
            return fail(format!("endpoint {e:?}"));
        }
    }
    for (key, p) in &t.policies {
        for at in 0..p.table_len {
            let Some(chunk) = t.maglev.get(&(p.table + at / MAGLEV_CHUNK as u32)) else {
                return fail(format!("{key:?} names a chunk that is not there"));
            };
            let egress = u32::from(chunk.egress[at as usize % MAGLEV_CHUNK]);
            if !t.members.contains_key(&MemberKey { policy: key.policy, egress }) {
                return fail(format!("the table of {key:?} names {egress}"));
            }
        }
    }
    for (key, m) in &t.members {
        let e = t.egress_ips.get(&key.egress);
        if !named(name_kind::POLICY, key.policy) || e.is_none_or(|e| e.generation != m.generation) {
            return fail(format!("{key:?}: {m:?} names {e:?}"));
        }
        let Some(e) = e else { continue };
        if !t.v4.egress_index.values().chain(t.v6.egress_index.values()).any(|i| *i == key.egress) {
            return fail(format!("a slot refers to the retired {e:?}"));
        }
    }
    for (key, egress) in &t.assignments {
        if !named(name_kind::ENDPOINT, key.endpoint)
            || !t.members.contains_key(&MemberKey { policy: key.policy, egress: *egress })
        {
            return fail(format!("{key:?} names {egress}"));
        }
    }
    for (key, account) in &t.accounts {
        let known = key.egress == REFUSED || t.egress_ips.contains_key(&key.egress);
        if !named(name_kind::NAMESPACE, key.namespace) || !named(name_kind::POLICY, key.policy) || !known {
            return fail(format!("account {account} of {key:?}"));
        }
    }
    for (i, e) in &t.egress_ips {
        if !nodes(e.gateway) {
            return fail(format!("egress IP {i} has gateway {}", e.gateway));
        }
    }
    let index = t.v4.egress_index.iter().map(|(a, i)| (net::any(net::from_v4(*a).into()), i));
    let index = index.chain(t.v6.egress_index.iter().map(|(a, i)| (*a, i)));
    for (address, i) in index {
        if t.egress_ips.get(i).is_none_or(|e| e.addr != address) {
            return fail(format!("index {i} is not of {address:?}"));
        }
    }
    for i in t.blocks.keys().chain(t.leases.keys()) {
        if t.blocks.contains_key(i) && !t.egress_ips.contains_key(i) {
            return fail(format!("blocks of {i}"));
        }
    }
    if t.leases.values().flat_map(|l| l.node).any(|n| !nodes(u32::from(n))) {
        return fail("a lease names a missing node".into());
    }
    if t.node_index.values().any(|i| !nodes(*i)) {
        return fail("a tunnel address names a missing node".into());
    }
    Ok(())
}

/// Returns whether every entry that exists before and after also exists in between.
fn nothing_missing<K: MapKind>(before: &Tables, now: &Tables, after: &Tables) -> bool {
    let (before, now, after) = (K::entries(before), K::entries(now), K::entries(after));
    before.keys().filter(|k| after.contains_key(k)).all(|k| now.contains_key(k))
}

/// Returns the tables with only the chunks that policies use.
fn without_leftovers(mut t: Tables) -> Tables {
    let used = |t: &Tables, chunk: u32| {
        t.policies.values().any(|p| (p.table..p.table + p.table_len.div_ceil(MAGLEV_CHUNK as u32)).contains(&chunk))
    };
    let maglev = t.maglev.clone().into_iter().filter(|(i, _)| used(&t, *i)).collect();
    t.maglev = maglev;
    t
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn after_an_interrupted_write_no_entry_refers_to_a_missing_one(history in scenes::history()) {
        use crate::datapath::write::*;
        let mut encoder = Encoder::recover(&Tables::default());
        let mut present = Tables::default();
        for (view, _) in &history {
            let wanted = encoder.encode(view, &present).unwrap();
            for left in 0.. {
                let mut sink = Failing { tables: present.clone(), left };
                let (mut generation, mut recheck) = (1, false);
                let mut change = MapUpdate { sink: &mut sink, present: &present, wanted: &wanted };
                let result = change.carry_out(&mut generation, &mut recheck);
                if let Err(broken) = consistent(&sink.tables) {
                    prop_assert!(false, "after {} operations: {}", left, broken);
                }
                let now = &sink.tables;
                prop_assert!(
                    nothing_missing::<Members>(&present, now, &wanted)
                        && nothing_missing::<Policies>(&present, now, &wanted)
                        && nothing_missing::<EndpointsV4>(&present, now, &wanted)
                        && nothing_missing::<EgressIndexV4>(&present, now, &wanted)
                        && nothing_missing::<Nodes>(&present, now, &wanted)
                );
                if let Ok(config) = result {
                    let done = without_leftovers(sink.tables);
                    prop_assert_eq!(&done, &Tables { config, ..wanted.clone() });
                    break;
                }
                // The next agent finishes the write.
                let mut sink = Failing { left: usize::MAX, ..sink };
                let torn = without_leftovers(sink.tables.clone());
                let wanted = Encoder::recover(&torn).encode(view, &torn).unwrap();
                let config = MapUpdate { sink: &mut sink, present: &torn, wanted: &wanted }
                    .carry_out(&mut generation, &mut recheck)
                    .unwrap();
                prop_assert_eq!(without_leftovers(sink.tables), Tables { config, ..wanted });
            }
            present = Tables { config: Some(DatapathConfig { generation: 1, ..scenes::settings() }), ..wanted };
        }
    }
}

fn writer(dir: &BpfDir) -> MapWriter {
    MapWriter::open(Maps::open(&dir.pins).unwrap()).unwrap()
}

/// Invariant: the hold ends only when the pod that caused it is known.
#[test]
fn held_packets_are_released_last() {
    let mut encoder = Encoder::recover(&Tables::default());
    let views = some_views(20);
    for (before, after) in views.iter().zip(&views[1..]) {
        let mut present = encoder.encode(before, &Tables::default()).unwrap();
        present.config = Some(DatapathConfig { flags: flags::HOLD, ..scenes::settings() });
        let wanted = encoder.encode(after, &present).unwrap();
        for left in 0.. {
            let mut sink = Failing { tables: present.clone(), left };
            let result =
                MapUpdate { sink: &mut sink, present: &present, wanted: &wanted }.carry_out(&mut 1, &mut false);
            let now = &sink.tables;
            let held = now.config.unwrap().flags & flags::HOLD != 0;
            let known = now.v4.endpoints == wanted.v4.endpoints && now.v6.endpoints == wanted.v6.endpoints;
            assert!(held || known, "after {left} operations");
            if result.is_ok() {
                assert!(!held);
                break;
            }
        }
    }
}

fn some_views(n: usize) -> Vec<NodeView> {
    let mut runner = TestRunner::deterministic();
    let strategy = scenes::view();
    (0..n).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
}

/// The number of pods, and of policies that each select all of them.
const PODS: usize = 2_000;
const POLICIES: usize = 6;

/// Returns a node with many pods under several policies with several prefixes each. On a small node, growth with their product could not be
/// distinguished.
fn crowded(pods: usize) -> NodeView {
    let slots = vec![SlotView { address: scenes::egress_ip(0), weight: 1, usable: true }];
    let policy = PolicyView { slots, ..PolicyView::default() };
    let class: BTreeSet<_> = (0..POLICIES).map(scenes::policy_id).collect();
    let routes = (0..POLICIES * 20).map(|n| {
        let net = IpNet::new(IpAddr::from([198, 51, n as u8, 0]), 24).unwrap();
        (net, Some(scenes::policy_id(n % POLICIES)))
    });
    let endpoint = |n: usize| {
        let ip = IpAddr::from([10, 1, (n / 250) as u8, (n % 250) as u8]);
        (
            scenes::endpoint_id(n),
            EndpointView { ips: [ip].into(), class: class.clone(), history_until: 0, interfaces: Default::default() },
        )
    };
    NodeView {
        node: Some(scenes::node(0)),
        config: Some(scenes::settings()),
        nodes: [(scenes::node(0), vec![IpAddr::from([10, 0, 0, 1])])].into(),
        egress_ips: [(scenes::egress_ip(0), EgressView { gateway: Some(scenes::node(0)), ..Default::default() })]
            .into(),
        policies: class.iter().map(|id| (id.clone(), policy.clone())).collect(),
        classes: [(class.clone(), routes.collect())].into(),
        endpoints: (0..pods).map(endpoint).collect(),
        ..NodeView::default()
    }
}

/// Row quadratic of docs/failures.md: the work of a change grows with the change, not with the size of the tables.
#[test]
fn quadratic_one_pod_among_thousands_costs_a_handful_of_writes() {
    let mut encoder = Encoder::recover(&Tables::default());
    let (mut present, mut spent) = (Tables::default(), Vec::new());
    for pods in [PODS, PODS + 1, PODS] {
        let wanted = encoder.encode(&crowded(pods), &present).unwrap();
        let mut sink = Failing { tables: present.clone(), left: usize::MAX };
        MapUpdate { sink: &mut sink, present: &present, wanted: &wanted }.carry_out(&mut 1, &mut false).unwrap();
        spent.push(usize::MAX - sink.left);
        present = wanted;
    }
    // A name and an address for each pod. The entries for each policy, class and prefix are added, not multiplied.
    assert!((2 * PODS..2 * PODS + 500).contains(&spent[0]), "{spent:?}");
    assert!(spent[1..].iter().all(|writes| (1..8).contains(writes)), "{spent:?}");
}

#[test]
fn real_maps_hold_exactly_what_was_written_last() {
    let Some(dir) = BpfDir::new("write") else { return };
    let _programs = Programs::load_lazily(&dir.pins, Sizes { max_flows: 64, ..Sizes::default() }).unwrap();
    let mut writer = writer(&dir);
    assert_eq!(writer.present(), &Tables::default());
    let mut encoder = Encoder::recover(writer.present());
    for view in some_views(8) {
        let tables = encoder.encode(&view, writer.present()).unwrap();
        writer.write(tables.clone()).unwrap();
        let config = writer.present().config;
        assert_eq!(writer.present(), &Tables { config, ..tables });
        let again = self::writer(&dir);
        assert_eq!(again.present(), writer.present());
    }
}

#[test]
fn the_generation_grows_with_every_change_of_classification() {
    let Some(dir) = BpfDir::new("generation") else { return };
    let _programs = Programs::load_lazily(&dir.pins, Sizes { max_flows: 64, ..Sizes::default() }).unwrap();
    let mut writer = writer(&dir);
    let mut encoder = Encoder::recover(writer.present());
    let mut view = some_views(1).remove(0);
    let mut write = |view: &egress_core::encode::NodeView| {
        let tables = encoder.encode(view, writer.present()).unwrap();
        writer.write(tables).unwrap();
        writer.present().config.unwrap().generation
    };
    let first = write(&view);
    assert_eq!(write(&view), first, "nothing has changed");
    view.uplinks.insert(77, [1; 6]);
    view.nodes.insert("another".into(), vec![[10, 0, 0, 77].into()]);
    view.config.as_mut().unwrap().mss_v4 = 1000;
    assert_eq!(write(&view), first, "nothing that affects classification");
    view.excepts.insert("192.88.99.0/24".parse().unwrap());
    assert_eq!(write(&view), first + 1);
    view.endpoints.pop_first();
    assert_eq!(write(&view), first + 2);
    let reopened = self::writer(&dir);
    let before = reopened.present().config.unwrap().generation;
    assert_eq!(before, first + 2);
}

#[test]
fn partial_write_after_a_map_error_is_completed_by_the_next_write() {
    let Some(dir) = BpfDir::new("refuse") else { return };
    let _programs = Programs::load_lazily(&dir.pins, Sizes { max_flows: 64, ..Sizes::default() }).unwrap();
    let mut writer = writer(&dir);
    let mut encoder = Encoder::recover(writer.present());
    let mut views = some_views(4);
    let mut write = |writer: &mut MapWriter, view: &_| {
        let tables = encoder.encode(view, writer.present()).unwrap();
        writer.write(tables)
    };
    write(&mut writer, &views[0]).unwrap();
    freeze(&dir, "EXCEPTS_V4");
    let mut other = views.remove(1);
    other.excepts.insert("192.88.99.0/24".parse().unwrap());
    write(&mut writer, &other).unwrap_err();
    assert_eq!(self::writer(&dir).present(), writer.present(), "what is in the maps is known");
    consistent(writer.present()).unwrap();
    let torn = writer.present().config.unwrap().generation;
    other.excepts.clone_from(&views[0].excepts);
    write(&mut writer, &other).unwrap();
    assert!(writer.present().config.unwrap().generation > torn, "flows are checked again");
    assert_eq!(self::writer(&dir).present(), writer.present());
}

/// Forbids further writes to this map from user space.
fn freeze(dir: &BpfDir, map: &str) {
    const BPF_MAP_FREEZE: i64 = 22;
    let map = aya::maps::MapData::from_pin(dir.pins.map(map)).unwrap();
    let attr: [u32; 16] =
        std::array::from_fn(|i| if i == 0 { std::os::fd::AsFd::as_fd(map.fd()).as_raw_fd() as u32 } else { 0 });
    // SAFETY: the attributes have the given length.
    let result = unsafe { libc::syscall(libc::SYS_bpf, BPF_MAP_FREEZE, attr.as_ptr(), size_of_val(&attr)) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}
