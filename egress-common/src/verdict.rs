//! Verdicts of the programs, and the reasons for dropping packets.

macro_rules! counters {
    ($($name:ident = $text:literal: $help:literal,)*) => {
        /// The events that the programs count. Names that begin with `drop_` count dropped packets.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum Counter { $( #[doc = $help] $name, )* }

        impl Counter {
            /// Every counter, in the order of its index in the map `COUNTERS`.
            pub const ALL: &'static [Counter] = &[$(Counter::$name),*];
            /// Returns the name that `egressctl stats` and the metrics show.
            pub const fn name(self) -> &'static str { match self { $(Counter::$name => $text),* } }
            /// Returns a description for users.
            pub const fn help(self) -> &'static str { match self { $(Counter::$name => $help),* } }
        }
    };
}

counters! {
    FlowsCreated = "flows_created": "new flows that were translated",
    FlowsExpired = "flows_expired": "flows that were idle for too long and were removed",
    FlowsEnded = "flows_ended": "flows that had ended and were removed",
    FlowsReclaimed = "flows_reclaimed": "ended flows that were removed early to make room for new ones",
    PortsTight = "ports_tight": "new flows that found a free port only after several taken ones",
    FlowsReplaced = "flows_replaced": "closed flows whose port was given to a new one before they expired",
    FlowsRepaired = "flows_repaired": "flows with a missing half that was rebuilt from the other half",
    FlowsRefused = "flows_refused": "flows that were removed because the host's firewall accepted none of their packets",
    FlowLogLost = "flow_log_lost": "beginnings and ends of flows that are missing from the flow log because they arrived faster than they could be written",
    FirewallAsked = "firewall_asked": "packets of pending flows that were passed to the host's firewall",
    FirewallPassed = "firewall_passed": "flows that the host's firewall accepted",
    TooLargeAnswered = "too_large_answered": "packets of pods that are too large for their transport, answered with the size that fits",
    Untouched = "flows_untouched": "connections that keep their path: opened from outside, older than the policy, or begun while there was no gateway",
    SentTunnel = "sent_tunnel": "packets sent to another node through the tunnel device",
    SentVxlan = "sent_vxlan": "packets sent to another node with an outer header that the program wrote",
    SentDirect = "sent_direct": "packets sent to another node without an outer header",
    SentLocal = "sent_local": "packets translated and sent out by this node itself",
    Forwarded = "gateway_forwarded": "packets of other nodes that this gateway sent out",
    Replied = "gateway_replied": "replies that this gateway sent to source nodes",
    Delivered = "delivered": "replies delivered to pods",
    FragmentHeld = "fragment_held": "fragments that arrived before the first fragment of their datagram and were held",
    FragmentReleased = "fragment_released": "held fragments that were released after the first fragment of their datagram",
    DatagramOrdered = "datagram_ordered": "datagrams whose fragments were put in order",
    NeighborAnswered = "neighbor_answered": "ARP and NDP requests answered for egress IPs",
    NextHopLearnt = "next_hop_learnt": "ARP and NDP answers of the gateways of egress IPs' own subnets",
    ProbeAnswered = "probe_answered": "probes answered",
    ProbeReturned = "probe_returned": "answers to this node's probes",
    DeviceMerged = "device_merged": "received packets left to the tunnel device because they are merged from several",
    DeviceOuter = "device_outer": "received packets left to the tunnel device because of their outer header: options, fragments, congestion, checksums",
    DeviceFragment = "device_fragment": "received fragments left to the tunnel device, like the larger ones of their datagrams",
    DeviceRefused = "device_refused": "packets sent through the tunnel device because the kernel refused to change their headers",
    DeviceEncapsulated = "device_encapsulated": "packets sent through the tunnel device because the pod had already encapsulated them",
    DeviceMtu = "device_mtu": "packets sent through the tunnel device because they are larger than the transport's MTU",
    DeviceRoute = "device_route": "packets sent through the tunnel device because no plain Ethernet route leads to the node",
    XdpSent = "xdp_sent": "packets of egress IPs that a gateway forwarded at the driver, by XDP",
    XdpUnusual = "xdp_left_unusual": "packets of egress IPs that XDP left to the TC programs: fragments, options, other protocols, or data in several pieces",
    XdpOwn = "xdp_left_own": "packets of egress IPs that XDP left to the TC programs because they may be for the node itself or for one of its pods",
    XdpRefused = "xdp_left_refused": "packets of egress IPs that XDP left to the TC programs because their port is not leased, or not to the node that they come from",
    XdpShaped = "xdp_left_shaped": "packets of egress IPs that XDP left to the TC programs because the bandwidth of their egress IP is limited",
    XdpVlan = "xdp_left_vlan": "packets of egress IPs that XDP left to the TC programs because their VLAN tag is missing or not that of their egress IP",
    XdpLarge = "xdp_left_large": "packets of egress IPs that XDP left to the TC programs because they are too large for the interface or the transport",
    XdpHop = "xdp_left_hop": "packets of egress IPs that XDP left to the TC programs because no next hop is known, or because the kernel must confirm it from time to time",
    XdpDevice = "xdp_left_device": "packets of egress IPs that XDP left to the TC programs because they take the tunnel device, or because the driver of their interface accepts no frames from XDP",
    DropHeld = "drop_held": "packets of unknown sources while a selected pod is starting",
    DropMalformed = "drop_malformed": "packets that cannot be parsed: of pods, for pods, or of an egress IP",
    DropProtocol = "drop_protocol": "packets that match a policy but have a protocol that cannot be translated",
    DropFragment = "drop_fragment": "fragments whose first fragment was not seen, and that could not be held",
    DropNoPolicy = "drop_no_policy": "packets of a policy that is being removed, or that the tables have no room for",
    DropNoGateway = "drop_no_gateway": "new flows without a usable gateway",
    DropNoPort = "drop_no_port": "new flows without a free port",
    DropTableFull = "drop_table_full": "new flows while the flow table is full",
    DropPodShare = "drop_pod_share": "new flows of pods that have used up their share of the flow table",
    DropPortShare = "drop_port_share": "new flows of pods that have used up their share of a node's ports to one destination",
    DropUnknownFlow = "drop_unknown_flow": "TCP segments of unknown connections",
    DropNotConfirmed = "drop_not_confirmed": "replies to, and ICMP errors about, flows that the host's firewall has not accepted",
    DropSevered = "drop_severed": "packets of flows whose egress IP was removed from their policy",
    DropVlanTag = "drop_vlan_tag": "frames of pods with a VLAN tag",
    DropTunnelPort = "drop_tunnel_port": "packets from pods, and from sockets of this host, to the UDP port of the nodes' tunnels",
    DropForged = "drop_forged": "packets from pods, and from sockets of this host, with an egress IP as their source",
    DropSpoofed = "drop_spoofed": "packets with the address of a pod that is behind another interface or on another node",
    DropUnguarded = "drop_unguarded": "packets of selected pods to destinations of their policies that reached an exit without a flow",
    DropService = "drop_service": "packets of selected pods that a Service, or other NAT of the host, has sent to a destination of their policies",
    DropNotAsked = "drop_not_asked": "first packets of flows that matched no flow at the exit, because NAT had changed them",
    DropNoOwner = "drop_no_owner": "packets of flows whose egress IP has no owner at the moment",
    DropNotOwner = "drop_not_owner": "packets that reached a gateway that does not carry their egress IP",
    DropNotLeased = "drop_not_leased": "packets whose source port is not leased to the node that sent them",
    DropStranger = "drop_stranger": "tunnelled packets from addresses that belong to no node",
    DropNoReverse = "drop_no_reverse": "replies without a flow",
    DropNoLease = "drop_no_lease": "packets for ports of an egress IP that are in no leased port block",
    DropNoUplink = "drop_no_uplink": "packets of egress IPs for which this node has no interface",
    DropBandwidth = "drop_bandwidth": "packets that exceed the bandwidth of their egress IP",
    DropNoNextHop = "drop_no_next_hop": "packets of an egress IP whose subnet's gateway has not answered yet",
    DropVlan = "drop_vlan": "untagged packets for an egress IP that is in a VLAN",
    DropTooLarge = "drop_too_large": "packets too large for the interface of their egress IP, or for the tunnel over an IPv6 underlay: nothing fragments them",
    DropRedirect = "drop_redirect": "packets that the kernel refused to send",
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::Counter;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_indices_dense() {
        let names: BTreeSet<_> = Counter::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), Counter::ALL.len());
        assert!(Counter::ALL.iter().enumerate().all(|(i, c)| *c as usize == i));
    }
}

/// A program's decision about a packet. Only the entry points translate it to the kernel's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Leave the packet to the next program and to the stack.
    Pass,
    /// Drop it and count why.
    Drop(Counter),
    /// A redirecting helper has taken the packet; the value is the helper's result.
    Taken(i32),
    /// Created by [`send`](Self::send), [`leave`](Self::leave) or [`probe`](Self::probe): the entry
    /// point carries it out, because the variables would not fit on the stack of a deeper function.
    Later(u64),
}

impl Verdict {
    /// Sends the packet to the node with that index in `NODES`, for one of [`purpose`]. The upper half of `entropy`
    /// distinguishes flows on the path.
    ///
    /// All bits are combined here. Later code is shared with other verdicts, for which the
    /// registers would hold something else, and the verifier refuses that.
    #[inline(always)]
    pub const fn send(purpose: u32, node: u32, entropy: u32) -> Self {
        Verdict::Later((bits::SEND + purpose as u64) << 32 | (entropy & 0xffff_0000 | node & 0xffff) as u64)
    }

    /// Sends the packet of the egress IP with that index in `EGRESS_IPS` to the outside.
    #[inline(always)]
    pub const fn leave(egress: u32) -> Self {
        Verdict::Later(bits::LEAVE << 32 | egress as u64)
    }

    /// Treats the packet as a probe from the node with that index in `NODES`.
    #[inline(always)]
    pub const fn probe(node: u32) -> Self {
        Verdict::Later(bits::PROBE << 32 | node as u64)
    }

    /// Returns the verdict in one register, the most that a function of a BPF program can return:
    /// its kind in the upper half, the counter or the helper's result in the lower half.
    #[inline(always)]
    pub const fn to_bits(self) -> u64 {
        match self {
            Verdict::Pass => bits::PASS << 32,
            Verdict::Drop(counter) => bits::DROP << 32 | counter as u64,
            Verdict::Taken(result) => bits::TAKEN << 32 | result as u32 as u64,
            Verdict::Later(bits) => bits,
        }
    }
}

/// The purpose for which a packet is sent to another node.
pub mod purpose {
    /// To a gateway, to be sent out, over the transport in force.
    pub const FORWARD: u32 = 0;
    /// A reply to a source node, over the transport that it asks for.
    pub const REPLY: u32 = 1;
    /// A probe over the tunnel device; the values for other transports follow ([`crate::transport`]).
    pub const PROBE: u32 = 2;
}

/// The upper halves of [`Verdict::to_bits`].
pub mod bits {
    /// [`Verdict::Pass`](super::Verdict::Pass).
    pub const PASS: u64 = 0;
    /// [`Verdict::Drop`](super::Verdict::Drop).
    pub const DROP: u64 = 1;
    /// [`Verdict::Taken`](super::Verdict::Taken).
    pub const TAKEN: u64 = 2;
    /// [`Verdict::probe`](super::Verdict::probe), with the node in the lower half.
    pub const PROBE: u64 = 3;
    /// [`Verdict::leave`](super::Verdict::leave), with the egress IP in the lower half.
    pub const LEAVE: u64 = 4;
    /// [`Verdict::send`](super::Verdict::send), plus the purpose; node and entropy in the lower half.
    pub const SEND: u64 = 5;
}
