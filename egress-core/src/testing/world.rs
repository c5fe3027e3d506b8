//! Small clusters to plan for: plain ones made by hand, and arbitrary ones.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use proptest::prelude::*;

use crate::health::{Health, LeaseState, NodeHealth};
use crate::model::*;

pub const DELAY: Duration = Duration::from_secs(10);

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub fn v4(a: u8, b: u8, c: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, a, b, c))
}

pub fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

pub fn node(name: &str, labels: Labels) -> Node {
    Node {
        name: name.into(),
        labels,
        zone: None,
        addresses: BTreeSet::new(),
        ready: true,
        draining: false,
        pod_cidrs: Default::default(),
        max_egress_ips: None,
        report: Some(NodeReport { programmed: Some(BTreeMap::new()), ..NodeReport::default() }),
    }
}

pub fn fresh() -> NodeHealth {
    NodeHealth {
        lease: LeaseState::Fresh { since: Duration::from_secs(100), returned: false, proven: true },
        gone: false,
    }
}

pub fn returned(seconds: u64) -> NodeHealth {
    NodeHealth {
        lease: LeaseState::Fresh { since: Duration::from_secs(seconds), returned: true, proven: true },
        gone: false,
    }
}

/// Returns the health of a node whose lease was seen once.
pub fn unproven() -> NodeHealth {
    NodeHealth { lease: LeaseState::Fresh { since: Duration::ZERO, returned: false, proven: false }, gone: false }
}

pub fn lapsed() -> NodeHealth {
    NodeHealth { lease: LeaseState::Lapsed, gone: false }
}

pub fn pool(name: &str, start: IpAddr, end: IpAddr) -> Pool {
    Pool {
        id: PoolId::new(PoolKind::Native, name),
        ranges: vec![IpRange::new(start, end).unwrap()],
        nodes: Selector::label("gateway", "yes"),
        subnet: None,
        max_per_node: None,
        failback: Failback::Preferred { delay: DELAY },
        carriers: DEFAULT_CARRIERS,
        announce: Announce::Arp,
        outbound: Outbound::Owner,
        allowed: None,
        quotas: Vec::new(),
    }
}

pub fn request(pool: &str, count: u32) -> PoolRequest {
    PoolRequest { pool: PoolId::new(PoolKind::Native, pool), count, ips: BTreeSet::new() }
}

pub fn gateway(nodes: Selector, address: AddressSource) -> Gateway {
    Gateway { nodes, address, choice: NodeChoice::Every, weight: 1 }
}

/// Returns a policy for all pods and all IPv4 destinations.
pub fn policy(name: &str, source: Source) -> Policy {
    Policy {
        id: PolicyId::new(PolicyKind::Native, name),
        uid: name.into(),
        generation: 1,
        created: 0,
        selectors: vec![EndpointSelector { pod: Some(Selector::everything()), ..Default::default() }],
        destinations: vec!["0.0.0.0/0".parse().unwrap()],
        excluded: Vec::new(),
        source,
        distribution: Distribution::PerFlow,
        zone: ZoneMode::Any,
        prefer_local_node: false,
        on_no_gateway: OnNoGateway::Drop,
        existing: Existing::Keep,
        bandwidth: None,
    }
}

pub fn add_policy(snapshot: &mut Snapshot, policy: Policy) {
    snapshot.policies.insert(policy.id.clone(), policy);
}

pub fn add_pod(snapshot: &mut Snapshot, name: &str, node: &str, labels: Labels) {
    let id = EndpointId::new("default", name, name);
    snapshot.endpoints.insert(id.clone(), Endpoint { id, node: node.into(), ips: BTreeSet::new(), labels });
}

/// Returns `gateways` healthy gateways gw0.. (label gateway=yes), `workers` nodes w0.. with a pod each, and the pool "public" of 10.0.0.1
/// to 10.0.3.255.
pub fn cluster(gateways: usize, workers: usize) -> (Snapshot, Health) {
    let (mut snapshot, mut health) = (Snapshot::default(), Health::default());
    for n in 0..gateways {
        let node = node(&format!("gw{n}"), labels(&[("gateway", "yes")]));
        health.nodes.insert(node.name.clone(), fresh());
        snapshot.nodes.insert(node.name.clone(), node);
    }
    for n in 0..workers {
        let node = node(&format!("w{n}"), Labels::new());
        snapshot.nodes.insert(node.name.clone(), node);
        add_pod(&mut snapshot, &format!("pod{n}"), &format!("w{n}"), Labels::new());
    }
    let public = pool("public", v4(0, 0, 1), v4(0, 3, 255));
    snapshot.pools.insert(public.id.clone(), public);
    (snapshot, health)
}

const NETS: [&str; 8] = [
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.1.0.0/16",
    "10.128.0.0/9",
    "192.0.2.0/24",
    "192.0.2.128/25",
    "::/0",
    "2001:db8::/32",
];

fn nets(max: usize) -> impl Strategy<Value = Vec<ipnet::IpNet>> {
    prop::collection::vec(prop::sample::select(&NETS[..]).prop_map(|net| net.parse().unwrap()), 0..=max)
}

fn arbitrary_selector() -> impl Strategy<Value = Selector> {
    let value = || prop::sample::select(vec!["0", "1", "2"]);
    let key = || prop::sample::select(vec!["a", "b"]);
    let requirement = prop_oneof![
        4 => value().prop_map(|v| Requirement::In([v.to_owned()].into())),
        1 => (value(), value()).prop_map(|(v, w)| Requirement::In([v.to_owned(), w.to_owned()].into())),
        1 => value().prop_map(|v| Requirement::NotIn([v.to_owned()].into())),
        1 => Just(Requirement::Exists),
        1 => Just(Requirement::DoesNotExist),
    ];
    prop::collection::vec((key().prop_map(str::to_owned), requirement), 0..=2).prop_map(Selector::new)
}

pub fn arbitrary_labels() -> impl Strategy<Value = Labels> {
    let value = || prop::option::of(prop::sample::select(vec!["0", "1", "2"]));
    (value(), value(), value()).prop_map(|(a, b, ignored)| {
        [("a", a), ("b", b), ("ignored", ignored)]
            .into_iter()
            .filter_map(|(k, v)| Some((k.into(), v?.into())))
            .collect()
    })
}

fn arbitrary_health() -> impl Strategy<Value = NodeHealth> {
    prop_oneof![6 => Just(fresh()), 1 => Just(returned(3)), 1 => Just(returned(30)),
        1 => Just(unproven()), 2 => Just(lapsed()), 1 => Just(NodeHealth::default())]
}

/// Returns nodes with their agents' reports: addresses from a small range, so that they collide with egress IPs.
fn arbitrary_node(n: usize) -> impl Strategy<Value = Node> {
    let zone = prop::option::of(prop::sample::select(vec!["x", "y"]));
    let limit = prop::option::weighted(0.2, 0u32..4);
    let report = (prop::option::weighted(0.3, 0u8..8), prop::collection::btree_set(0u16..500, 0..40), 0u64..4);
    (arbitrary_labels(), zone, prop::bool::weighted(0.9), prop::bool::weighted(0.1), limit, report).prop_map(
        move |(labels, zone, ready, draining, max_egress_ips, (address, occupied_blocks, own_lease_revision))| {
            let addresses = [v4(9, 9, n as u8), address.map_or(v4(9, 8, n as u8), |last| v4(1, 0, last))];
            let addresses = addresses.iter().zip(["eth0", "eth1"]).map(|(address, interface)| InterfaceAddress {
                interface: interface.into(),
                net: ipnet::IpNet::new(*address, 24).unwrap(),
                default_route: interface == "eth0",
            });
            let report = NodeReport {
                addresses: addresses.collect(),
                occupied_blocks,
                own_lease_revision,
                ..Default::default()
            };
            let name = NodeName::from(format!("n{n}").as_str());
            let zone = zone.map(str::to_owned);
            let addresses = BTreeSet::new();
            Node {
                name,
                labels,
                zone,
                addresses,
                pod_cidrs: Default::default(),
                ready,
                draining,
                max_egress_ips,
                report: Some(report),
            }
        },
    )
}

fn arbitrary_pool(n: usize) -> impl Strategy<Value = Pool> {
    let failback = prop_oneof![3 => Just(Failback::Preferred { delay: DELAY }), 1 => Just(Failback::Never)];
    (0u8..12, 0u8..6, arbitrary_selector(), prop::option::weighted(0.3, 1u32..3), failback, any::<bool>()).prop_map(
        move |(first, size, nodes, max_per_node, failback, six)| {
            let mut pool = pool(&format!("p{n}"), v4(1, 0, first), v4(1, 0, first + size));
            if six {
                pool.ranges.push(IpRange::new(ip("2001:db8::1"), ip("2001:db8::3")).unwrap());
            }
            Pool { nodes, max_per_node, failback, ..pool }
        },
    )
}

fn arbitrary_source() -> impl Strategy<Value = Source> {
    let address = prop_oneof![
        4 => (0u8..10).prop_map(|last| AddressSource::Ip(v4(1, 0, last))),
        1 => (0u8..10).prop_map(|last| AddressSource::Configured(v4(1, 0, last))),
        1 => Just(AddressSource::Interface("eth1".into())),
        1 => Just(AddressSource::DefaultRoute),
    ];
    let choice = prop_oneof![Just(NodeChoice::Every), Just(NodeChoice::First)];
    let gateway = (arbitrary_selector(), address, choice, 1u32..4)
        .prop_map(|(nodes, address, choice, weight)| Gateway { nodes, address, choice, weight });
    let ips = prop::collection::btree_set((0u8..12).prop_map(|last| v4(1, 0, last)), 0..2);
    let request =
        (0u8..4, 1u32..4, ips).prop_map(|(n, count, ips)| PoolRequest { ips, ..request(&format!("p{n}"), count) });
    prop_oneof![
        prop::collection::vec(gateway, 1..4).prop_map(Source::Gateways),
        prop::collection::vec(request, 1..3).prop_map(|mut requests| {
            requests.sort_by(|a, b| a.pool.cmp(&b.pool));
            requests.dedup_by(|a, b| a.pool == b.pool);
            Source::Pools(requests)
        }),
    ]
}

fn arbitrary_policy(n: usize) -> impl Strategy<Value = Policy> {
    let distribution = prop_oneof![Just(Distribution::PerFlow), Just(Distribution::PerEndpoint)];
    let zone = prop_oneof![3 => Just(ZoneMode::Any), 1 => Just(ZoneMode::Prefer), 1 => Just(ZoneMode::Require)];
    let maybe = |p| prop::option::weighted(p, arbitrary_selector());
    let selector = (arbitrary_selector(), maybe(0.3), maybe(0.2)).prop_map(|(pod, namespace, node)| EndpointSelector {
        pod: Some(pod),
        namespace,
        node,
    });
    let words = (distribution, zone, any::<bool>(), 0i64..3);
    (words, prop::collection::vec(selector, 1..3), nets(3), nets(2), arbitrary_source()).prop_map(
        move |((distribution, zone, prefer_local_node, created), selectors, destinations, excluded, source)| Policy {
            distribution,
            zone,
            prefer_local_node,
            created,
            selectors,
            destinations,
            excluded,
            ..policy(&format!("policy{n}"), source)
        },
    )
}

/// Returns simple policies that differ in destinations.
pub fn arbitrary_policies(max: usize) -> impl Strategy<Value = BTreeMap<PolicyId, Policy>> {
    let one = (nets(4), nets(3), 0i64..3);
    prop::collection::vec(one, 1..=max).prop_map(|all| {
        let made = all.into_iter().enumerate().map(|(n, (destinations, excluded, created))| {
            let plain = policy(&format!("policy{n}"), Source::Pools(Vec::new()));
            Policy { destinations, excluded, created, ..plain }
        });
        made.map(|policy| (policy.id.clone(), policy)).collect()
    })
}

#[derive(Clone, Debug)]
pub struct TestCluster {
    pub snapshot: Snapshot,
    pub health: Health,
}

/// Returns any small cluster.
pub fn arbitrary_cluster() -> impl Strategy<Value = TestCluster> {
    let nodes = (1usize..8).prop_flat_map(|n| {
        ((0..n).map(arbitrary_node).collect::<Vec<_>>(), prop::collection::vec(arbitrary_health(), n))
    });
    let pools = (0..3).map(arbitrary_pool).collect::<Vec<_>>();
    let policies = (0usize..6).prop_flat_map(|n| (0..n).map(arbitrary_policy).collect::<Vec<_>>());
    let namespaces = prop::collection::vec(arbitrary_labels(), 2);
    let pods = prop::collection::vec((0usize..3, 0usize..9, arbitrary_labels()), 0..16);
    let world = (nodes, pools, policies, namespaces, pods, prop::option::weighted(0.2, 1u32..5));
    world.prop_map(|((nodes, healths), pools, policies, namespaces, pods, max_egress_ips)| {
        let (mut snapshot, mut health) = (Snapshot { max_egress_ips, ..Snapshot::default() }, Health::default());
        for (node, of_node) in nodes.into_iter().zip(healths) {
            health.nodes.insert(node.name.clone(), of_node);
            snapshot.nodes.insert(node.name.clone(), node);
        }
        snapshot.pools = pools.into_iter().map(|pool| (pool.id.clone(), pool)).collect();
        snapshot.policies = policies.into_iter().map(|policy| (policy.id.clone(), policy)).collect();
        snapshot.namespaces = ["ns0", "ns1"].into_iter().map(Into::into).zip(namespaces).collect();
        for (n, (namespace, node, labels)) in pods.into_iter().enumerate() {
            let id = EndpointId::new(&format!("ns{namespace}"), &format!("pod{n}"), "uid");
            let node = format!("n{node}").as_str().into();
            snapshot.endpoints.insert(id.clone(), Endpoint { id, node, ips: BTreeSet::new(), labels });
        }
        TestCluster { snapshot, health }
    })
}
