//! CiliumEgressGatewayPolicy to the model.
//!
//! Policies that Cilium rejects without reporting it on the object are a problem here. Its labels
//! for a pod's surroundings become conditions on the namespace.

use super::policy::{ADDRESS, nets};
use super::{NAMESPACE_NAME, Problem, Reader};
use crate::api;
use egress_core::model::{
    AddressSource, Distribution, EndpointSelector, Existing, Gateway, NodeChoice, OnNoGateway, Policy, PolicyId,
    PolicyKind, Requirement, Selector, Source, ZoneMode,
};

/// The kind, as problems name it.
pub const KIND: &str = "CiliumEgressGatewayPolicy";
/// Cilium's label for the name of a pod's namespace.
const NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Cilium's prefix for the labels of a pod's namespace.
const NAMESPACE_LABELS: &str = "io.cilium.k8s.namespace.labels.";
/// Cilium's prefix for its knowledge of a pod other than labels: its service account, its cluster.
const POLICY_LABELS: &str = "io.cilium.k8s.policy.";

/// Returns the policy of an object, or everything that is wrong with it.
pub fn policy(object: &api::CiliumEgressGatewayPolicy) -> Result<Policy, Vec<Problem>> {
    let mut reader = Reader::new(KIND, &object.metadata);
    let (metadata, spec) = (&object.metadata, &object.spec);
    let policy = Policy {
        id: PolicyId::new(PolicyKind::Cilium, &reader.name),
        uid: metadata.uid.clone().unwrap_or_default(),
        generation: metadata.generation.unwrap_or(0),
        created: metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
        selectors: selectors(&mut reader, &spec.selectors),
        destinations: nets(&mut reader, &spec.destination_cidrs, "spec.destinationCIDRs"),
        excluded: nets(&mut reader, spec.excluded_cidrs.as_deref().unwrap_or_default(), "spec.excludedCIDRs"),
        source: Source::Gateways(gateways(&mut reader, spec)),
        distribution: Distribution::PerEndpoint,
        zone: ZoneMode::Any,
        prefer_local_node: false,
        on_no_gateway: OnNoGateway::Drop,
        existing: Existing::Keep,
        bandwidth: None,
    };
    reader.finish(policy)
}

fn selectors(reader: &mut Reader, written: &[api::CiliumSelector]) -> Vec<EndpointSelector> {
    if written.is_empty() {
        reader.problem("spec.selectors", "it is empty", "write at least one, such as {podSelector: {}} for every pod");
    }
    let numbered = written.iter().enumerate();
    numbered.map(|(at, selector)| self::selector(reader, &format!("spec.selectors[{at}]"), selector)).collect()
}

fn selector(reader: &mut Reader, field: &str, written: &api::CiliumSelector) -> EndpointSelector {
    if written.pod_selector.is_none() && written.namespace_selector.is_none() {
        let remedy = "write podSelector or namespaceSelector; podSelector: {} selects every pod";
        reader.problem(field, "it selects neither pods nor namespaces", remedy);
    }
    let mut read = |selector: &Option<_>, part: &str| {
        selector.as_ref().map(|selector| reader.selector(selector, &format!("{field}.{part}")))
    };
    let (pod, namespace) =
        (read(&written.pod_selector, "podSelector"), read(&written.namespace_selector, "namespaceSelector"));
    let node = read(&written.node_selector, "nodeSelector");
    let asked = |selector: &Option<Selector>| -> Vec<(String, Requirement)> {
        let requirements = selector.iter().flat_map(Selector::requirements);
        requirements.map(|(key, requirement)| (key.to_owned(), requirement.clone())).collect()
    };
    let (mut of_pod, mut of_namespace) = (Vec::new(), asked(&namespace));
    for (key, requirement) in asked(&pod) {
        let plain = key.strip_prefix("k8s:").or_else(|| key.strip_prefix("any:")).unwrap_or(&key);
        if plain == NAMESPACE {
            of_namespace.push((NAMESPACE_NAME.to_owned(), requirement));
        } else if let Some(label) = plain.strip_prefix(NAMESPACE_LABELS) {
            of_namespace.push((label.to_owned(), requirement));
        } else if plain.starts_with(POLICY_LABELS) {
            let remedy = "select by labels of the pod or its namespace";
            reader.problem(format!("{field}.podSelector"), format!("{key} is not a label that is known here"), remedy);
        } else {
            of_pod.push((plain.to_owned(), requirement));
        }
    }
    let any_namespace = namespace.is_none() && of_namespace.is_empty();
    EndpointSelector {
        pod: pod.map(|_| Selector::new(of_pod)),
        namespace: (!any_namespace).then(|| Selector::new(of_namespace)),
        node,
    }
}

fn gateways(reader: &mut Reader, spec: &api::CiliumEgressGatewayPolicySpec) -> Vec<Gateway> {
    let several = spec.egress_gateways.as_deref().unwrap_or_default();
    if several.is_empty() && spec.egress_gateway.is_none() {
        reader.problem("spec.egressGateway", "there is no gateway", "write egressGateway with a nodeSelector");
    }
    let numbered = several.iter().enumerate().map(|(at, one)| (format!("spec.egressGateways[{at}]"), one));
    let single = spec.egress_gateway.iter().filter(|_| several.is_empty());
    let all: Vec<_> = numbered.chain(single.map(|one| ("spec.egressGateway".to_owned(), one))).collect();
    all.into_iter().map(|(field, one)| gateway(reader, &field, one)).collect()
}

fn gateway(reader: &mut Reader, field: &str, written: &api::CiliumEgressGateway) -> Gateway {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let address = match (given(&written.egress_ip), given(&written.interface)) {
        (Some(_), Some(_)) => {
            reader.problem(field, "it has both egressIP and interface", "remove one of them");
            AddressSource::DefaultRoute
        }
        (Some(ip), None) => {
            let address = reader.parse(&ip, format!("{field}.egressIP"), ADDRESS);
            address.map_or(AddressSource::DefaultRoute, AddressSource::Ip)
        }
        (None, Some(interface)) => AddressSource::Interface(interface),
        (None, None) => AddressSource::DefaultRoute,
    };
    let nodes = match &written.node_selector {
        Some(selector) => reader.selector(selector, &format!("{field}.nodeSelector")),
        None => {
            reader.problem(field, "it has no nodeSelector", "write one; nodeSelector: {} selects every node");
            Selector::everything()
        }
    };
    Gateway { nodes, address, choice: NodeChoice::First, weight: 1 }
}
