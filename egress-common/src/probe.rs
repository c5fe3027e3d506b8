//! The probe that a source node sends to a gateway and that the gateway's program returns: a UDP packet from [`PORT`]
//! to [`PORT`] with the egress IP as its source. On each transport it travels exactly as a translated packet does.

use crate::layout::map_type;

/// The first four bytes of a probe.
pub const MAGIC: [u8; 4] = *b"SPWY";
/// The version of the format.
pub const VERSION: u8 = 3;
/// [`Probe::kind`] on the way to the gateway.
pub const REQUEST: u8 = 1;
/// [`Probe::kind`] on the way back.
pub const REPLY: u8 = 2;
/// Source and destination port. It is in no port block (they begin at 1024), so neither a pod nor a
/// server can create a packet that passes for a probe.
pub const PORT: u16 = 1009;
/// The other address of a probe over IPv4, in place of a server's (TEST-NET-1, RFC 5737: no host has it).
pub const PEER_V4: [u8; 4] = [192, 0, 2, 254];
/// The same over IPv6 (RFC 3849).
pub const PEER_V6: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xfe];
/// Source MAC address of a probe that the agent sends into the tunnel device, where the program forwards it.
pub const SRC_MAC: [u8; 6] = [0x02, 0x53, 0x57, 0, 0, 3];

map_type! {
    /// The payload of the UDP packet.
    pub struct Probe {
        /// [`MAGIC`].
        pub magic: [u8; 4],
        /// [`VERSION`].
        pub version: u8,
        /// [`REQUEST`] or [`REPLY`].
        pub kind: u8,
        /// The transport that this probe takes ([`crate::transport`]); comes back unchanged.
        pub transport: u8,
        /// In a request: the reply transport that the prober asks for. In a reply: the transport that the reply takes.
        pub reply_transport: u8,
        /// The prober's number for the gateway, network byte order; comes back unchanged.
        pub node_id: [u8; 4],
        /// In a reply: [`state`] of the gateway. In a request: zero.
        pub state: u8,
        /// Zero.
        pub reserved: [u8; 3],
        /// Sequence number, network byte order; comes back unchanged.
        pub seq: [u8; 8],
        /// Tunnel address of the gateway, IPv4 in its mapped form.
        pub remote: [u8; 16],
        /// In a reply: the revision up to which the gateway's tables hold the prober's leases, network byte order. In a request: zero.
        pub leases: [u8; 8],
    } size 48
}

/// Bits of [`Probe::state`].
pub mod state {
    /// The gateway currently cannot carry egress IPs: its agent has been dead for longer than its
    /// deadline, its uplink is down, or it is being drained. It still forwards packets that it receives.
    pub const UNABLE: u8 = 1;
    /// The gateway holds its lease and is not late with a renewal: the gateway itself can reach the store.
    pub const HELD: u8 = 2;
}

map_type! {
    /// A reply, as the source node's program reports it to its agent (ring buffer `PROBES`).
    pub struct ProbeAnswer {
        /// The probe.
        pub probe: Probe,
        /// Index in `NODES` of the node that sent the reply.
        pub node: u32,
        /// 4 or 6: the family of the packet.
        pub family: u32,
    } size 56
}
