//! The host-stack path of a flow's first packet: nftables rules that exempt first packets and the tunnel's outer packets from conntrack,
//! and so from masquerading, and on a node without a default route a policy route to the tunnel device.
//!
//! Programs mark a first packet with a priority, by which the rules recognise it. The program at the interface through which it leaves
//! translates it. A first packet that would leave through an interface without that program is dropped.

mod hold;
mod nft;
mod routes;
mod rules;

use std::{collections::BTreeSet, io, net::IpAddr};

use ipnet::IpNet;
use rtnetlink::Handle;

use egress_core::network::links::LinkTable;

/// The table's name in nftables.
pub const TABLE: &str = "spillway";

/// Counters of the rules that drop.
const HELD: &str = "held";
const ASTRAY: &str = "astray";
const FORGED: &str = "forged";
const LOOPED: &str = "looped";
const COPIED: &str = "copied";
const COUNTERS: [&str; 5] = [HELD, ASTRAY, FORGED, LOOPED, COPIED];

/// The packets of one kind that our rules have dropped. They are counted as long as the table exists, whether or not the agent runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// A name in the style of the programs' counters: it begins with `drop_`.
    pub name: &'static str,
    /// A description of one sentence.
    pub help: &'static str,
    /// The number of packets.
    pub packets: u64,
}

/// Returns the counts of packets that the rules have dropped; none if nftables cannot be read.
pub fn dropped() -> Vec<Dropped> {
    let Ok(counters) = nft::counters(TABLE) else { return Vec::new() };
    let of = |counter: &str| counters.get(counter).map_or(0, |counted| counted.packets);
    let held = "packets that no program had seen while a selected pod was starting (nftables rule)";
    let astray = "first packets of flows that would have left by an interface without our program (nftables rule)";
    let forged = "packets for the UDP port of the nodes' tunnels from interfaces that may be pods' (nftables rule)";
    let looped = "packets of this host's sockets to its own tunnel port (nftables rule)";
    let copied = "a gateway's copies of packets for leased ports of its own address that match none of its masqueraded flows (nftables rule)";
    vec![
        Dropped { name: "drop_forward_tunnel_port", help: forged, packets: of(FORGED) },
        Dropped { name: "drop_not_seen", help: held, packets: of(HELD) },
        Dropped { name: "drop_astray", help: astray, packets: of(ASTRAY) },
        Dropped { name: "drop_tunnel_loop", help: looped, packets: of(LOOPED) },
        Dropped { name: "drop_gateway_copy", help: copied, packets: of(COPIED) },
    ]
}

/// The wanted state of the path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The single bit of the mark.
    pub mark: u32,
    /// The tunnel device's ifindex.
    pub index: u32,
    /// The tunnel's UDP port.
    pub port: u16,
    /// The addresses at which this node receives tunnelled packets.
    pub addresses: BTreeSet<IpAddr>,
    /// Interfaces with the program that translates first packets.
    pub exits: BTreeSet<String>,
    /// Interfaces whose packets are never from a pod, whatever their mark.
    pub outside: BTreeSet<String>,
    /// Whether policies select pods of this node. Without them there are no first packets, and a routing rule for them would only
    /// slow down each route lookup of the kernel.
    pub selects: bool,
    /// While a selected pod is starting: the destinations that no policy touches. Packets to other destinations that our program has not
    /// seen are held.
    pub hold: Option<BTreeSet<IpNet>>,
}

/// Why the path cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum FirewallError {
    /// nftables.
    #[error(
        "the nftables table {TABLE} cannot be {action}: {source}; the agent needs CAP_NET_ADMIN and the kernel nf_tables, \
         nf_tables_inet, nft_ct and nft_objref (`modprobe -a nf_tables nft_ct nft_objref`)"
    )]
    Nftables {
        /// The attempted action.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Routing.
    #[error(
        "the policy route to the tunnel device cannot be {action}: {message}; the agent needs CAP_NET_ADMIN and the kernel \
         CONFIG_IP_MULTIPLE_TABLES and CONFIG_IPV6_MULTIPLE_TABLES"
    )]
    Routing {
        /// The attempted action.
        action: &'static str,
        /// The kernel's answer.
        message: String,
    },
}

impl FirewallError {
    fn nftables(action: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Nftables { action, source }
    }

    fn routing(action: &'static str) -> impl Fn(rtnetlink::Error) -> Self {
        move |error| Self::Routing { action, message: error.to_string() }
    }
}

/// The path, as last set up.
#[derive(Debug, Default)]
pub struct StackPath {
    made: Option<Spec>,
}

impl StackPath {
    /// Creates whatever is missing or different. Returns whether anything was. Anybody may remove parts of the path at any time.
    pub async fn ensure(&mut self, handle: &Handle, links: &LinkTable, spec: &Spec) -> Result<bool, FirewallError> {
        let selects = spec.selects
            || match &self.made {
                Some(made) => made.selects,
                // Programs of an earlier agent keep running.
                None => routes::any_rules(handle).await?,
            };
        let spec = &Spec { selects, ..spec.clone() };
        let led =
            routes::families().filter(|family| selects && !routes::has_default(links, family)).collect::<Vec<_>>();
        let chains = rules::chains(spec, !led.is_empty());
        let present = nft::rules(TABLE).map_err(FirewallError::nftables("read"))?;
        let mut changed = present != rules::summary(&chains);
        if changed {
            // Packets that are dropped between this read and the new rules are not counted.
            let counters = nft::counters(TABLE).map_err(FirewallError::nftables("read"))?;
            let counters = COUNTERS.map(|name| (name, counters.get(name).copied().unwrap_or_default()));
            nft::replace(TABLE, &counters, &rules::sets(spec), &chains).map_err(FirewallError::nftables("made"))?;
        }
        let anew = self.made.as_ref().map(|made| (made.index, made.mark)) != Some((spec.index, spec.mark));
        for family in routes::families() {
            changed |= routes::ensure(handle, links, &family, led.contains(&family).then_some(spec), anew).await?;
        }
        self.made = Some(spec.clone());
        Ok(changed)
    }
}

/// Lists the parts of the path that exist on this node, a line each.
pub async fn inventory(handle: &Handle) -> Result<Vec<String>, FirewallError> {
    let rules = nft::rules(TABLE).map_err(FirewallError::nftables("read"));
    let mut lines = match rules {
        Ok(rules) => rules.into_iter().map(|(chain, text)| format!("nftables inet {TABLE} {chain}: {text}")).collect(),
        // A kernel without nftables has no rules.
        Err(_) => Vec::new(),
    };
    lines.extend(routes::inventory(handle).await?);
    Ok(lines)
}

/// Removes the whole path. Returns the parts that existed.
pub async fn remove(handle: &Handle) -> Result<Vec<String>, FirewallError> {
    let found = inventory(handle).await?;
    // The rules that route packets here go first, then those that catch stray packets.
    routes::remove(handle).await?;
    if found.iter().any(|line| line.starts_with("nftables")) {
        nft::delete(TABLE).map_err(FirewallError::nftables("removed"))?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
