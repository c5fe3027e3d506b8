//! A node of the lab: its namespace, its addresses, and the script that sets it up.

use std::collections::BTreeMap;

use anyhow::Result;

use super::address::{self, Dual};
use super::settings::LabSettings;
use crate::netns::NetNs;

/// The role of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Runs pods; its own default gateway is the router on the underlay.
    Worker,
    /// Also has `ext0` on the external segment, with its default route there.
    Gateway,
}

/// A worker or gateway node.
#[derive(Clone, Debug)]
pub struct LabNode {
    /// `worker1`, `gw2`.
    pub name: String,
    /// Worker or gateway.
    pub role: Role,
    /// The third byte of its pods' addresses.
    pub index: u8,
    /// Its network namespace.
    pub ns: NetNs,
    /// Its addresses on the underlay (`eth0`): the node's InternalIPs, and the source of a worker's leaks.
    pub underlay: Dual,
    /// A gateway's addresses on the external segment (`ext0`).
    pub external: Option<Dual>,
    /// Labels of the Node object.
    pub labels: BTreeMap<String, String>,
    /// The next free host number for a pod.
    pub(super) next_pod: u8,
}

impl LabNode {
    /// Returns the addresses that a server sees for this node's pods without a policy: masquerading uses the outgoing interface's.
    pub fn masquerade(&self) -> Dual {
        self.external.unwrap_or(self.underlay)
    }

    /// Returns the interface of the default route.
    pub fn uplink(&self) -> &'static str {
        match self.role {
            Role::Worker => "eth0",
            Role::Gateway => "ext0",
        }
    }

    /// Returns the node's number in its segments' addresses and in its MAC addresses.
    fn number(&self) -> u8 {
        self.underlay.v4.octets()[3]
    }

    /// Returns the MAC address of `eth0`.
    pub fn underlay_mac(&self) -> [u8; 6] {
        [0x02, 0x57, 0, 0, 0, self.number()]
    }

    /// Returns the MAC address of `ext0`.
    pub fn external_mac(&self) -> [u8; 6] {
        [0x02, 0x57, 0, 0, 1, self.number()]
    }

    /// Sets up addresses, routes to the other nodes' pods, forwarding and masquerading, once the links exist.
    pub(super) fn set_up(&self, others: &BTreeMap<String, LabNode>, settings: &LabSettings) -> Result<()> {
        let mut ip = vec![
            format!("addr add {}/24 dev eth0", self.underlay.v4),
            format!("addr add {}/64 dev eth0", self.underlay.v6),
            "link set eth0 up".to_owned(),
        ];
        let gateway = match self.external {
            Some(external) => {
                ip.push(format!("addr add {}/24 dev ext0", external.v4));
                ip.push(format!("addr add {}/64 dev ext0", external.v6));
                ip.push("link set ext0 up".to_owned());
                address::external(1)
            }
            None => address::underlay(1),
        };
        ip.push(format!("route add default via {} dev {}", gateway.v4, self.uplink()));
        ip.push(format!("route add default via {} dev {}", gateway.v6, self.uplink()));
        for other in others.values().filter(|other| other.name != self.name) {
            let [v4, v6] = address::pod_prefixes(other.index);
            ip.push(format!("route add {v4} via {} dev eth0", other.underlay.v4));
            ip.push(format!("route add {v6} via {} dev eth0", other.underlay.v6));
        }
        self.ns.ip(&ip)?;
        self.ns.wait_addressed(if self.external.is_some() { &["eth0", "ext0"] } else { &["eth0"] })?;
        if settings.masquerade {
            self.ns.nft(&masquerade(settings.masquerade_underlay))?;
        }
        Ok(())
    }
}

/// Returns the masquerading rules; with `underlay`, they also apply to packets to other nodes.
fn masquerade(underlay: bool) -> String {
    let ([pods4, pods6], [under4, under6]) = (address::PODS, address::UNDERLAY);
    let (but4, but6) = if underlay {
        (pods4.into(), pods6.into())
    } else {
        (format!("{pods4}, {under4}"), format!("{pods6}, {under6}"))
    };
    format!(
        "table inet cni {{
            chain postrouting {{
                type nat hook postrouting priority srcnat; policy accept;
                ip saddr {pods4} ip daddr != {{ {but4} }} masquerade
                ip6 saddr {pods6} ip6 daddr != {{ {but6} }} masquerade
            }}
        }}"
    )
}
