//! The networks of a cluster: namespaces, bridges, and the outside.

use anyhow::Result;

use super::{Cluster, ClusterNode, NodeKind};
use crate::netns::{self, NetNs};

/// The servers of the outside.
pub const SERVERS: [&str; 3] = ["203.0.113.7", "203.0.113.8", "198.51.100.10"];
/// Their networks.
const OUTSIDE: [&str; 2] = ["203.0.113.0/24", "198.51.100.0/24"];

impl ClusterNode {
    /// Returns its address in the nodes' network.
    pub fn address(&self) -> String {
        format!("10.77.0.{}", 10 + self.number)
    }

    /// Returns the network of its pods.
    pub fn pods(&self) -> String {
        format!("10.244.{}.0/24", self.number)
    }

    /// Returns the address of a gateway in the external segment.
    pub fn external(&self) -> String {
        format!("192.0.2.{}", 100 + self.of_kind)
    }
}

impl Cluster {
    /// Creates all namespaces and links.
    pub(super) fn make_networks(&self) -> Result<()> {
        let cp = NetNs::create(&self.netns_name("cp"))?;
        let out = NetNs::create(&self.netns_name("out"))?;
        let lines = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
        let out_name = out.name().to_owned();
        cp.ip(&[
            vec![format!("link add out type veth peer name nodes netns {out_name}")],
            lines(&[
                "link add nodes type bridge",
                "addr add 10.77.0.1/24 dev nodes",
                "link set nodes up",
                "addr add 172.31.255.1/30 dev out",
                "link set out up",
            ]),
            OUTSIDE.iter().map(|net| format!("route add {net} via 172.31.255.2")).collect(),
        ]
        .concat())?;
        out.ip(&[
            lines(&[
                "addr add 172.31.255.2/30 dev nodes",
                "link set nodes up",
                "route add default via 172.31.255.1",
                "link add ext type bridge",
                "addr add 192.0.2.1/24 dev ext",
                "link set ext up",
            ]),
            SERVERS.iter().map(|server| format!("addr add {server}/32 dev lo")).collect(),
        ]
        .concat())?;
        let forward = [("net.ipv4.ip_forward", "1"), ("net.ipv4.conf.all.rp_filter", "0")];
        cp.sysctls(&forward)?;
        out.sysctls(&forward)?;
        self.nodes.iter().try_for_each(|node| self.make_network_of(node, &cp, &out))
    }

    fn make_network_of(&self, node: &ClusterNode, cp: &NetNs, out: &NetNs) -> Result<()> {
        let ns = NetNs::create(&self.netns_name(&node.name))?;
        let (name, address) = (&node.name, node.address());
        cp.ip(&[
            format!("link add {name} type veth peer name eth0 netns {}", ns.name()),
            format!("link set {name} master nodes"),
            format!("link set {name} up"),
            format!("route add {} via {address}", node.pods()),
        ])?;
        let mut lines = vec![
            format!("addr add {address}/24 dev eth0"),
            "link set eth0 up".to_owned(),
            "route add default via 10.77.0.1".to_owned(),
        ];
        let others = self.nodes.iter().filter(|other| other.number != node.number && !self.flannel);
        lines.extend(others.map(|other| format!("route add {} via {}", other.pods(), other.address())));
        if node.kind == NodeKind::Gateway {
            out.ip(&[
                format!("link add {name} type veth peer name eth1 netns {}", ns.name()),
                format!("link set {name} master ext"),
                format!("link set {name} up"),
            ])?;
            lines.extend([format!("addr add {}/24 dev eth1", node.external()), "link set eth1 up".to_owned()]);
            lines.extend(OUTSIDE.iter().map(|net| format!("route add {net} via 192.0.2.1")));
        }
        ns.ip(&lines)?;
        ns.sysctls(&[("net.ipv4.ip_forward", "1"), ("net.ipv4.conf.all.rp_filter", "0")])
    }

    /// Assigns addresses of `10.RANGE.0.0/16` to pods that start from now on, as a CNI with its own address management does: routes lead to
    /// the addresses, but no Node lists them. With `None`, pods take addresses from the networks that the Nodes list.
    pub fn pods_from(&self, range: Option<u8>) -> Result<()> {
        let network = |node: &ClusterNode, range: u8| format!("10.{range}.{}.0/24", node.number);
        let Some(range) = range else {
            return self.nodes.iter().try_for_each(|node| self.write_cni(node, "cni0", &node.pods()));
        };
        let route = |to: &ClusterNode| format!("route replace {} via {}", network(to, range), to.address());
        self.netns("cp")?.ip(&self.nodes.iter().map(route).collect::<Vec<_>>())?;
        for node in &self.nodes {
            let others = self.nodes.iter().filter(|other| other.number != node.number);
            self.netns(&node.name)?.ip(&others.map(route).collect::<Vec<_>>())?;
            self.write_cni(node, &format!("cni{range}"), &network(node, range))?;
        }
        Ok(())
    }

    /// Cuts a node off from everything, or reconnects it to its networks.
    pub fn partition(&self, node: &str, cut: bool) -> Result<()> {
        let node = self.node(node)?;
        let state = if cut { "down" } else { "up" };
        self.netns("cp")?.ip(&[format!("link set {} {state}", node.name)])?;
        if node.kind == NodeKind::Gateway {
            self.netns("out")?.ip(&[format!("link set {} {state}", node.name)])?;
        }
        Ok(())
    }

    pub(super) fn remove_networks(&self) {
        let parts = ["cp", "out"].into_iter().chain(self.nodes.iter().map(|node| node.name.as_str()));
        for part in parts {
            // A part that does not exist need not be removed.
            netns::remove(&self.netns_name(part)).ok();
        }
    }
}
