//! The other nodes that this node sends to, and how it probes them.

use crate::{
    agent::{
        facts::Facts,
        gateways::ProbeTarget,
        transports::{self, Peer, Transports},
    },
    encode::NodeView,
    model::{NodeName, Transport},
};
use egress_common::transport::DIRECT;
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::IpAddr,
};

/// Returns the nodes that this node sends to: the gateways that it watches and, as a gateway, the holders of its egress IPs' blocks.
pub(super) fn peers(
    facts: &Facts,
    view: &NodeView,
    watched: &BTreeSet<(&NodeName, IpAddr)>,
) -> BTreeMap<NodeName, Peer> {
    let own = view.egress_ips.values().filter(|e| e.forwards);
    // A hash set, because a gateway for 5,000 nodes has a dozen leases of each.
    let sources: HashSet<&NodeName> = own.flat_map(|e| e.leases.values()).filter(|n| **n != facts.node).collect();
    let all: BTreeSet<&NodeName> = sources.into_iter().chain(watched.iter().map(|(name, _)| *name)).collect();
    let peer = |name: &NodeName| {
        let address = *view.nodes.get(name)?.first()?;
        let report = facts.objects.snapshot.report(name);
        let mac = report.and_then(|r| r.macs.get(&address)).copied();
        // A MAC address that two nodes claim is ignored.
        let mac = mac.filter(|mac| view.macs.get(mac) == Some(name));
        let direct = report.is_some_and(|r| r.receives.contains(transports::name(DIRECT)));
        Some((name.clone(), Peer { address, mac, direct }))
    };
    all.into_iter().filter_map(peer).collect()
}

/// Returns the gateways to probe, and how.
pub(super) fn targets(
    watched: &BTreeSet<(&NodeName, IpAddr)>,
    view: &NodeView,
    transports: &BTreeMap<NodeName, Transports>,
    setting: Transport,
) -> BTreeMap<NodeName, ProbeTarget> {
    let mut targets: BTreeMap<NodeName, ProbeTarget> = BTreeMap::new();
    for (gateway, egress) in watched {
        let (Some(transports), Some(address)) =
            (transports.get(*gateway), view.nodes.get(*gateway).and_then(|a| a.first()))
        else {
            continue;
        };
        let new =
            || ProbeTarget { address: *address, egress: BTreeMap::new(), transports: transports.candidates(setting) };
        targets.entry((*gateway).clone()).or_insert_with(new).egress.entry(egress.is_ipv6()).or_insert(*egress);
    }
    targets
}
