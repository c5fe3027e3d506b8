//! The way of a flow's first packet through the host's stack: the policy route that leads marked packets to the tunnel
//! device, and the nftables rules that keep connection tracking, and with it masquerading, away from them and from the
//! tunnel's outer packets.
//!
//! Programs mark such a packet twice: one bit of the mark, by which the routing rule knows it, and a priority, by which the
//! nftables rules do. So the bit may be somebody else's on other packets, and is set again where somebody clears it. A
//! packet that is ours and would leave by another device than the tunnel's, because the routing rule is gone, is dropped.

mod hold;
mod nft;
mod routes;
mod rules;
mod wire;

use std::{collections::BTreeSet, io, net::IpAddr};

use ipnet::IpNet;
use rtnetlink::Handle;

use super::table::LinkTable;

/// The table's name in nftables.
pub const TABLE: &str = "spillway";

/// Counters of the rules that drop.
const HELD: &str = "held";
const ASTRAY: &str = "astray";

/// What rules of ours have dropped, of one kind. It is counted as long as the table is there, whether the agent runs or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// A name as the programs' counters have: it begins with `drop_`.
    pub name: &'static str,
    /// One sentence for people.
    pub help: &'static str,
    /// How many packets.
    pub packets: u64,
}

/// What the rules have dropped so far; nothing where nftables cannot be read.
pub fn dropped() -> Vec<Dropped> {
    let Ok(counters) = nft::counters(TABLE) else { return Vec::new() };
    let of = |counter: &str| counters.get(counter).map_or(0, |counted| counted.packets);
    let held = "packets that no program had seen while a selected pod was starting (rule of nftables)";
    let astray = "first packets of flows that the policy route did not lead to the tunnel device (rule of nftables)";
    vec![
        Dropped { name: "drop_not_seen", help: held, packets: of(HELD) },
        Dropped { name: "drop_astray", help: astray, packets: of(ASTRAY) },
    ]
}

/// How the way has to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The one bit of the mark.
    pub mark: u32,
    /// The tunnel device's name.
    pub tunnel: String,
    /// Its ifindex.
    pub index: u32,
    /// Its UDP port.
    pub port: u16,
    /// Where this node receives tunnelled packets.
    pub addresses: BTreeSet<IpAddr>,
    /// The largest packet that fits the tunnel: what is larger is answered by the stack.
    pub mtu: u32,
    /// Interfaces whose packets are never a pod's, whatever their mark.
    pub outside: BTreeSet<String>,
    /// Whether policies select pods of this node. Without them nothing is marked, and rules for it would only make each of the
    /// kernel's look-ups for a route longer; once they are made they stay.
    pub selects: bool,
    /// While a selected pod is starting: the destinations that no policy touches. What our program has not seen on its way
    /// to another one is held.
    pub hold: Option<BTreeSet<IpNet>>,
}

/// Why the way is not there.
#[derive(Debug, thiserror::Error)]
pub enum FirewallError {
    /// nftables.
    #[error(
        "the nftables table {TABLE} cannot be {action}: {source}; the agent needs CAP_NET_ADMIN and the kernel nf_tables, \
         nf_tables_inet, nft_ct and nft_objref (`modprobe -a nf_tables nft_ct nft_objref`)"
    )]
    Nftables {
        /// What was tried.
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
        /// What was tried.
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

/// The way, as it was made last.
#[derive(Debug, Default)]
pub struct LongWay {
    made: Option<Spec>,
}

impl LongWay {
    /// Makes what is missing or different; whether anything was. Anybody may remove any of it at any time.
    pub async fn ensure(&mut self, handle: &Handle, links: &LinkTable, spec: &Spec) -> Result<bool, FirewallError> {
        let chains = rules::chains(spec);
        let present = nft::rules(TABLE).map_err(FirewallError::nftables("read"))?;
        let mut changed = present != rules::summary(&chains);
        if changed {
            // What is dropped between this look and the new rules is not counted.
            let counters = nft::counters(TABLE).map_err(FirewallError::nftables("read"))?;
            let counters = [HELD, ASTRAY].map(|name| (name, counters.get(name).copied().unwrap_or_default()));
            nft::replace(TABLE, &counters, &hold::sets(spec), &chains).map_err(FirewallError::nftables("made"))?;
        }
        let selects = spec.selects
            || match &self.made {
                Some(made) => made.selects,
                // An earlier agent may have told programs to mark.
                None => routes::any_rules(handle).await?,
            };
        let spec = Spec { selects, ..spec.clone() };
        if selects {
            // The route before the rule that leads to it.
            if self.made.as_ref() != Some(&spec) || !routes::present(links, &spec) {
                routes::replace(handle, &spec).await?;
                changed = true;
            }
            changed |= routes::ensure_rules(handle, &spec).await?;
        }
        self.made = Some(spec);
        Ok(changed)
    }

    /// What was asked for last, if it could be made.
    pub fn made(&self) -> Option<&Spec> {
        self.made.as_ref()
    }
}

/// What there is of it on this node, a line each.
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

/// Removes all of it; returns what was there.
pub async fn remove(handle: &Handle) -> Result<Vec<String>, FirewallError> {
    let found = inventory(handle).await?;
    // First what leads packets here, then what catches those that went astray.
    routes::remove(handle).await?;
    if found.iter().any(|line| line.starts_with("nftables")) {
        nft::delete(TABLE).map_err(FirewallError::nftables("removed"))?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
