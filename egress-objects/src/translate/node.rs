//! Node and EgressNode to the model.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node as KubeNode;
use k8s_openapi::api::networking::v1::ServiceCIDR;

use super::{Problem, Reader};
use crate::api;
use egress_core::model::{Demand, InterfaceAddress, Node, NodeReport, Trouble, TroubleKind, Version};

const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
const ANTREA_ANNOTATION: &str = "node.antrea.io/max-egress-ips";
const WRITTEN_BY_AGENT: &str = "the agent writes this: restart it with the version of the controller";

/// Returns the node of an object, with its agent's report. Parts that cannot be understood are omitted.
pub fn node(object: &KubeNode, egress_node: Option<&api::EgressNode>) -> (Node, Vec<Problem>) {
    let mut reader = Reader::new("Node", &object.metadata);
    let labels = object.metadata.labels.clone().unwrap_or_default();
    let mut conditions = object.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let texts = object.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let texts = texts.filter(|address| matches!(address.type_.as_str(), "InternalIP" | "ExternalIP"));
    let remedy = "correct the node's address; it is ignored until then";
    let addresses = texts.filter_map(|address| reader.parse(&address.address, "status.addresses", remedy)).collect();
    let spec = object.spec.as_ref();
    let cidrs = spec.into_iter().flat_map(|s| s.pod_cidrs.iter().flatten().chain(&s.pod_cidr));
    let remedy = "correct the node's podCIDRs; it is ignored until then";
    let pod_cidrs = cidrs.filter_map(|text| reader.parse(text, "spec.podCIDRs", remedy)).collect();
    let max_egress_ips = limit(&mut reader, object.metadata.annotations.as_ref());
    let (report, more) = egress_node.and_then(report).unzip();
    let node = Node {
        name: reader.name.as_str().into(),
        zone: labels.get(ZONE_LABEL).filter(|zone| !zone.is_empty()).cloned(),
        labels,
        addresses,
        pod_cidrs,
        ready: conditions.all(|condition| condition.type_ != "Ready" || condition.status != "False"),
        draining: object.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true)),
        max_egress_ips,
        report,
    };
    reader.problems.extend(more.into_iter().flatten());
    (node, reader.problems)
}

/// Returns the networks of pods that the controller has written into a node's object. Networks that cannot be understood are omitted.
pub fn pod_networks(object: &api::EgressNode) -> (Vec<IpNet>, Vec<Problem>) {
    let mut reader = Reader::new("EgressNode", &object.metadata);
    let remedy = "the controller writes this: restart it with the version of the agent";
    let own = object.spec.pod_networks.iter().map(|text| ("spec.podNetworks", text));
    let all = own.chain(object.spec.cluster_networks.iter().map(|text| ("spec.clusterNetworks", text)));
    let networks = all.filter_map(|(field, text)| reader.parse(text, field, remedy)).collect();
    (networks, reader.problems)
}

/// Returns the networks of a ServiceCIDR. Networks that cannot be understood are omitted.
pub fn service_cidr(object: &ServiceCIDR) -> (Vec<IpNet>, Vec<Problem>) {
    let mut reader = Reader::new("ServiceCIDR", &object.metadata);
    let texts = object.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten());
    let networks =
        texts.filter_map(|text| reader.parse(text, "spec.cidrs", "correct it; it is ignored until then")).collect();
    (networks, reader.problems)
}

fn limit(reader: &mut Reader, annotations: Option<&BTreeMap<String, String>>) -> Option<u32> {
    for key in [api::MAX_EGRESS_IPS_ANNOTATION, ANTREA_ANNOTATION] {
        let Some(text) = annotations.and_then(|annotations| annotations.get(key)) else { continue };
        match text.parse().ok().filter(|limit| *limit <= 255) {
            Some(limit) => return Some(limit),
            None => {
                let message = format!("{text:?} is not a number from 0 to 255");
                reader.problem(format!("metadata.annotations[{key}]"), message, "correct it; it is ignored until then");
            }
        }
    }
    None
}

/// Parses six bytes in hexadecimal, separated by colons.
fn mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes?.try_into().ok()
}

/// Returns an agent's report; `None` before the agent has reported anything.
pub fn report(object: &api::EgressNode) -> Option<(NodeReport, Vec<Problem>)> {
    let status = object.status.as_ref()?;
    let mut reader = Reader::new("EgressNode", &object.metadata);
    let tunnel = status.tunnel_addresses.iter();
    let tunnel_addresses =
        tunnel.filter_map(|text| reader.parse(text, "status.tunnelAddresses", WRITTEN_BY_AGENT)).collect();
    let mut addresses = std::collections::BTreeSet::new();
    let mut macs = BTreeMap::new();
    for address in &status.addresses {
        if let Some(net) = reader.parse::<ipnet::IpNet>(&address.cidr, "status.addresses", WRITTEN_BY_AGENT) {
            if let Some(mac) = address.mac.as_deref().and_then(mac) {
                macs.insert(net.addr(), mac);
            }
            let interface = address.interface.clone();
            addresses.insert(InterfaceAddress { interface, net, default_route: address.default_route });
        }
    }
    let mut demand: BTreeMap<IpAddr, Demand> = BTreeMap::new();
    for entry in &status.demand {
        if let Some(address) = reader.parse(&entry.egress_ip, "status.demand", WRITTEN_BY_AGENT) {
            let released = entry.release.iter().copied().collect();
            demand.insert(address, Demand { want: entry.want_blocks.into(), released });
        }
    }
    let carried = status.carries.iter();
    let carries = carried.filter_map(|c| reader.parse(&c.egress_ip, "status.carries", WRITTEN_BY_AGENT)).collect();
    let troubles = status.troubles.iter().filter_map(|t| {
        Some(Trouble {
            policy: reader.parse(&t.policy, "status.troubles", WRITTEN_BY_AGENT)?,
            // A later version may have other kinds.
            kind: TroubleKind::ALL.into_iter().find(|kind| kind.as_str() == t.reason)?,
            pod: t.pod.as_ref().and_then(|pod| reader.parse(pod, "status.troubles", WRITTEN_BY_AGENT)),
            message: t.message.clone(),
        })
    });
    let troubles = troubles.collect();
    let programmed = status.programmed.as_ref().map(|policies| {
        let version = |p: &api::ProgrammedPolicy| Version { uid: p.uid.clone(), generation: p.generation };
        let of = |p: &api::ProgrammedPolicy| {
            Some((reader.parse(&p.policy, "status.programmed", WRITTEN_BY_AGENT)?, version(p)))
        };
        policies.iter().filter_map(of).collect()
    });
    let report = NodeReport {
        troubles,
        programmed,
        tunnel_addresses,
        addresses,
        macs,
        receives: status.receives.iter().cloned().collect(),
        occupied_blocks: status.occupied_blocks.iter().copied().collect(),
        demand,
        carries,
        own_lease_revision: status.own_lease_revision,
    };
    Some((report, reader.problems))
}
