//! Names and versions that the object file, the pins and the tools agree on.

/// The version of the maps' layout. It is part of the pins' path: an agent never reuses maps of another version.
pub const LAYOUT_VERSION: u32 = 3;

/// The UDP port of the tunnel device, away from the ports that CNIs use (4789, 8472, 6081).
pub const TUNNEL_PORT: u16 = 8473;
/// VXLAN network identifier of packets on their way to a gateway.
pub const VNI_FORWARD: u32 = 0x53_50_01;
/// VXLAN network identifier of replies on their way back to a source node.
pub const VNI_REPLY: u32 = 0x53_50_02;
/// VXLAN network identifier of probes.
pub const VNI_PROBE: u32 = 0x53_50_03;
/// Source MAC address of tunnelled frames. It must differ from every tunnel device's own address: VXLAN drops a frame that seems to come
/// from the receiving device itself (`vxlan_rcv`, `ether_addr_equal(eth_hdr(skb)->h_source, vxlan->dev->dev_addr)`).
pub const INNER_SRC_MAC: [u8; 6] = [0x02, 0x53, 0x57, 0, 0, 1];
/// Destination MAC address of tunnelled frames.
pub const INNER_DST_MAC: [u8; 6] = [0x02, 0x53, 0x57, 0, 0, 2];
/// The mark bit that routes a first packet to the tunnel device where nothing else has a route for it, unless configured otherwise.
///
/// It is none of the bits that other components are known to use: kube-proxy 0x4000 and 0x8000, the portmap plugin 0x2000, Cilium 0x0fff,
/// Calico and Tailscale above 0xffff, Antrea 0xff and 0x80000000.
pub const FIREWALL_MARK: u32 = 0x1000;
/// The priority (`skb->priority`) of first packets on the host-stack path. Our own rules recognise them by it.
pub const FIREWALL_PRIORITY: u32 = 0x5350_0001;
/// The priority of other packets that `pod_egress` leaves to the stack while a selected pod is starting. Our own rules use
/// it to tell them from packets that arrived on an interface without a program.
pub const SEEN_PRIORITY: u32 = 0x5350_0002;
/// The priority of a gateway's own copy of a packet that also goes to the lessee. The gateway needs the copy only for a
/// connection that it masquerades itself. Our own rules use the priority to keep the copy from the gateway's sockets.
pub const COPY_PRIORITY: u32 = 0x5350_0003;

/// Length of a tick as a power of two: 2^30 ns (1.074 s) of `CLOCK_MONOTONIC`. The first tick after boot has number 0.
pub const TICK_SHIFT: u32 = 30;

/// Returns the number of ticks in `seconds`, rounded up.
pub const fn ticks(seconds: u64) -> u32 {
    ((seconds * 1_000_000_000).div_ceil(1 << TICK_SHIFT)) as u32
}

/// Linux's address family number of IPv4.
pub const AF_INET: u32 = 2;
/// Linux's address family number of IPv6.
pub const AF_INET6: u32 = 10;

/// The kinds of names in the map `NAMES`, which only user space reads.
pub mod name_kind {
    /// A policy; the id is its index.
    pub const POLICY: u32 = 1;
    /// A node; the id is its index in `NODES`.
    pub const NODE: u32 = 2;
    /// An endpoint, as `namespace/name/uid`; the id is the endpoint's.
    pub const ENDPOINT: u32 = 3;
    /// A namespace of pods that policies select; the id is its number on this node.
    pub const NAMESPACE: u32 = 4;
    /// A set of policies that select a pod, as a hash of their names; the id is the class.
    pub const CLASS: u32 = 5;
}

crate::layout::map_type! {
    /// Key of the map `NAMES`.
    pub struct NameKey {
        /// One of [`name_kind`].
        pub kind: u32,
        /// The id within the kind.
        pub id: u32,
    } size 8
}

/// Longest name kept in `NAMES`: a namespace (63), a pod's name (253) and a uid (36) with slashes between them, rounded up.
pub const NAME_LEN: usize = 360;

crate::layout::map_type! {
    /// Value of the map `NAMES`: UTF-8, filled up with zeros.
    pub struct Name {
        /// The bytes.
        pub bytes: [u8; NAME_LEN],
    } size 360
}

/// Handle (upper half) of the shaper's HTB qdisc. The class of an egress IP is `2 * index + 1` for outgoing traffic, and
/// one more for incoming traffic.
pub const SHAPER_HANDLE: u16 = 0x5350;
