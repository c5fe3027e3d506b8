//! Tests pod networks against an oracle that looks at each address.

use super::*;
use crate::{model::EndpointId, testing::world::node};
use proptest::prelude::*;
use std::net::Ipv4Addr;

const NODES: [&str; 2] = ["a", "b"];

fn address(n: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, n).into()
}

/// Returns clusters of pods with one address each, `podCIDRs` by node, and the networks that a CNI names by node or for all nodes.
fn cluster() -> impl Strategy<Value = Snapshot> {
    let pods = prop::collection::btree_map(any::<u8>(), 0..NODES.len(), 0..80);
    let cidrs = prop::collection::vec((any::<u8>(), 25u8..=32, 0..NODES.len()), 0..6);
    let cni = prop::collection::vec((any::<u8>(), 27u8..=32, 0..=NODES.len()), 0..4);
    (pods, cidrs, cni).prop_map(|(pods, cidrs, cni)| {
        let mut snapshot = Snapshot::default();
        for name in NODES {
            snapshot.nodes.insert(name.into(), node(name, Default::default()));
        }
        for (first, length, on) in cidrs {
            let net = IpNet::new(address(first), length).unwrap();
            snapshot.nodes.get_mut(&NodeName::from(NODES[on])).unwrap().pod_cidrs.insert(net);
        }
        for (first, length, of) in cni {
            let net = IpNet::new(address(first), length).unwrap();
            let networks = &mut snapshot.cni_networks;
            match NODES.get(of) {
                Some(node) => networks.nodes.entry((*node).into()).or_default().insert(net),
                None => networks.shared.insert(net),
            };
        }
        for (n, on) in pods {
            let id = EndpointId::new("default", &format!("pod-{n}"), "");
            let (node, ips) = (NODES[on].into(), [address(n)].into());
            snapshot.endpoints.insert(id.clone(), Endpoint { id, node, ips, labels: Default::default() });
        }
        snapshot
    })
}

proptest! {
    #[test]
    fn networks_have_exactly_the_addresses_that_no_node_names(snapshot in cluster()) {
        let networks = pod_networks(&snapshot);
        let cidrs = PodCidrs::of(&snapshot);
        let shared = shared_networks(&snapshot);
        let cni = &snapshot.cni_networks;
        for n in 0..=u8::MAX {
            let ip = address(n);
            let by_node = snapshot.nodes.values().any(|node| node.pod_cidrs.iter().any(|net| net.contains(&ip)));
            let by_cni = cni.nodes.values().flatten().chain(&cni.shared).any(|net| net.contains(&ip));
            prop_assert_eq!(cidrs.have(ip), by_node || by_cni);
            prop_assert_eq!(shared.iter().any(|net| net.contains(&ip)), cni.shared.iter().any(|net| net.contains(&ip)));
            for name in NODES.map(NodeName::from) {
                let pod = snapshot.endpoints.values().find(|pod| pod.node == name && pod.ips.contains(&ip));
                prop_assert!(pod.is_none_or(|pod| cidrs.have_all(pod) == (by_node || by_cni)));
                let listed = networks.get(&name).is_some_and(|nets| nets.iter().any(|net| net.contains(&ip)));
                let of_node = cni.nodes.get(&name).is_some_and(|nets| nets.iter().any(|net| net.contains(&ip)));
                let own = snapshot.nodes[&name].pod_cidrs.iter().any(|net| net.contains(&ip));
                let untold = pod.is_some() && !by_node && !by_cni;
                prop_assert!(listed || !untold && (own || !of_node), "{} of {} is told", ip, name);
                prop_assert!(!listed || untold || of_node, "{} of {} is not told", ip, name);
            }
        }
        for nets in networks.values().chain([&shared]) {
            // No two of them can be merged.
            let all: BTreeSet<&IpNet> = nets.iter().collect();
            let joins = |net: &IpNet| net.supernet().is_some_and(|above| {
                above.subnets(net.prefix_len()).is_ok_and(|halves| halves.into_iter().all(|half| all.contains(&half)))
            });
            prop_assert!(!nets.iter().any(joins), "{:?}", nets);
        }
    }
}
