//! EgressGatewayPolicy to the model.

use std::collections::BTreeMap;

use ipnet::IpNet;

use super::scalar::quantity;
use super::{NAMESPACE_NAME, Problem, Reader, sound};
use crate::api;
use egress_core::model::{
    AddressSource, Bandwidth, Distribution, EndpointSelector, Existing, Family, Gateway, NodeChoice, OnNoGateway,
    Policy, PolicyId, PolicyKind, PoolId, PoolKind, PoolRequest, Selector, Source, ZoneMode,
};

/// The kind, as problems name it.
pub const KIND: &str = "EgressGatewayPolicy";
/// The kind of policies that belong to a namespace.
pub const NAMESPACED: &str = "EgressPolicy";
const CIDR: &str = "write a network such as 203.0.113.0/24 or 2001:db8::/32";
/// The largest number of addresses that a policy or a namespace has of one pool.
pub(super) const MAX_COUNT: u32 = 1024;
/// The remedy for an invalid address.
pub(super) const ADDRESS: &str = "write an address such as 192.0.2.10 or 2001:db8::10";

/// Builds the policy of an object of either kind: both have fields with these names. Selectors and source differ.
macro_rules! policy {
    ($reader:ident, $object:ident, $kind:expr, $selectors:expr, $source:expr) => {{
        let (metadata, spec) = (&$object.metadata, &$object.spec);
        Policy {
            id: PolicyId::new($kind, &$reader.name),
            uid: metadata.uid.clone().unwrap_or_default(),
            generation: metadata.generation.unwrap_or(0),
            created: metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
            selectors: $selectors,
            destinations: nets(&mut $reader, &spec.destination_cidrs, "spec.destinationCIDRs"),
            excluded: nets(&mut $reader, &spec.excluded_cidrs, "spec.excludedCIDRs"),
            source: $source,
            distribution: spec.distribution.into(),
            zone: spec.zone.mode.into(),
            prefer_local_node: spec.zone.prefer_local_node,
            on_no_gateway: spec.on_no_gateway.into(),
            existing: spec.existing_connections.into(),
            bandwidth: spec.bandwidth.as_ref().and_then(|limit| bandwidth(&mut $reader, limit)),
        }
    }};
}

/// Returns the policy of an object, or everything that is wrong with it.
pub fn policy(object: &api::EgressGatewayPolicy) -> Result<Policy, Vec<Problem>> {
    sound(read(object))
}

/// Returns the policy of a namespaced object, or everything that is wrong with it.
pub fn namespaced(object: &api::EgressPolicy) -> Result<Policy, Vec<Problem>> {
    sound(read_namespaced(object))
}

/// Returns the policy that is in force in place of one with these problems: it has no egress IP and drops packets, so that
/// its packets do not leave with a node's address. If one of its destinations is invalid, it covers every destination.
fn in_force(mut policy: Policy, problems: Vec<Problem>) -> (Policy, Vec<Problem>) {
    if !problems.is_empty() {
        (policy.source, policy.on_no_gateway) = (Source::Pools(Vec::new()), OnNoGateway::Drop);
    }
    if problems.iter().any(|problem| problem.field.starts_with("spec.destinationCIDRs[")) {
        policy.destinations = Family::ALL.map(Family::everything).to_vec();
    }
    (policy, problems)
}

/// Returns the policy that is in force for an object, and everything that is wrong with the object.
pub fn read(object: &api::EgressGatewayPolicy) -> (Policy, Vec<Problem>) {
    let mut reader = Reader::new(KIND, &object.metadata);
    let spec = &object.spec;
    let policy = policy!(reader, object, PolicyKind::Native, selectors(&mut reader, spec), source(&mut reader, spec));
    in_force(policy, reader.problems)
}

/// Returns the policy in force for a namespaced object, and everything that is wrong with it. It selects only pods of its own namespace.
pub fn read_namespaced(object: &api::EgressPolicy) -> (Policy, Vec<Problem>) {
    let mut reader = Reader::new(NAMESPACED, &object.metadata);
    let spec = &object.spec;
    let own = Selector::label(NAMESPACE_NAME, object.metadata.namespace.as_deref().unwrap_or_default());
    if spec.selectors.is_empty() {
        let remedy = "write at least one, such as {podSelector: {}} for every pod of the namespace";
        reader.problem("spec.selectors", "it is empty", remedy);
    }
    let mut selectors = Vec::new();
    for (at, pods) in spec.selectors.iter().enumerate() {
        let pod = Some(reader.selector(&pods.pod_selector, &format!("spec.selectors[{at}].podSelector")));
        selectors.push(EndpointSelector { pod, namespace: Some(own.clone()), node: None });
    }
    if spec.egress_ip_pools.is_empty() {
        reader.problem("spec.egressIPPools", "it is empty", "write at least one, such as {name: public, count: 2}");
    }
    let pools = spec.egress_ip_pools.iter().enumerate();
    let pools = pools.map(|(at, pool)| (format!("spec.egressIPPools[{at}]"), pool)).collect();
    let kind = PolicyKind::Namespaced;
    let policy = policy!(reader, object, kind, selectors, Source::Pools(pool_requests(&mut reader, pools)));
    in_force(policy, reader.problems)
}

/// Defines conversions between enums whose variants have the same names.
macro_rules! same {
    ($($from:ty => $to:ty: $($variant:ident)*;)*) => {$(
        impl From<$from> for $to {
            fn from(value: $from) -> Self {
                match value { $(<$from>::$variant => Self::$variant,)* }
            }
        }
    )*};
}
pub(super) use same;

same! {
    api::Distribution => Distribution: PerFlow PerEndpoint;
    api::ZoneMode => ZoneMode: Any Prefer Require;
    api::ExistingConnections => Existing: Keep Drop;
}

impl From<api::NoGateway> for OnNoGateway {
    fn from(fate: api::NoGateway) -> Self {
        match fate {
            api::NoGateway::Drop => OnNoGateway::Drop,
            api::NoGateway::NodeIP => OnNoGateway::NodeIp,
        }
    }
}

fn selectors(reader: &mut Reader, spec: &api::EgressGatewayPolicySpec) -> Vec<EndpointSelector> {
    if spec.selectors.is_empty() {
        reader.problem("spec.selectors", "it is empty", "write at least one, such as {podSelector: {}} for every pod");
    }
    let mut selectors = Vec::new();
    for (at, selector) in spec.selectors.iter().enumerate() {
        let field = format!("spec.selectors[{at}]");
        if selector.pod_selector.is_none() && selector.namespace_selector.is_none() {
            let remedy = "write podSelector or namespaceSelector; podSelector: {} selects every pod";
            reader.problem(field.clone(), "it selects neither pods nor namespaces", remedy);
            continue;
        }
        let mut read = |selector: &Option<_>, part: &str| {
            selector.as_ref().map(|selector| reader.selector(selector, &format!("{field}.{part}")))
        };
        selectors.push(EndpointSelector {
            pod: read(&selector.pod_selector, "podSelector"),
            namespace: read(&selector.namespace_selector, "namespaceSelector"),
            node: read(&selector.node_selector, "nodeSelector"),
        });
    }
    selectors
}

/// Returns the networks of a list. The list of destinations must not be empty.
pub(super) fn nets(reader: &mut Reader, texts: &[String], field: &str) -> Vec<IpNet> {
    if texts.is_empty() && field == "spec.destinationCIDRs" {
        reader.problem(
            field,
            "it is empty",
            "write at least one, such as 0.0.0.0/0 for everything outside the cluster",
        );
    }
    let numbered = texts.iter().enumerate();
    numbered
        .filter_map(|(at, text)| Some(reader.parse::<IpNet>(text, format!("{field}[{at}]"), CIDR)?.trunc()))
        .collect()
}

fn source(reader: &mut Reader, spec: &api::EgressGatewayPolicySpec) -> Source {
    let gateways: Vec<(String, &api::EgressGateway)> = match &spec.egress_gateways {
        Some(list) if !list.is_empty() => {
            list.iter().enumerate().map(|(at, gateway)| (format!("spec.egressGateways[{at}]"), gateway)).collect()
        }
        _ => spec.egress_gateway.iter().map(|gateway| ("spec.egressGateway".to_owned(), gateway)).collect(),
    };
    let pools: Vec<(String, &api::PoolRequest)> = match &spec.egress_ip_pools {
        Some(list) if !list.is_empty() => {
            list.iter().enumerate().map(|(at, pool)| (format!("spec.egressIPPools[{at}]"), pool)).collect()
        }
        _ => spec.egress_ip_pool.iter().map(|pool| ("spec.egressIPPool".to_owned(), pool)).collect(),
    };
    if gateways.is_empty() == pools.is_empty() {
        reader.problem(
            "spec",
            "its egress IPs must come from exactly one source",
            "write either egressGateways (or egressGateway) or egressIPPools (or egressIPPool)",
        );
    }
    if pools.is_empty() {
        return Source::Gateways(gateways.into_iter().map(|(field, entry)| gateway(reader, &field, entry)).collect());
    }
    Source::Pools(pool_requests(reader, pools))
}

/// Returns a policy's request to each pool, with all its entries for a pool combined.
fn pool_requests(reader: &mut Reader, pools: Vec<(String, &api::PoolRequest)>) -> Vec<PoolRequest> {
    let mut requests: BTreeMap<PoolId, PoolRequest> = BTreeMap::new();
    for (field, entry) in pools {
        let request = pool_request(reader, &field, entry);
        match requests.get_mut(&request.pool) {
            Some(same) => {
                same.count = (same.count + request.count).min(MAX_COUNT);
                same.ips.extend(request.ips);
                while same.ips.len() > MAX_COUNT as usize {
                    same.ips.pop_last();
                }
            }
            None => {
                requests.insert(request.pool.clone(), request);
            }
        }
    }
    requests.into_values().collect()
}

fn gateway(reader: &mut Reader, field: &str, entry: &api::EgressGateway) -> Gateway {
    let address = match (&entry.egress_ip, &entry.interface) {
        (Some(ip), None) => {
            let address = reader.parse(ip, format!("{field}.egressIP"), ADDRESS);
            address.map_or(AddressSource::DefaultRoute, AddressSource::Ip)
        }
        (None, Some(interface)) => AddressSource::Interface(interface.clone()),
        (None, None) => AddressSource::DefaultRoute,
        (Some(_), Some(_)) => {
            reader.problem(field, "it has both egressIP and interface", "remove one of them");
            AddressSource::DefaultRoute
        }
    };
    let weight = u32::try_from(entry.weight).ok().filter(|weight| (1..=100).contains(weight));
    if weight.is_none() {
        let remedy = "write 1 to 100, or remove the gateway if it should get no new flows";
        reader.problem(format!("{field}.weight"), format!("{} is out of range", entry.weight), remedy);
    }
    Gateway {
        nodes: reader.selector(&entry.node_selector, &format!("{field}.nodeSelector")),
        address,
        choice: NodeChoice::Every,
        weight: weight.unwrap_or(1),
    }
}

fn pool_request(reader: &mut Reader, field: &str, entry: &api::PoolRequest) -> PoolRequest {
    let texts = entry.egress_ips.iter().flatten().enumerate();
    let ips: std::collections::BTreeSet<_> =
        texts.filter_map(|(at, text)| reader.parse(text, format!("{field}.egressIPs[{at}]"), ADDRESS)).collect();
    let count = match entry.count {
        None => Some(ips.len().max(1) as u32),
        Some(count) => u32::try_from(count).ok().filter(|count| (1..=MAX_COUNT).contains(count)),
    };
    if count.is_none() {
        let remedy = "write 1 to 1024, or remove the pool from the policy";
        reader.problem(format!("{field}.count"), "it is out of range", remedy);
    }
    let is_of_name = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-' | '.');
    if entry.name.is_empty() || !entry.name.chars().all(is_of_name) {
        let message = format!("{:?} is not the name of an object", entry.name);
        reader.problem(format!("{field}.name"), message, "write that of an EgressIPPool");
    }
    PoolRequest { pool: PoolId::new(PoolKind::Native, &entry.name), count: count.unwrap_or(1), ips }
}

/// Reads a bandwidth: the rate in bits per second, the burst in bits; the default burst is what the rate lets pass in 100 ms.
pub(super) fn bandwidth(reader: &mut Reader, limit: &api::Bandwidth) -> Option<Bandwidth> {
    let mut read = |text: &str, field: &str| {
        let value = quantity(text);
        if value.is_none() {
            let message = format!("{text:?} is not a quantity above zero");
            reader.problem(field, message, "write bits per second for a rate and bits for a burst, such as 800M or 2G");
        }
        value
    };
    let rate_bps = read(&limit.rate, "spec.bandwidth.rate")?;
    let burst_bits = match &limit.burst {
        Some(burst) => read(burst, "spec.bandwidth.burst")?,
        None => rate_bps / 10,
    };
    Some(Bandwidth { rate_bps, burst_bytes: burst_bits.div_ceil(8) })
}
