//! The objects in which CNIs name the networks of pods.

use std::sync::Arc;

use ipnet::{IpNet, Ipv4Subnets, Ipv6Subnets};
use kube::Resource;

use super::{Problem, Reader};
use crate::api::IPRange;
use crate::api::networks::{antrea, calico, cilium, kube_ovn};
use egress_core::model::CniNetworks;
use std::net::IpAddr;

/// Kube-OVN's name of the cluster's own virtual network.
const DEFAULT_VPC: &str = "ovn-cluster";
const REMEDY: &str = "correct it; it is ignored until then, and its pods are known by their addresses alone";

/// All objects in which CNIs name networks of pods.
#[derive(Clone, Debug, Default)]
pub struct CniObjects {
    /// Calico's pools.
    pub calico_pools: Vec<Arc<calico::IPPool>>,
    /// Cilium's nodes.
    pub cilium_nodes: Vec<Arc<cilium::CiliumNode>>,
    /// Cilium's pools.
    pub cilium_pools: Vec<Arc<cilium::CiliumPodIPPool>>,
    /// Antrea's pools.
    pub antrea_pools: Vec<Arc<antrea::IPPool>>,
    /// Kube-OVN's subnets.
    pub subnets: Vec<Arc<kube_ovn::Subnet>>,
}

/// Returns the networks that the objects name. Networks that cannot be understood are omitted.
pub fn networks(objects: &CniObjects) -> (CniNetworks, Vec<Problem>) {
    let (mut found, mut problems) = (CniNetworks::default(), Vec::new());
    let mut add = |reader: Reader, networks: Vec<IpNet>| {
        found.shared.extend(networks);
        problems.extend(reader.problems);
    };
    for object in &objects.calico_pools {
        let mut reader = Reader::new("IPPool", object.meta());
        let networks = calico_pool(&object.spec, &mut reader);
        add(reader, networks);
    }
    for object in &objects.cilium_pools {
        let mut reader = Reader::new("CiliumPodIPPool", object.meta());
        let spec = &object.spec;
        let mut networks = texts(&mut reader, "spec.ipv4.cidrs", &spec.ipv4.cidrs);
        networks.extend(texts(&mut reader, "spec.ipv6.cidrs", &spec.ipv6.cidrs));
        add(reader, networks);
    }
    for object in &objects.antrea_pools {
        let mut reader = Reader::new("IPPool", object.meta());
        let ranges = object.spec.ip_ranges.iter();
        let networks = ranges.flat_map(|range| antrea_range(range, &mut reader)).collect();
        add(reader, networks);
    }
    for object in &objects.subnets {
        let mut reader = Reader::new("Subnet", object.meta());
        let networks = subnet(&object.spec, &mut reader);
        add(reader, networks);
    }
    for object in &objects.cilium_nodes {
        let mut reader = Reader::new("CiliumNode", object.meta());
        let networks = texts(&mut reader, "spec.ipam.podCIDRs", &object.spec.ipam.pod_cidrs);
        let node = reader.name.as_str().into();
        found.nodes.entry(node).or_default().extend(networks);
        problems.extend(reader.problems);
    }
    (found, problems)
}

fn texts(reader: &mut Reader, field: &str, texts: &[String]) -> Vec<IpNet> {
    let networks = texts.iter().filter_map(|text| reader.parse::<IpNet>(text, field, REMEDY));
    let networks: Vec<IpNet> = networks.map(|net| net.trunc()).collect();
    let (all, some): (Vec<IpNet>, Vec<IpNet>) = networks.into_iter().partition(|net| net.prefix_len() == 0);
    for net in all {
        reader.problem(field, format!("{net} covers every address"), REMEDY);
    }
    some
}

/// Returns the network of a pool. A disabled pool is also used to name outside networks that Calico
/// must not masquerade. Addresses that pods still have from such a pool are known from the pods.
fn calico_pool(spec: &calico::IPPoolSpec, reader: &mut Reader) -> Vec<IpNet> {
    let is_of_pods = |uses: &String| matches!(uses.as_str(), "Workload" | "Tunnel");
    if spec.disabled || !spec.allowed_uses.is_empty() && !spec.allowed_uses.iter().any(is_of_pods) {
        return Vec::new();
    }
    texts(reader, "spec.cidr", std::slice::from_ref(&spec.cidr))
}

/// Returns only the range, not its subnet, which may contain other machines.
fn antrea_range(range: &IPRange, reader: &mut Reader) -> Vec<IpNet> {
    let field = "spec.ipRanges";
    if let Some(cidr) = &range.cidr {
        return texts(reader, field, std::slice::from_ref(cidr));
    }
    let mut end = |text: &Option<String>| reader.parse(text.as_deref().unwrap_or_default(), field, REMEDY);
    match (end(&range.start), end(&range.end)) {
        (Some(IpAddr::V4(start)), Some(IpAddr::V4(end))) => Ipv4Subnets::new(start, end, 0).map(IpNet::from).collect(),
        (Some(IpAddr::V6(start)), Some(IpAddr::V6(end))) => Ipv6Subnets::new(start, end, 0).map(IpNet::from).collect(),
        (Some(start), Some(end)) => {
            reader.problem(field, format!("{start} and {end} are of different families"), REMEDY);
            Vec::new()
        }
        _ => Vec::new(),
    }
}

/// Returns networks of the cluster's own virtual network only: others may use addresses that also exist elsewhere,
/// and their pods do not send through the host. The subnet between nodes and pods (`join`) belongs to the
/// cluster's own. A subnet of a physical network contains other machines: for its pods, their addresses suffice.
fn subnet(spec: &kube_ovn::SubnetSpec, reader: &mut Reader) -> Vec<IpNet> {
    if !matches!(spec.vpc.as_str(), "" | DEFAULT_VPC) || !spec.vlan.is_empty() {
        return Vec::new();
    }
    let blocks: Vec<String> = spec.cidr_block.split(',').map(|text| text.trim().to_owned()).collect();
    texts(reader, "spec.cidrBlock", &blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::ObjectMeta;
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};
    use std::collections::BTreeSet;

    fn object<T: DeserializeOwned>(spec: Value) -> Arc<T> {
        let metadata = ObjectMeta { name: Some("n1".into()), ..ObjectMeta::default() };
        let object = json!({"apiVersion": "x/v1", "kind": "X", "metadata": metadata, "spec": spec});
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn networks_named_by_cnis_are_parsed() {
        let objects = CniObjects {
            calico_pools: vec![
                object(json!({"cidr": "10.1.0.0/16", "ipipMode": "Always"})),
                object(json!({"cidr": "192.0.2.0/24", "disabled": true})),
                object(json!({"cidr": "198.51.100.0/24", "allowedUses": ["LoadBalancer"]})),
                object(json!({"cidr": "fd01::/112", "allowedUses": ["Workload"]})),
            ],
            cilium_nodes: vec![object(json!({"ipam": {"podCIDRs": ["10.2.3.0/24", "fd02::/120"]}}))],
            cilium_pools: vec![object(json!({"ipv4": {"cidrs": ["10.3.0.0/16"], "maskSize": 27}}))],
            antrea_pools: vec![object(json!({
                "ipRanges": [{"start": "10.4.0.2", "end": "10.4.0.8"}, {"cidr": "10.5.0.0/26"}, {"start": "fd04::2", "end": "fd04::3"}],
                "subnetInfo": {"gateway": "10.4.0.1", "prefixLength": 24}
            }))],
            subnets: vec![
                object(json!({"cidrBlock": "10.16.0.0/16,fd00:10:16::/112", "vpc": "ovn-cluster"})),
                object(json!({"cidrBlock": "100.64.0.0/16"})),
                object(json!({"cidrBlock": "10.17.0.0/16", "vpc": "tenant"})),
                object(json!({"cidrBlock": "172.18.0.0/16", "vlan": "vlan1"})),
            ],
        };
        let (found, problems) = networks(&objects);
        assert_eq!(problems, []);
        let shared = [
            "10.1.0.0/16",
            "fd01::/112",
            "10.3.0.0/16",
            "10.4.0.2/31",
            "10.4.0.4/30",
            "10.4.0.8/32",
            "10.5.0.0/26",
            "fd04::2/127",
            "10.16.0.0/16",
            "fd00:10:16::/112",
            "100.64.0.0/16",
        ];
        assert_eq!(found.shared, nets(&shared));
        assert_eq!(found.nodes, [("n1".into(), nets(&["10.2.3.0/24", "fd02::/120"]))].into());
    }

    #[test]
    fn unparsable_networks_are_skipped_and_reported() {
        let objects = CniObjects {
            calico_pools: vec![object(json!({"cidr": "10.1.0.0"})), object(json!({"cidr": "0.0.0.0/0"}))],
            antrea_pools: vec![object(
                json!({"ipRanges": [{"start": "10.4.0.2"}, {"start": "10.4.0.2", "end": "fd04::2"}]}),
            )],
            ..CniObjects::default()
        };
        let (found, problems) = networks(&objects);
        assert_eq!(found, CniNetworks::default());
        let said: Vec<&str> = problems.iter().map(|problem| problem.message.as_str()).collect();
        assert_eq!(
            said,
            [
                "\"10.1.0.0\" is not understood",
                "0.0.0.0/0 covers every address",
                "\"\" is not understood",
                "10.4.0.2 and fd04::2 are of different families"
            ]
        );
    }
}
