//! The probe that a source node sends through the tunnel and a gateway's program sends back.

use crate::layout::map_type;

/// The first four bytes of a probe.
pub const MAGIC: [u8; 4] = *b"SPWY";
/// The version of the format.
pub const VERSION: u8 = 1;
/// [`Probe::kind`] on the way to the gateway.
pub const REQUEST: u8 = 1;
/// [`Probe::kind`] on the way back.
pub const REPLY: u8 = 2;

map_type! {
    /// Payload of an Ethernet frame of type [`crate::abi::PROBE_ETHERTYPE`].
    pub struct Probe {
        /// [`MAGIC`].
        pub magic: [u8; 4],
        /// [`VERSION`].
        pub version: u8,
        /// [`REQUEST`] or [`REPLY`].
        pub kind: u8,
        /// Zero.
        pub reserved: [u8; 2],
        /// The prober's number for the gateway, network byte order; comes back unchanged.
        pub node_id: [u8; 4],
        /// Zero.
        pub reserved2: [u8; 4],
        /// Sequence number, network byte order; comes back unchanged.
        pub seq: [u8; 8],
        /// Tunnel address of the gateway, IPv4 in its mapped form.
        pub remote: [u8; 16],
    } size 40
}
