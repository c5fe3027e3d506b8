//! The two variants without Spillway, as set up by `ip` and `nft`, and the addresses for loads with many flows.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result};
use lab::{Family, Lab, Server, address};

use super::variant::{EGRESS, UDP_PORT};

/// The number of the server's addresses for loads with many flows: one pod's ports alone do not suffice for a million.
pub const TARGETS: u8 = 128;
const TARGET_NETS: [&str; 2] = ["203.0.113.0/24", "2001:db8:71::/64"];

/// Returns the addresses for loads with many flows.
pub fn targets(family: Family) -> Vec<SocketAddr> {
    (1..=TARGETS).map(|n| SocketAddr::new(target(family, n), UDP_PORT)).collect()
}

fn target(family: Family, n: u8) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(203, 0, 113, n).into(),
        Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0x71, 0, 0, 0, 0, n.into()).into(),
    }
}

/// Gives the server those addresses, and the gateways routes to them.
pub fn towards_targets(lab: &Lab, server: &Server) -> Result<()> {
    let mut lines = Vec::new();
    for n in 1..=TARGETS {
        lines.push(format!("addr add {}/32 dev lo", target(Family::V4, n)));
        lines.push(format!("addr add {}/128 dev lo", target(Family::V6, n)));
    }
    server.ns.ip(&lines)?;
    for gateway in lab.gateways() {
        let routes = Family::BOTH.into_iter().zip(TARGET_NETS);
        gateway
            .ns
            .ip(&routes.map(|(f, net)| format!("route add {net} via {}", server.ips.ip(f))).collect::<Vec<_>>())?;
    }
    Ok(())
}

/// Sets up plain routing: the pods' node sends everything to the gateways, each flow through one of them, and the
/// gateways forward it. The server has the routes back.
pub fn plain(lab: &Lab) -> Result<()> {
    let (worker, server) = (&lab.node("worker1").ns, &lab.server("server1").ns);
    for ns in [worker, server] {
        // Hashes addresses and ports, as Spillway does.
        ns.sysctls(&[("net.ipv4.fib_multipath_hash_policy", "1"), ("net.ipv6.fib_multipath_hash_policy", "1")])?;
    }
    let external: Option<Vec<_>> = lab.gateways().map(|gateway| gateway.external).collect();
    let external = external.context("a gateway without an external address")?;
    for family in Family::BOTH {
        let hops = |all: Vec<IpAddr>| all.iter().map(|ip| format!(" nexthop via {ip} dev eth0")).collect::<String>();
        let there = hops(lab.gateways().map(|gateway| gateway.underlay.ip(family)).collect());
        let back = hops(external.iter().map(|ips| ips.ip(family)).collect());
        worker.ip(&[format!("route replace default{there}")])?;
        let pods = address::PODS[usize::from(family == Family::V6)];
        server.ip(&[format!("route add {pods}{back}")])?;
    }
    Ok(())
}

/// Sets up a gateway made of iptables rules, in both directions. conntrack runs on both nodes, as in every cluster whose nodes masquerade.
pub fn stock(lab: &Lab) -> Result<()> {
    let (worker, gateway) = (lab.node("worker1"), lab.node("gw1"));
    let pods = address::pod_prefixes(worker.index);
    let ends = [("169.254.99.1", "fd99::1"), ("169.254.99.2", "fd99::2")];
    for (node, other, (v4, v6)) in [(worker, gateway, ends[0]), (gateway, worker, ends[1])] {
        node.ns.ip(&[
            format!(
                "link add vx0 type vxlan id 99 dstport 4789 local {} remote {} dev eth0 nolearning",
                node.underlay.v4, other.underlay.v4
            ),
            format!("addr add {v4}/30 dev vx0"),
            format!("addr add {v6}/64 dev vx0"),
            "link set vx0 up".to_owned(),
        ])?;
    }
    let [all4, all6] = address::PODS;
    let [under4, under6] = address::UNDERLAY;
    worker.ns.nft(&format!(
        "table inet stock {{
            chain marking {{
                type filter hook prerouting priority mangle;
                ip saddr {} ip daddr != {{ {all4}, {under4} }} meta mark set 0x99
                ip6 saddr {} ip6 daddr != {{ {all6}, {under6} }} meta mark set 0x99
            }}
        }}
        insert rule inet cni postrouting oifname \"vx0\" accept",
        pods[0], pods[1]
    ))?;
    worker.ns.sh(&format!(
        "ip rule add fwmark 0x99 table 99; ip -6 rule add fwmark 0x99 table 99
         ip route add default via {} dev vx0 table 99; ip -6 route add default via {} dev vx0 table 99",
        ends[1].0, ends[1].1
    ))?;
    let egress = address::external(EGRESS);
    gateway.ns.nft(&format!(
        "insert rule inet cni postrouting ip saddr {} oifname \"ext0\" snat ip to {}
         insert rule inet cni postrouting ip6 saddr {} oifname \"ext0\" snat ip6 to {}",
        pods[0], egress.v4, pods[1], egress.v6
    ))?;
    gateway.ns.ip(&[
        format!("addr add {}/32 dev ext0", egress.v4),
        format!("addr add {}/128 dev ext0", egress.v6),
        format!("route replace {} via {} dev vx0", pods[0], ends[0].0),
        format!("route replace {} via {} dev vx0", pods[1], ends[0].1),
    ])?;
    gateway.ns.wait_addressed(&["ext0"])
}
