//! What the datapath knows about egress IPs, their owners, their port blocks and the nodes.

use crate::{hash, layout::map_type, limits::MAX_EGRESS_HINTS, port_block};

map_type! {
    /// Value of `EGRESS_IPS`. The agent assigns the index, which is local to the node.
    pub struct EgressIp {
        /// The address, IPv4 in its mapped form.
        pub addr: [u32; 4],
        /// Changes whenever the index is given to another address.
        pub generation: u32,
        /// Index in `NODES` of the carrier that this node's packets go to; 0 for none.
        pub gateway: u32,
        /// [`flags`].
        pub flags: u32,
        /// Interface that this node sends on as a carrier; 0 where it is not one.
        pub ifindex: u32,
        /// Epoch of the owner, low half.
        pub epoch_low: u32,
        /// Epoch of the owner, high half.
        pub epoch_high: u32,
        /// How many bytes may wait in the shaper in each direction; 0: its bandwidth has no limit on this node.
        pub queue: u32,
        /// The next hop of its own subnet, IPv4 in its mapped form; zeroes: use the routing table.
        pub via: [u32; 4],
        /// The VLAN that its packets are in, 1 to 4094; 0: none. Only together with `via`.
        pub vlan: u32,
    } size 64
}

impl EgressIp {
    /// An entry that stands for no address.
    pub const EMPTY: Self = Self {
        addr: [0; 4],
        generation: 0,
        gateway: 0,
        flags: 0,
        ifindex: 0,
        epoch_low: 0,
        epoch_high: 0,
        queue: 0,
        via: [0; 4],
        vlan: 0,
    };
}

impl EgressIp {
    /// Returns whether this node carries the address and also owns it as a node address: packets to it may be for the node itself.
    #[inline(always)]
    pub const fn is_own_address(&self) -> bool {
        let own = flags::CARRIED | flags::NODE_ADDRESS;
        self.flags & own == own
    }
}

/// Returns the position in `EGRESS_HINTS` of the index of an egress IP whose address ends in `word`.
#[inline(always)]
pub const fn hint(word: u32) -> u32 {
    hash::scatter(word) >> (u32::BITS - MAX_EGRESS_HINTS.ilog2())
}

/// Bits of [`EgressIp::flags`].
pub mod flags {
    /// This node is a carrier: it forwards for the address, in both directions.
    pub const CARRIED: u32 = 1;
    /// The address is a node's own: packets outside leased blocks go to the node's stack, which also answers ARP.
    pub const NODE_ADDRESS: u32 = 2;
    /// Do not answer ARP and NDP for it.
    pub const SILENT: u32 = 4;
    /// The address has its own subnet: its packets go to `via`.
    pub const SUBNET: u32 = 8;
    /// An interface of this node has the address, whichever node carries it: the node's sockets use it.
    pub const HERE: u32 = 16;
    /// Packets that this node translates leave from this node itself. Only together with [`CARRIED`].
    pub const LOCAL: u32 = 32;
    /// Each flow goes to the carrier that `CARRIERS` names for it, instead of every flow going to `gateway`.
    pub const SPREAD: u32 = 64;
    /// The address is in `EGRESS_INDEX_*`. A retired address is not.
    pub const LISTED: u32 = 128;
}

map_type! {
    /// Value of `NEXT_HOPS`, by egress IP: the next hop of its subnet. Only the programs write it, from ARP and NDP packets.
    pub struct NextHop {
        /// Its MAC address, as words in memory order.
        pub mac: [u16; 3],
        /// 1 when it is known.
        pub known: u16,
        /// The [`EgressIp::generation`] that it applies to.
        pub generation: u32,
    } size 12
}

map_type! {
    /// Value of `METERS`, two for each egress IP: out, then in. The programs write it; the agent empties it for a new limit or shaper.
    pub struct Meter {
        /// Bytes that entered the shaper.
        pub sent: u64,
        /// Bytes that came out of it.
        pub passed: u64,
        /// When the last packet came out, `CLOCK_MONOTONIC` in ns.
        pub last: u64,
    } size 24
}

map_type! {
    /// Value of `BLOCKS`, by egress IP: the blocks that this node may take ports from.
    pub struct BlockList {
        /// How many of `blocks` are filled.
        pub count: u32,
        /// Block numbers.
        pub blocks: [u16; port_block::COUNT as usize],
    } size 2020
}

map_type! {
    /// Value of `LEASES`, by egress IP: the node that each block is leased to, as an index in `NODES`; 0 for none.
    pub struct LeaseTable {
        /// By [`port_block::row`].
        pub node: [u16; port_block::ROWS],
    } size 2048
}

/// Entries of `DEADLINE`, which holds times of `CLOCK_MONOTONIC` in ns.
pub mod deadline {
    /// The node can carry egress IPs until this time.
    pub const ABLE: u32 = 0;
    /// The node reports until this time that it holds its lease.
    pub const LEASE: u32 = 1;
}

/// Number of entries in use in a [`CarrierTable`]. It is odd, because LLVM takes factors of two out
/// of the product that computes an index, and the verifier cannot follow the resulting code.
pub const CARRIER_ENTRIES: usize = 251;
/// An entry of [`CarrierTable`] that stands for this node itself.
pub const LOCAL_CARRIER: u16 = u16::MAX;

map_type! {
    /// Value of `CARRIERS`, by egress IP: the carrier for each hash of a flow, as an index in `NODES` or [`LOCAL_CARRIER`].
    pub struct CarrierTable {
        /// The first [`CARRIER_ENTRIES`] are used.
        pub node: [u16; CARRIER_ENTRIES + 1],
    } size 504
}

map_type! {
    /// Value of `NODES`: a node, and how to send to it.
    pub struct NodeEntry {
        /// The node's tunnel address, IPv4 in its mapped form.
        pub addr: [u32; 4],
        /// 1 when the entry is filled.
        pub present: u32,
        /// Its address in the form that the tunnel key needs: IPv4 in *host* byte order, or 0 for IPv6.
        pub tunnel_v4: u32,
        /// The transport ([`crate::transport`]) of packets to this node as a gateway.
        pub forward: u32,
        /// The set of transports that can reach it, [`crate::transport::bit`] each.
        pub may: u32,
        /// Index of the counter for packets that take the device because nothing else is possible; 0 for none.
        pub why: u32,
        /// Interface of the underlay that leads to it.
        pub ifindex: u32,
        /// Largest IP packet that the transport to it takes.
        pub mtu: u32,
        /// Folded sum of the outer IPv4 header's words that never change.
        pub csum: u32,
        /// Address family of the next hop, as in the kernel's `struct bpf_redir_neigh`.
        pub hop_family: u32,
        /// Address of the next hop; IPv4 in the first word.
        pub hop: [u32; 4],
        /// This node's address as the outer source; IPv4 in its mapped form.
        pub source: [u32; 4],
        /// Its MAC address and that of our interface, for `direct`, as words in memory order.
        pub macs: [[u16; 3]; 2],
    } size 96
}

impl NodeEntry {
    /// An entry that stands for no node.
    pub const EMPTY: Self = Self {
        addr: [0; 4],
        present: 0,
        tunnel_v4: 0,
        forward: 0,
        may: 0,
        why: 0,
        ifindex: 0,
        mtu: 0,
        csum: 0,
        hop_family: 0,
        hop: [0; 4],
        source: [0; 4],
        macs: [[0; 3]; 2],
    };
}

map_type! {
    /// Key of `MAC_INDEX`: a MAC address as words in memory order, padded with zero.
    pub struct MacKey {
        /// The address.
        pub mac: [u16; 3],
        /// Zero.
        pub reserved: u16,
    } size 8
}

map_type! {
    /// Value of `UPLINKS`; the key is an interface index.
    pub struct Uplink {
        /// The interface's MAC address, for ARP and NDP answers, as words in memory order.
        pub mac: [u16; 3],
        /// Unused, zero.
        pub reserved: u16,
    } size 8
}

map_type! {
    /// Key and value of `VLANS`: one side of a VLAN device. Frames are tagged at the card and untagged at the device.
    pub struct VlanSide {
        /// Interface index: the card's, or the device's.
        pub ifindex: u32,
        /// The VLAN, 1 to 4094; 0: frames have no tag.
        pub vlan: u32,
    } size 8
}
