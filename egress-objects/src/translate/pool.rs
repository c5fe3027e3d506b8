//! EgressIPPool to the model.

use std::time::Duration;

use super::policy::{MAX_COUNT, same};
use super::scalar::duration;
use super::{Problem, Reader, sound};
use crate::api;
use egress_core::model::{
    Announce, DEFAULT_CARRIERS, DEFAULT_FAILBACK_DELAY, Failback, IpRange, MAX_CARRIERS, Outbound, Pool, PoolId,
    PoolKind, Quota, SubnetInfo,
};

/// The kind, as problems name it.
pub const KIND: &str = "EgressIPPool";

/// Returns the pool of an object, or everything that is wrong with it.
pub fn pool(object: &api::EgressIPPool) -> Result<Pool, Vec<Problem>> {
    sound(read(object))
}

/// Returns what is known of a pool with these problems: `None` if one is in its nodeSelector.
pub fn known(pool: Pool, problems: &[Problem]) -> Option<Pool> {
    (!problems.iter().any(|problem| problem.field.starts_with("spec.nodeSelector"))).then_some(pool)
}

/// Returns the pool of an object without its invalid parts, and everything that is wrong with it.
pub fn read(object: &api::EgressIPPool) -> (Pool, Vec<Problem>) {
    let mut reader = Reader::new(KIND, &object.metadata);
    let spec = &object.spec;
    let limit = spec.max_egress_ips_per_node.map(|limit| u32::try_from(limit).ok().filter(|l| (1..=255).contains(l)));
    if limit == Some(None) {
        reader.problem(
            "spec.maxEgressIPsPerNode",
            "it is out of range",
            "write 1 to 255, or leave it out for no limit",
        );
    }
    if spec.port_block_size != 64 {
        reader.problem(
            "spec.portBlockSize",
            format!("{} is not supported", spec.port_block_size),
            "leave it out: it is 64",
        );
    }
    let carriers = usize::try_from(spec.carriers).ok().filter(|carriers| (1..=MAX_CARRIERS).contains(carriers));
    if carriers.is_none() {
        reader.problem("spec.carriers", "it is out of range", "write 1 to 64, or leave it out for 4");
    }
    let announce = Announce::from(spec.announce);
    let anycast = announce == Announce::Route;
    let pool = Pool {
        id: PoolId::new(PoolKind::Native, &reader.name),
        ranges: ranges(&mut reader, &spec.ip_ranges),
        nodes: reader.selector(&spec.node_selector, "spec.nodeSelector"),
        subnet: spec.subnet_info.as_ref().and_then(|info| subnet(&mut reader, info)),
        max_per_node: limit.flatten(),
        failback: match spec.failback.mode {
            api::FailbackMode::Never => Failback::Never,
            api::FailbackMode::Preferred => Failback::Preferred { delay: delay(&mut reader, &spec.failback.delay) },
        },
        announce,
        // Routers send incoming packets to any carrier that has a route.
        carriers: if anycast { MAX_CARRIERS } else { carriers.unwrap_or(DEFAULT_CARRIERS) },
        outbound: match spec.outbound {
            Some(api::Outbound::Owner) | None if !anycast => Outbound::Owner,
            // The kind's rules refuse Owner with Route.
            _ => Outbound::Spread,
        },
        allowed: spec.allowed_namespaces.as_ref().map(|allowed| reader.selector(allowed, "spec.allowedNamespaces")),
        quotas: quotas(&mut reader, &spec.quotas),
    };
    (pool, reader.problems)
}

same! {
    api::Announce => Announce: Arp Route None;
    Announce => api::Announce: Arp Route None;
    api::Outbound => Outbound: Owner Spread;
    Outbound => api::Outbound: Owner Spread;
}

fn delay(reader: &mut Reader, text: &str) -> Duration {
    duration(text).unwrap_or_else(|| {
        let message = format!("{text:?} is not a duration");
        reader.problem("spec.failback.delay", message, "write a whole number and a unit (ms, s, m or h), such as 10s");
        DEFAULT_FAILBACK_DELAY
    })
}

fn quotas(reader: &mut Reader, written: &[api::Quota]) -> Vec<Quota> {
    let mut quotas = Vec::new();
    for (at, quota) in written.iter().enumerate() {
        let namespaces = reader.selector(&quota.namespace_selector, &format!("spec.quotas[{at}].namespaceSelector"));
        match u32::try_from(quota.max_egress_ips) {
            Ok(max @ ..=MAX_COUNT) => quotas.push(Quota { namespaces, max }),
            _ => reader.problem(format!("spec.quotas[{at}].maxEgressIPs"), "it is out of range", "write 0 to 1024"),
        }
    }
    quotas
}

/// Returns the ranges of a pool, of which there must be at least one.
pub(super) fn ranges(reader: &mut Reader, written: &[api::IPRange]) -> Vec<IpRange> {
    let mut ranges = Vec::new();
    for (at, range) in written.iter().enumerate() {
        let field = format!("spec.ipRanges[{at}]");
        match (&range.cidr, &range.start, &range.end) {
            (Some(cidr), None, None) => {
                let remedy = "write a network such as 192.0.2.0/28";
                if let Some(cidr) = reader.parse(cidr, format!("{field}.cidr"), remedy) {
                    ranges.extend(IpRange::from_cidr(cidr));
                }
            }
            (None, Some(start), Some(end)) => {
                let remedy = "write an address such as 192.0.2.32";
                let start = reader.parse(start, format!("{field}.start"), remedy);
                let end = reader.parse(end, format!("{field}.end"), remedy);
                if let (Some(start), Some(end)) = (start, end) {
                    match IpRange::new(start, end) {
                        Ok(range) => ranges.push(range),
                        Err(error) => reader.problem(field, error.to_string(), "write the first and the last address"),
                    }
                }
            }
            _ => {
                let remedy = "write {cidr: 192.0.2.0/28} or {start: 192.0.2.32, end: 192.0.2.40}";
                reader.problem(field, "it is neither a cidr, nor a start and an end", remedy);
            }
        }
    }
    if written.is_empty() {
        reader.problem("spec.ipRanges", "it is empty", "write at least one range, such as {cidr: 192.0.2.0/28}");
    }
    ranges
}

/// Returns the network of a pool.
pub(super) fn subnet(reader: &mut Reader, info: &api::SubnetInfo) -> Option<SubnetInfo> {
    let gateway: std::net::IpAddr = reader.parse(
        &info.gateway,
        "spec.subnetInfo.gateway",
        "write the address of the next hop, such as 192.0.2.1",
    )?;
    let longest = if gateway.is_ipv4() { 32 } else { 128 };
    let prefix_length = u8::try_from(info.prefix_length).ok().filter(|length| (1..=longest).contains(length));
    if prefix_length.is_none() {
        let message = format!("{} is out of range", info.prefix_length);
        reader.problem("spec.subnetInfo.prefixLength", message, format!("write 1 to {longest}"));
    }
    let vlan = match info.vlan {
        None | Some(0) => None,
        Some(vlan) => {
            let valid = u16::try_from(vlan).ok().filter(|vlan| *vlan <= 4094);
            if valid.is_none() {
                reader.problem(
                    "spec.subnetInfo.vlan",
                    format!("{vlan} is out of range"),
                    "write 1 to 4094, or 0 for none",
                );
            }
            valid
        }
    };
    Some(SubnetInfo { gateway, prefix_length: prefix_length?, vlan })
}
