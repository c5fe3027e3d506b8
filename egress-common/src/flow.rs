//! The flow table: one entry for each direction of a flow, in a separate map for each direction.

use crate::{
    hash::{Words, checksum, multilinear},
    layout::map_type,
};

map_type! {
    /// A 5-tuple. In `FLOWS_*` the source is the pod; in `REVERSE_*` it is the egress IP with the translated port.
    /// The remote side is the destination in both, so the two halves of a pair share `dst`, `dst_port` and `proto`.
    pub struct FlowKey<A> {
        /// Source address.
        pub src: A,
        /// Destination address.
        pub dst: A,
        /// Source port, or the identifier of an ICMP query.
        pub src_port: u16,
        /// Destination port; 0 for ICMP.
        pub dst_port: u16,
        /// IP protocol number, host byte order.
        pub proto: u32,
    } sizes 16, 40
}

impl<A: Words> FlowKey<A> {
    /// Returns the key's part of a [`checksum`].
    #[inline(always)]
    fn sum(&self) -> u64 {
        let ports = self.src_port as u32 | (self.dst_port as u32) << 16;
        self.src.multilinear(1).wrapping_add(self.dst.multilinear(5)).wrapping_add(multilinear([ports, self.proto], 9))
    }
}

/// Values of [`Flow::kind`].
pub mod kind {
    /// Translated: the flow was opened by the pod.
    pub const TRANSLATED: u8 = 1;
    /// A TCP connection whose egress IP no longer belongs to its policy: its packets are dropped until it is gone.
    pub const SEVERED: u8 = 2;
}

/// Values of [`Flow::pending`] of a flow that waits.
pub mod pending {
    /// The firewall has let no packet of the flow pass.
    pub const NEW: u8 = 1;
    /// It has let packets pass before the pod opened the connection again.
    pub const AGAIN: u8 = 2;
}

/// Values of [`Flow::queued`] while a record of the flow is in `ENDED_*`.
pub mod queued {
    /// The flow has ended.
    pub const QUEUED: u8 = 1;
    /// It is a question over UDP that had no answer when it was queued.
    pub const UNANSWERED: u8 = 2;
}

map_type! {
    /// Value of `FLOWS_*`: the record for outgoing packets.
    pub struct Flow {
        /// [`Flow::checksum`].
        pub check: u32,
        /// Index of the policy.
        pub policy: u16,
        /// Index in `TRAFFIC` of the counters for its packets.
        pub account: u16,
        /// Index of the egress IP in `EGRESS_IPS`: with the policy it names the slot.
        pub egress: u32,
        /// Generation of that index when the flow was made: an index that was given to another address does not match.
        pub egress_generation: u32,
        /// [`crate::config::DatapathConfig::generation`] under which the classification was last checked.
        pub config_generation: u32,
        /// [`crate::endpoint::Endpoint::id`] of the pod: a pod that inherits its address does not inherit its flows.
        pub endpoint: u32,
        /// Distinguishes this flow from an earlier one of the same key in the collector's queue.
        pub ticket: u32,
        /// Tick of the last outgoing packet.
        pub last_seen: u32,
        /// Tick of its creation.
        pub created: u32,
        /// The last acknowledgment number of the pod, network byte order.
        pub ack: u32,
        /// End of the remote side's data, set by its FIN or RST: the acknowledgment number that would accept it; host byte order.
        pub end: u32,
        /// Interface on which its packets arrive.
        pub ifindex: u32,
        /// Translated source port, or ICMP identifier.
        pub port: u16,
        /// TCP flags seen from the pod, [`crate::tcp::seen`]; of UDP, [`crate::udp`].
        pub state: u16,
        /// How the remote side has ended the connection, [`crate::tcp::end`].
        pub back: u8,
        /// What is known while a record of the flow is in `ENDED_*`, [`queued`]; else 0.
        pub queued: u8,
        /// [`kind`].
        pub kind: u8,
        /// Whether the flow waits until the host's firewall lets one of its packets pass, [`pending`]; else 0.
        pub pending: u8,
    } size 56
}

impl Flow {
    /// Returns the [`checksum`] of a flow's key and of the fixed part of its value.
    #[inline(always)]
    pub fn checksum<A: Words>(key: &FlowKey<A>, egress: u32, port: u16, ifindex: u32) -> u32 {
        checksum(key.sum(), multilinear([egress, port as u32, ifindex], 11))
    }

    /// Sets its checksum.
    #[inline(always)]
    pub fn seal<A: Words>(&mut self, key: &FlowKey<A>) {
        self.check = Self::checksum(key, self.egress, self.port, self.ifindex);
    }

    /// An empty entry.
    pub const EMPTY: Flow = Flow {
        check: 0,
        policy: 0,
        account: 0,
        egress: 0,
        egress_generation: 0,
        config_generation: 0,
        endpoint: 0,
        ticket: 0,
        last_seen: 0,
        created: 0,
        ack: 0,
        end: 0,
        ifindex: 0,
        port: 0,
        state: 0,
        back: 0,
        queued: 0,
        kind: kind::TRANSLATED,
        pending: 0,
    };
}

map_type! {
    /// Value of `REVERSE_*`: the record for replies.
    pub struct Reverse<A> {
        /// [`Reverse::checksum`].
        pub check: u32,
        /// The pod's address.
        pub pod: A,
        /// The pod's port, or ICMP identifier.
        pub pod_port: u16,
        /// SYN and ACK of TCP as seen from the remote side, and whether the flow is confirmed, [`crate::tcp::seen`]; of UDP,
        /// [`crate::udp`].
        pub state: u16,
        /// Interface on which the flow's first packet arrived.
        pub ifindex: u32,
        /// Index of the policy.
        pub policy: u16,
        /// [`Flow::account`].
        pub account: u16,
        /// Index of the egress IP.
        pub egress: u32,
        /// Generation of that index.
        pub egress_generation: u32,
        /// [`crate::endpoint::Endpoint::id`] of the pod.
        pub endpoint: u32,
        /// Tick of the last reply.
        pub last_seen: u32,
        /// Source MAC address of the flow's first packet, as words in memory order.
        pub pod_mac: [u16; 3],
        /// Destination MAC address of the flow's first packet, as words in memory order.
        pub host_mac: [u16; 3],
    } sizes 48, 60
}

/// The destination of replies: the fixed part of a [`Reverse`].
#[derive(Clone, Copy)]
pub struct Target<A> {
    /// [`Reverse::pod`].
    pub pod: A,
    /// [`Reverse::pod_port`].
    pub port: u16,
    /// [`Reverse::ifindex`].
    pub ifindex: u32,
    /// [`Reverse::pod_mac`] and [`Reverse::host_mac`].
    pub macs: [[u16; 3]; 2],
}

impl<A: Words> Reverse<A> {
    /// Returns the [`checksum`] of a reply's 5-tuple and its destination.
    #[inline(always)]
    pub fn checksum(key: &FlowKey<A>, to: &Target<A>) -> u32 {
        let [[a, b, c], [d, e, f]] = to.macs;
        let two = |low: u16, high: u16| low as u32 | (high as u32) << 16;
        let rest = multilinear([to.port as u32, to.ifindex, two(a, b), two(c, d), two(e, f)], 15);
        checksum(key.sum(), to.pod.multilinear(11).wrapping_add(rest))
    }

    /// Sets its checksum.
    #[inline(always)]
    pub fn seal(&mut self, key: &FlowKey<A>) {
        let macs = [self.pod_mac, self.host_mac];
        let to = Target { pod: self.pod, port: self.pod_port, ifindex: self.ifindex, macs };
        self.check = Self::checksum(key, &to);
    }
}

/// Returns whether two halves refer to each other. Either may outlive the other, and another flow may have taken its place.
#[inline(always)]
pub fn is_pair<A: PartialEq>(key: &FlowKey<A>, flow: &Flow, reverse: &FlowKey<A>, value: &Reverse<A>) -> bool {
    (flow.port, flow.egress, flow.egress_generation) == (reverse.src_port, value.egress, value.egress_generation)
        && (value.pod_port, flow.endpoint) == (key.src_port, value.endpoint)
        && value.pod == key.src
}

map_type! {
    /// Value of `INBOUND_*`, by the 5-tuple of the pod's packets: a connection that the outside opened, that existed before the
    /// pod was selected, or that began while its policy had no gateway (`onNoGateway: NodeIP`). Its packets are left alone.
    pub struct Inbound {
        /// Tick of the last packet that was looked at.
        pub last_seen: u32,
        /// Tick of its creation.
        pub created: u32,
        /// [`crate::config::DatapathConfig::generation`] under which the pod was last looked up.
        pub generation: u32,
        /// [`crate::endpoint::Endpoint::id`] of the pod: a pod that inherits its address inherits nothing else.
        pub endpoint: u32,
        /// The pod's interface.
        pub ifindex: u32,
        /// TCP flags seen from the pod, [`crate::tcp::seen`].
        pub state: u16,
        /// 1 if the pod opened the connection itself, which `existingConnections: Drop` cuts; 0 if the outside did.
        pub own: u16,
    } size 24
}

map_type! {
    /// Value of `MASQUERADED_*`, by the 5-tuple after translation: a connection that this node
    /// itself masquerades with one of its own addresses that is also an egress IP.
    pub struct Masqueraded {
        /// Tick of the last packet that left.
        pub last_seen: u32,
        /// The sequence number of a TCP connection's SYN, host byte order.
        pub opened: u32,
        /// 1 once the server has answered that SYN, else 0.
        pub answered: u32,
    } size 12
}

map_type! {
    /// An entry of the collector's queue.
    pub struct Ticket<A> {
        /// The flow.
        pub key: FlowKey<A>,
        /// Its [`Flow::ticket`].
        pub ticket: u32,
        /// Round of the collector ([`COLLECT_ROUND_SHIFT`](crate::limits::COLLECT_ROUND_SHIFT)) that last looked at it.
        pub checked: u32,
    } sizes 24, 48
}

map_type! {
    /// An entry of `ENDED_*`, where ended flows wait in the order in which they ended.
    pub struct Ended<A> {
        /// The flow.
        pub key: FlowKey<A>,
        /// Its [`Flow::ticket`].
        pub ticket: u32,
        /// Tick in which it may be removed.
        pub due: u32,
    } sizes 24, 48
}

map_type! {
    /// Key of `FRAGMENTS_*`: one fragmented datagram (RFC 791, RFC 8200 section 4.5).
    pub struct FragmentKey<A> {
        /// Source address.
        pub src: A,
        /// Destination address.
        pub dst: A,
        /// Identification, network byte order (16 bits for IPv4).
        pub id: u32,
        /// IP protocol number.
        pub proto: u32,
    } sizes 16, 40
}

map_type! {
    /// Key of `HELD_*`: a fragment that waits for the first one of its datagram.
    pub struct HeldKey<A> {
        /// Its datagram.
        pub datagram: FragmentKey<A>,
        /// How many fragments of the same datagram were already waiting.
        pub place: u32,
    } sizes 20, 44
}

map_type! {
    /// Value of `FRAGMENTS_*`: the fields that only the first fragment contains.
    pub struct Fragment {
        /// Source port, or identifier of an ICMP query.
        pub src_port: u16,
        /// Destination port; of ICMP 0 for a query, 1 for an answer.
        pub dst_port: u16,
    } size 4
}
