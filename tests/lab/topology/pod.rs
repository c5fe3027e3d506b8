//! Pods as network namespaces, connected to their node in the two ways of CNIs.

use std::collections::BTreeMap;

use anyhow::Result;

use super::address::Dual;
use super::node::LabNode;
use crate::netns::NetNs;

/// The way in which a CNI connects a pod to its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cni {
    /// Calico's way: a veth without an address on the host's side, host routes, next hops 169.254.1.1 (proxy ARP) and
    /// the veth's link-local address.
    PointToPoint,
    /// The bridge plugin's and flannel's way: veths in the bridge `cni0`, which is the pods' gateway.
    Bridge,
}

impl Cni {
    /// Both ways, for loops.
    pub const BOTH: [Cni; 2] = [Cni::PointToPoint, Cni::Bridge];
}

/// The description of a pod to add.
#[derive(Clone, Debug)]
pub struct PodSpec {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) node: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) cni: Option<Cni>,
    pub(super) ips: Option<Dual>,
}

impl PodSpec {
    /// Describes a pod of the namespace `default` on `node`, without labels, with the next free addresses and the lab's CNI.
    pub fn new(name: &str, node: &str) -> PodSpec {
        PodSpec {
            name: name.to_owned(),
            namespace: "default".to_owned(),
            node: node.to_owned(),
            labels: BTreeMap::new(),
            cni: None,
            ips: None,
        }
    }

    /// Puts the pod into another namespace, whose Namespace object must exist ([`super::Lab::add_namespace`]).
    pub fn namespace(mut self, namespace: &str) -> PodSpec {
        self.namespace = namespace.to_owned();
        self
    }

    /// Adds a label.
    pub fn label(mut self, key: &str, value: &str) -> PodSpec {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Connects this pod differently from the lab's default.
    pub fn cni(mut self, cni: Cni) -> PodSpec {
        self.cni = Some(cni);
        self
    }

    /// Gives the pod these addresses, for example those of a removed pod.
    pub fn ips(mut self, ips: Dual) -> PodSpec {
        self.ips = Some(ips);
        self
    }
}

/// A copy of the state of a pod of the lab.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Its name.
    pub name: String,
    /// Its Kubernetes namespace.
    pub namespace: String,
    /// Its Kubernetes uid: a new one for each pod that is added, even under an old name.
    pub uid: String,
    /// The node that it runs on.
    pub node: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// The way in which it is connected.
    pub cni: Cni,
    /// Its addresses.
    pub ips: Dual,
    /// Its network namespace, in which its interface is `eth0`.
    pub ns: NetNs,
    /// Its interface on the node's side.
    pub host_interface: String,
}

const POINT_TO_POINT_MAC: &str = "ee:ee:ee:ee:ee:ee";
const POINT_TO_POINT_V4: &str = "169.254.1.1";
const POINT_TO_POINT_V6: &str = "fe80::ecee:eeff:feee:eeee";

impl Pod {
    /// Returns `namespace/name`.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Creates the pod's link and routes. The pod can send as soon as this returns.
    pub(super) fn attach(&self, node: &LabNode, mtu: u32) -> Result<()> {
        let host = &self.host_interface;
        let mac = match self.cni {
            Cni::PointToPoint => format!("address {POINT_TO_POINT_MAC} "),
            Cni::Bridge => String::new(),
        };
        let mut on_node =
            vec![format!("link add {host} mtu {mtu} {mac}type veth peer name eth0 mtu {mtu} netns {}", self.ns.name())];
        if self.cni == Cni::Bridge {
            on_node.push(format!("link set {host} master cni0"));
        }
        on_node.push(format!("link set {host} up"));
        node.ns.ip(&on_node)?;
        if self.cni == Cni::PointToPoint {
            node.ns.sysctls(&[
                (&format!("net.ipv4.conf.{host}.proxy_arp"), "1"),
                (&format!("net.ipv4.neigh.{host}.proxy_delay"), "0"),
            ])?;
        }
        self.add_routes_on(node)?;
        self.ns.ip(&["link set eth0 up".to_owned()])?;
        // The pod gets its addresses last, so that its next hop is ready for its first packet.
        self.ns.wait_addressed(&["eth0"])?;
        node.ns.wait_running(&[host])?;
        match self.cni {
            Cni::PointToPoint => node.ns.wait_addressed(&[host])?,
            Cni::Bridge => node.ns.wait_addressed(&["cni0"])?,
        }
        self.add_addresses(node)?;
        self.ns.wait_addressed(&["eth0"])
    }

    fn add_routes_on(&self, node: &LabNode) -> Result<()> {
        match self.cni {
            Cni::Bridge => Ok(()),
            Cni::PointToPoint => node.ns.ip(&[
                format!("route add {}/32 dev {}", self.ips.v4, self.host_interface),
                format!("route add {}/128 dev {}", self.ips.v6, self.host_interface),
            ]),
        }
    }

    fn add_addresses(&self, node: &LabNode) -> Result<()> {
        let Dual { v4, v6 } = self.ips;
        self.ns.ip(&match self.cni {
            Cni::PointToPoint => vec![
                format!("addr add {v4}/32 dev eth0"),
                format!("addr add {v6}/128 dev eth0"),
                format!("route add {POINT_TO_POINT_V4} dev eth0 scope link"),
                format!("route add default via {POINT_TO_POINT_V4} dev eth0"),
                format!("route add default via {POINT_TO_POINT_V6} dev eth0"),
            ],
            Cni::Bridge => {
                let gateway = super::address::pod(node.index, 1);
                vec![
                    format!("addr add {v4}/24 dev eth0"),
                    format!("addr add {v6}/64 dev eth0"),
                    format!("route add default via {} dev eth0", gateway.v4),
                    format!("route add default via {} dev eth0", gateway.v6),
                ]
            }
        })
    }

    /// Removes both ends of the link.
    pub(super) fn detach(&self, node: &LabNode) -> Result<()> {
        node.ns.ip(&[format!("link del {}", self.host_interface)])
    }

    /// Changes the pod's addresses on the same link.
    pub(super) fn readdress(&mut self, node: &LabNode, ips: Dual) -> Result<()> {
        if self.cni == Cni::PointToPoint {
            node.ns.ip(&[
                format!("route del {}/32 dev {}", self.ips.v4, self.host_interface),
                format!("route del {}/128 dev {}", self.ips.v6, self.host_interface),
            ])?;
        }
        self.ns.sh("ip -4 addr flush dev eth0; ip -6 addr flush dev eth0 scope global
             ip -4 route flush dev eth0; ip -6 route del default dev eth0")?;
        self.ips = ips;
        self.add_routes_on(node)?;
        self.add_addresses(node)?;
        self.ns.wait_addressed(&["eth0"])
    }
}

/// Creates the bridge on a node whose CNI is [`Cni::Bridge`].
pub(super) fn make_bridge(node: &LabNode, mtu: u32) -> Result<()> {
    let gateway = super::address::pod(node.index, 1);
    node.ns.ip(&[
        format!("link add cni0 mtu {mtu} type bridge forward_delay 0 stp_state 0"),
        format!("addr add {}/24 dev cni0", gateway.v4),
        format!("addr add {}/64 dev cni0", gateway.v6),
        "link set cni0 up".to_owned(),
    ])
}
