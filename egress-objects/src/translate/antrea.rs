//! Egress and ExternalIPPool to the model.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::policy::{ADDRESS, bandwidth};
use super::pool::{ranges, subnet};
use super::{Problem, Reader, sound};
use crate::api;
use egress_core::model::{
    AddressSource, Announce, DEFAULT_CARRIERS, Distribution, EndpointSelector, Existing, Failback, Family, Gateway,
    NodeChoice, OnNoGateway, Outbound, Policy, PolicyId, PolicyKind, Pool, PoolId, PoolKind, PoolRequest, Selector,
    Source, ZoneMode,
};

/// The kind of policies, as problems name it.
pub const EGRESS: &str = "Egress";
/// The kind of pools.
pub const POOL: &str = "ExternalIPPool";

/// Returns the policy of an Egress, or everything that is wrong with it. `pools` determines the families of its addresses, and the
/// pool of each address. An address that is in no known range belongs to a pool that is `unreadable`, if the Egress names one.
pub fn egress(
    object: &api::Egress,
    pools: &BTreeMap<PoolId, Pool>,
    unreadable: &BTreeMap<PoolId, Option<Pool>>,
) -> Result<Policy, Vec<Problem>> {
    let mut reader = Reader::new(EGRESS, &object.metadata);
    let (metadata, spec) = (&object.metadata, &object.spec);
    let source = source(&mut reader, spec, pools, unreadable);
    let policy = Policy {
        id: PolicyId::new(PolicyKind::Antrea, &reader.name),
        uid: metadata.uid.clone().unwrap_or_default(),
        generation: metadata.generation.unwrap_or(0),
        created: metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
        selectors: selectors(&mut reader, &spec.applied_to),
        destinations: destinations(&source, pools),
        excluded: Vec::new(),
        source,
        distribution: Distribution::PerFlow,
        zone: ZoneMode::Any,
        prefer_local_node: false,
        on_no_gateway: OnNoGateway::Drop,
        existing: Existing::Keep,
        bandwidth: spec.bandwidth.as_ref().and_then(|limit| bandwidth(&mut reader, limit)),
    };
    reader.finish(policy)
}

/// Returns the pool of an ExternalIPPool, or everything that is wrong with it.
pub fn pool(object: &api::ExternalIPPool) -> Result<Pool, Vec<Problem>> {
    sound(read_pool(object))
}

/// Returns the pool of an ExternalIPPool without its invalid parts, and everything that is wrong with it.
pub fn read_pool(object: &api::ExternalIPPool) -> (Pool, Vec<Problem>) {
    let mut reader = Reader::new(POOL, &object.metadata);
    let spec = &object.spec;
    let pool = Pool {
        id: PoolId::new(PoolKind::Antrea, &reader.name),
        ranges: ranges(&mut reader, &spec.ip_ranges),
        nodes: reader.selector(&spec.node_selector, "spec.nodeSelector"),
        subnet: spec.subnet_info.as_ref().and_then(|info| subnet(&mut reader, info)),
        max_per_node: None,
        failback: Failback::default(),
        carriers: DEFAULT_CARRIERS,
        announce: Announce::Arp,
        outbound: Outbound::Owner,
        allowed: None,
        quotas: Vec::new(),
    };
    (pool, reader.problems)
}

/// Returns the selectors of an Egress, which selects no pod without any.
fn selectors(reader: &mut Reader, applied_to: &api::AppliedTo) -> Vec<EndpointSelector> {
    let mut read = |selector: &Option<_>, part: &str| {
        selector.as_ref().map(|selector| reader.selector(selector, &format!("spec.appliedTo.{part}")))
    };
    let pod = read(&applied_to.pod_selector, "podSelector");
    let namespace = read(&applied_to.namespace_selector, "namespaceSelector");
    let given = pod.is_some() || namespace.is_some();
    given.then_some(EndpointSelector { pod, namespace, node: None }).into_iter().collect()
}

fn source(
    reader: &mut Reader,
    spec: &api::EgressSpec,
    pools: &BTreeMap<PoolId, Pool>,
    unreadable: &BTreeMap<PoolId, Option<Pool>>,
) -> Source {
    let ips = list(reader, &spec.egress_ip, &spec.egress_ips, ["spec.egressIP", "spec.egressIPs"]);
    let names =
        list(reader, &spec.external_ip_pool, &spec.external_ip_pools, ["spec.externalIPPool", "spec.externalIPPools"]);
    if ips.is_empty() && names.is_empty() {
        let remedy = "write egressIP, externalIPPool, or both";
        reader.problem("spec", "its address has no source", remedy);
    }
    let ips: BTreeSet<IpAddr> =
        ips.iter().filter_map(|(field, text)| reader.parse(text, field.clone(), ADDRESS)).collect();
    let names: Vec<PoolId> = names.iter().map(|(_, name)| PoolId::new(PoolKind::Antrea, name)).collect();
    let Some(first) = names.first() else {
        let gateway = |ip| Gateway {
            nodes: Selector::everything(),
            address: AddressSource::Configured(ip),
            choice: NodeChoice::Every,
            weight: 1,
        };
        return Source::Gateways(ips.into_iter().map(gateway).collect());
    };
    let mut requests: BTreeMap<&PoolId, PoolRequest> = BTreeMap::new();
    let mut request = |id, ip: Option<IpAddr>| {
        let none = || PoolRequest { pool: PoolId::clone(id), count: 0, ips: BTreeSet::new() };
        let request = requests.entry(id).or_insert_with(none);
        request.count += 1;
        request.ips.extend(ip);
    };
    if ips.is_empty() {
        names.iter().for_each(|id| request(id, None));
    }
    for ip in ips {
        let has = |id: &&PoolId| {
            let known = pools.get(id).or_else(|| unreadable.get(id)?.as_ref());
            known.is_some_and(|pool| pool.contains(ip))
        };
        let id = names.iter().find(has).or_else(|| names.iter().find(|id| unreadable.contains_key(id)));
        request(id.unwrap_or(first), Some(ip));
    }
    Source::Pools(requests.into_values().collect())
}

/// The entries of a field and its plural, of which only one may be given, each with its path.
fn list(
    reader: &mut Reader,
    one: &Option<String>,
    several: &Option<Vec<String>>,
    [singular, plural]: [&str; 2],
) -> Vec<(String, String)> {
    let one = one.iter().filter(|text| !text.is_empty()).map(|text| (singular.to_owned(), text.clone()));
    let several = several.iter().flatten().enumerate().map(|(at, text)| (format!("{plural}[{at}]"), text.clone()));
    let (one, several): (Vec<_>, Vec<_>) = (one.collect(), several.collect());
    if !one.is_empty() && !several.is_empty() {
        reader.problem(singular, format!("{plural} is written as well"), "remove one of them");
    }
    one.into_iter().chain(several).collect()
}

/// Returns all destinations, in the families of the addresses. A pool that is unknown, or cannot be understood, may
/// have both: while the Egress keeps an address of it, packets of that family must not leave with the node's address.
fn destinations(source: &Source, pools: &BTreeMap<PoolId, Pool>) -> Vec<IpNet> {
    let mut families: BTreeSet<Family> = BTreeSet::new();
    match source {
        Source::Gateways(gateways) => families.extend(gateways.iter().filter_map(|gateway| match gateway.address {
            AddressSource::Ip(ip) | AddressSource::Configured(ip) => Some(Family::of(ip)),
            AddressSource::Interface(_) | AddressSource::DefaultRoute => None,
        })),
        Source::Pools(requests) => {
            for request in requests {
                if request.ips.is_empty() {
                    let pool = pools.get(&request.pool);
                    let serves = |family: &Family| pool.is_none_or(|pool| pool.serves(*family));
                    families.extend(Family::ALL.into_iter().filter(serves));
                }
                families.extend(request.ips.iter().map(|ip| Family::of(*ip)));
            }
        }
    }
    let wanted = |family: &Family| families.is_empty() || families.contains(family);
    Family::ALL.into_iter().filter(wanted).map(Family::everything).collect()
}
