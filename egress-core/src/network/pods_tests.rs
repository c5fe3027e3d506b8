//! Networks of pods against an oracle that looks at each address.

use super::*;
use crate::{model::EndpointId, testing::world::node};
use proptest::prelude::*;
use std::net::Ipv4Addr;

const NODES: [&str; 2] = ["a", "b"];

fn address(n: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, n).into()
}

/// Pods with an address each, by node, and `podCIDRs` by node.
fn cluster() -> impl Strategy<Value = Snapshot> {
    let pods = prop::collection::btree_map(any::<u8>(), 0..NODES.len(), 0..80);
    let cidrs = prop::collection::vec((any::<u8>(), 25u8..=32, 0..NODES.len()), 0..6);
    (pods, cidrs).prop_map(|(pods, cidrs)| {
        let mut snapshot = Snapshot::default();
        for name in NODES {
            snapshot.nodes.insert(name.into(), node(name, Default::default()));
        }
        for (first, length, on) in cidrs {
            let net = IpNet::new(address(first), length).unwrap();
            snapshot.nodes.get_mut(&NodeName::from(NODES[on])).unwrap().pod_cidrs.insert(net);
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
        for n in 0..=u8::MAX {
            let ip = address(n);
            let told = snapshot.nodes.values().any(|node| node.pod_cidrs.iter().any(|net| net.contains(&ip)));
            for name in NODES {
                let pod = snapshot.endpoints.values().find(|pod| pod.node == name.into() && pod.ips.contains(&ip));
                prop_assert!(pod.is_none_or(|pod| cidrs.have(pod) == told));
                let listed = networks.get(&NodeName::from(name)).is_some_and(|nets| nets.iter().any(|net| net.contains(&ip)));
                prop_assert_eq!(listed, pod.is_some() && !told, "{} of {}", ip, name);
            }
        }
        for nets in networks.values() {
            // No two of them make one.
            let all: BTreeSet<&IpNet> = nets.iter().collect();
            let joins = |net: &IpNet| net.supernet().is_some_and(|above| {
                above.subnets(net.prefix_len()).is_ok_and(|halves| halves.into_iter().all(|half| all.contains(&half)))
            });
            prop_assert!(!nets.iter().any(joins), "{:?}", nets);
        }
    }
}
