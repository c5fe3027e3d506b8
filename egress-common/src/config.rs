//! The settings that the programs read for every packet.

use crate::layout::map_type;

map_type! {
    /// Entry 0 of the map `CONFIG`.
    pub struct DatapathConfig {
        /// Increases with every change of endpoints, classes, policies or membership: a flow last
        /// checked under an older generation is reclassified at its next packet.
        pub generation: u32,
        /// [`flags`].
        pub flags: u32,
        /// Interface index of the tunnel device.
        pub tunnel_ifindex: u32,
        /// This node's index in `NODES`.
        pub node: u32,
        /// Largest TCP segment over IPv4 that fits the tunnel (0: no clamping).
        pub mss_v4: u32,
        /// Largest TCP segment over IPv6 that fits the tunnel (0: no clamping).
        pub mss_v6: u32,
        /// Idle time of an established TCP connection, in ticks.
        pub tcp_established: u32,
        /// Idle time of a TCP connection that is opening or closing, in ticks.
        pub tcp_transitory: u32,
        /// Idle time of a UDP flow, in ticks.
        pub udp: u32,
        /// Idle time of an ICMP query, in ticks.
        pub icmp: u32,
        /// Largest IP packet that fits the tunnel; 0: any.
        pub room: u32,
        /// Flows that one pod may have; 0: any number.
        pub pod_flows: u32,
        /// UDP port of the tunnel, host byte order.
        pub tunnel_port: u32,
        /// The IPv4 address that other nodes send tunnelled packets to; 0 for none.
        pub own_v4: [u32; 1],
        /// The same over IPv6; zero for none.
        pub own_v6: [u32; 4],
        /// Near end of the shaper; 0 where there is none.
        pub shaper_ifindex: u32,
    } size 76
}

/// Bits of [`DatapathConfig::flags`].
pub mod flags {
    /// A selected pod is starting on this node: packets of unknown sources at pod interfaces are dropped.
    pub const HOLD: u32 = 1;
    /// The kernel knows `BPF_F_IPV6` of `bpf_l4_csum_replace` (Linux 6.16).
    pub const CSUM_IPV6: u32 = 2;
    /// New flows wait until the host's firewall has let one of their packets pass.
    pub const RESPECT_FIREWALL: u32 = 8;
    /// The kernel knows `BPF_F_ADJ_ROOM_DECAP_L4_UDP`: merged packets can be stripped of their outer header.
    pub const DECAP_UDP: u32 = 4;
    /// This node carries egress IPs. Where it does not, a packet from another node is usually a reply for a pod of this one.
    pub const CARRIES: u32 = 16;
    /// Another party's program may deliver packets to a pod past `pod_ingress`, so a SYN+ACK without a record may answer a SYN that
    /// came that way.
    pub const UNSEEN_INBOUND: u32 = 32;
    /// Packets of egress IPs arrive or leave by a VLAN device: XDP programs look up `VLANS`.
    pub const VLANS: u32 = 64;
}

/// The record in a map that no agent has written yet.
pub const UNSET: DatapathConfig = DatapathConfig {
    generation: 0,
    flags: 0,
    tunnel_ifindex: 0,
    node: 0,
    mss_v4: 0,
    mss_v6: 0,
    tcp_established: 0,
    tcp_transitory: 0,
    udp: 0,
    icmp: 0,
    room: 0,
    pod_flows: 0,
    tunnel_port: 0,
    own_v4: [0],
    own_v6: [0; 4],
    shaper_ifindex: 0,
};
