//! Every map. No other module knows their names and kinds. User space finds them by these names.

use aya_ebpf::{
    bindings::{BPF_F_NO_PREALLOC, bpf_timer},
    btf_maps::{Array, DevMapHash, HashMap, LpmTrie, LruHashMap, PerCpuArray, Queue, RingBuf},
    macros::btf_map,
};
use egress_common::{
    V4, V6,
    abi::{Name, NameKey},
    config::DatapathConfig,
    egress::{BlockList, CarrierTable, EgressIp, LeaseTable, MacKey, Meter, NextHop, NodeEntry, Uplink, VlanSide},
    endpoint::{AssignmentKey, Endpoint, MaglevChunk, Member, MemberKey, Policy, PolicyKey, RouteKey},
    event::FlowEvent,
    flow::{Ended, Flow, FlowKey, Fragment, FragmentKey, HeldKey, Inbound, Masqueraded, Reverse, Ticket},
    limits::*,
    probe::ProbeAnswer,
    traffic::{AccountKey, Traffic},
    verdict::Counter,
};

const GROW: usize = BPF_F_NO_PREALLOC as usize;

pub type Flows<A> = HashMap<FlowKey<A>, Flow, MAX_FLOWS, GROW>;
pub type Reverses<A> = HashMap<FlowKey<A>, Reverse<A>, MAX_FLOWS, GROW>;
pub type Inbounds<A> = LruHashMap<FlowKey<A>, Inbound, MAX_INBOUND>;
pub type MasqueradedFlows<A> = LruHashMap<FlowKey<A>, Masqueraded, MAX_MASQUERADED>;
pub type Endpoints<A> = HashMap<A, Endpoint, MAX_ENDPOINTS, GROW>;
pub type Routes<A> = LpmTrie<RouteKey<A>, u32, MAX_ROUTES>;
pub type Excepts<A> = LpmTrie<A, u32, MAX_EXCEPTS>;
pub type EgressIndex<A> = HashMap<A, u32, MAX_EGRESS_IPS, GROW>;
pub type Fragments<A> = LruHashMap<FragmentKey<A>, Fragment, MAX_FRAGMENTS>;
pub type HeldFragments<A> = LruHashMap<HeldKey<A>, HeldFrame, MAX_HELD_FRAGMENTS>;
pub type Holdings<A> = PerCpuArray<Holding<A>, 1>;
pub type Hops<A> = PerCpuArray<Hop<A>, MAX_HOPS>;
pub type Searches<A> = PerCpuArray<Search<A>, 1>;
pub type EndedFlows<A> = Queue<Ended<A>, MAX_FLOWS>;
pub type Shares = HashMap<u32, u64, MAX_ENDPOINTS, GROW>;
pub type Tickets<A> = Queue<Ticket<A>, { 2 * MAX_FLOWS }>;

#[btf_map]
pub static FLOWS_V4: Flows<V4> = HashMap::new();
#[btf_map]
pub static FLOWS_V6: Flows<V6> = HashMap::new();
#[btf_map]
pub static REVERSE_V4: Reverses<V4> = HashMap::new();
#[btf_map]
pub static REVERSE_V6: Reverses<V6> = HashMap::new();
#[btf_map]
pub static INBOUND_V4: Inbounds<V4> = LruHashMap::new();
#[btf_map]
pub static INBOUND_V6: Inbounds<V6> = LruHashMap::new();
#[btf_map]
pub static MASQUERADED_V4: MasqueradedFlows<V4> = LruHashMap::new();
#[btf_map]
pub static MASQUERADED_V6: MasqueradedFlows<V6> = LruHashMap::new();
#[btf_map]
pub static TICKETS_V4: Tickets<V4> = Queue::new();
#[btf_map]
pub static TICKETS_V6: Tickets<V6> = Queue::new();
/// Flows that have ended, the oldest end first.
#[btf_map]
pub static ENDED_V4: EndedFlows<V4> = Queue::new();
#[btf_map]
pub static ENDED_V6: EndedFlows<V6> = Queue::new();
#[btf_map]
pub static FRAGMENTS_V4: Fragments<V4> = LruHashMap::new();
#[btf_map]
pub static FRAGMENTS_V6: Fragments<V6> = LruHashMap::new();

/// The route of packets from one source to one destination, cached from the routing table. Each CPU has its
/// own, so that no other CPU writes it meanwhile.
///
/// A route lookup for each packet was the largest part of a packet's cost at a gateway (docs/performance.md).
/// A change of routes takes effect within a fifteenth of a second, with or without the agent.
#[repr(C)]
pub struct Hop<A> {
    /// Source and destination.
    pub src: A,
    pub dst: A,
    /// The remaining input of the route lookup (`exit::RouteQuery::from`).
    pub from: u32,
    /// The moment of the lookup.
    pub moment: u32,
    /// The interface that leads to the next hop; or `exit::ONCE` or `exit::NONE`.
    pub ifindex: u32,
    /// `struct bpf_redir_neigh`: family and address.
    pub neigh: [u32; 5],
    /// MAC addresses of the next hop and of the interface, as words in memory order; zero if the kernel does not know them.
    pub macs: [u32; 3],
    /// Largest IP packet that the interface takes.
    pub mtu: u32,
}

/// A search for a port, in a per-CPU map: loops in BPF keep their state best in memory that the verifier does not track.
#[repr(C)]
pub struct Search<F> {
    /// The reply's 5-tuple. Its source is the egress IP and port that are tried.
    pub key: FlowKey<F>,
    /// The forward half's key of the flow that already has that port.
    pub holder: FlowKey<F>,
    /// The reverse half to be entered; `policy` and `pod` are given, the slot is filled in.
    pub value: Reverse<F>,
    /// The policy.
    pub policy: Policy,
    /// Number of the endpoint.
    pub endpoint: u32,
    /// Number of its namespace.
    pub namespace: u32,
    /// Generation of the tables that the flow was classified by.
    pub generation: u32,
    /// The flow's hash, at which both walks begin.
    pub hash: u32,
    /// How many blocks the egress IP has here.
    pub blocks: u32,
    /// Whether the search is in progress, or how it ended (`ports`).
    pub outcome: u32,
    /// How many of the examined ports are this pod's.
    pub own: u32,
}

/// A frame as it was received.
#[repr(C)]
pub struct HeldFrame {
    /// Tick of its arrival.
    pub since: u32,
    /// How many of the bytes are in use.
    pub len: u32,
    pub bytes: [u8; HELD_FRAME],
}

/// The fragment that is held or released on this CPU: too large for the stack.
#[repr(C)]
pub struct Holding<A> {
    pub key: HeldKey<A>,
    pub frame: HeldFrame,
}

#[btf_map]
pub static HELD_V4: HeldFragments<V4> = LruHashMap::new();
#[btf_map]
pub static HELD_V6: HeldFragments<V6> = LruHashMap::new();
#[btf_map]
pub static HOLDING_V4: Holdings<V4> = PerCpuArray::new();
#[btf_map]
pub static HOLDING_V6: Holdings<V6> = PerCpuArray::new();

/// How many flows each endpoint has.
#[btf_map]
pub static SHARES_V4: Shares = HashMap::new();
#[btf_map]
pub static SHARES_V6: Shares = HashMap::new();

#[btf_map]
pub static ENDPOINTS_V4: Endpoints<V4> = HashMap::new();
#[btf_map]
pub static ENDPOINTS_V6: Endpoints<V6> = HashMap::new();
#[btf_map]
pub static ROUTES_V4: Routes<V4> = LpmTrie::new();
#[btf_map]
pub static ROUTES_V6: Routes<V6> = LpmTrie::new();
#[btf_map]
pub static EXCEPTS_V4: Excepts<V4> = LpmTrie::new();
#[btf_map]
pub static EXCEPTS_V6: Excepts<V6> = LpmTrie::new();
#[btf_map]
pub static POLICIES: HashMap<PolicyKey, Policy, MAX_POLICIES, GROW> = HashMap::new();
#[btf_map]
pub static MEMBERS: HashMap<MemberKey, Member, MAX_MEMBERS, GROW> = HashMap::new();
#[btf_map]
pub static ASSIGNMENTS: HashMap<AssignmentKey, u32, MAX_ASSIGNMENTS, GROW> = HashMap::new();
#[btf_map]
pub static MAGLEV: Array<MaglevChunk, MAX_MAGLEV_CHUNKS> = Array::new();

#[btf_map]
pub static EGRESS_INDEX_V4: EgressIndex<V4> = HashMap::new();
#[btf_map]
pub static EGRESS_INDEX_V6: EgressIndex<V6> = HashMap::new();
/// By a hash of the address: the index found last. Only the programs write it, and they compare the entry's address.
#[btf_map]
pub static EGRESS_HINTS: Array<u32, MAX_EGRESS_HINTS> = Array::new();
#[btf_map]
pub static EGRESS_IPS: Array<EgressIp, MAX_EGRESS_IPS> = Array::new();
#[btf_map]
pub static BLOCKS: Array<BlockList, MAX_EGRESS_IPS> = Array::new();
/// For each egress IP whose flows are spread over several carriers: the carrier of each flow.
#[btf_map]
pub static CARRIERS: Array<CarrierTable, MAX_EGRESS_IPS> = Array::new();
#[btf_map]
pub static LEASES: Array<LeaseTable, MAX_EGRESS_IPS> = Array::new();
#[btf_map]
pub static NODES: Array<NodeEntry, MAX_NODES> = Array::new();
#[btf_map]
pub static NODE_INDEX: HashMap<V6, u32, MAX_NODE_ADDRESSES, GROW> = HashMap::new();
/// Node by the MAC address from which it sends on a link that it shares with this node.
#[btf_map]
pub static MAC_INDEX: HashMap<MacKey, u32, MAX_MACS, GROW> = HashMap::new();
/// By node: its reply transport, as its last probe requested.
#[btf_map]
pub static REPLY_TRANSPORT: Array<u32, MAX_NODES> = Array::new();
/// By node: the revision up to which [`LEASES`] has its leases. Answers to its probes report it.
#[btf_map]
pub static KNOWN_LEASES: Array<u64, MAX_NODES> = Array::new();
/// Answers to this node's probes, for the agent.
#[btf_map]
pub static PROBES: RingBuf<ProbeAnswer, PROBE_BUFFER> = RingBuf::new();
/// Beginnings and ends of flows, for the flow log. The agent chooses its size.
#[btf_map]
pub static FLOW_EVENTS: RingBuf<FlowEvent<V6>, FLOW_EVENTS_UNUSED> = RingBuf::new();
#[btf_map]
pub static UPLINKS: HashMap<u32, Uplink, MAX_UPLINKS, GROW> = HashMap::new();

#[btf_map]
pub static NEXT_HOPS: Array<NextHop, MAX_EGRESS_IPS> = Array::new();
/// Next hops of packets that leave, as this CPU found them a moment ago (see `exit`).
#[btf_map]
pub static HOPS_V4: Hops<V4> = PerCpuArray::new();
#[btf_map]
pub static HOPS_V6: Hops<V6> = PerCpuArray::new();
/// The moment in which this CPU last left a packet for a next hop to the kernel (see `exit`).
#[btf_map]
pub static CONFIRMED: PerCpuArray<u32, 1> = PerCpuArray::new();
/// The interface on which a CPU received its last frame, and its MAC address as of a moment ago (see `native`): saves a lookup.
#[repr(C)]
pub struct Here {
    pub ifindex: u32,
    pub moment: u32,
    pub mac: [u16; 3],
    pub reserved: u16,
}

#[btf_map]
pub static HERE: PerCpuArray<Here, 1> = PerCpuArray::new();
/// The interfaces, by index, on which frames may be sent before there is a socket buffer: their drivers support that.
#[btf_map]
pub static DEVICES: DevMapHash<MAX_DEVICES> = DevMapHash::new();
/// From either side of a VLAN device to the other: from the card, where a frame arrives, and from the device, to which it is sent.
#[btf_map]
pub static VLANS: HashMap<VlanSide, VlanSide, MAX_VLAN_SIDES, GROW> = HashMap::new();
#[btf_map]
pub static METERS: Array<Meter, { 2 * MAX_EGRESS_IPS }> = Array::new();

#[btf_map]
pub static CONFIG: Array<DatapathConfig, 1> = Array::new();
/// By [`egress_common::egress::deadline`]: until when this node can carry egress IPs, that is, answer ARP
/// and NDP when it is its turn, and until when it holds its lease. Its answers to probes report both.
#[btf_map]
pub static DEADLINE: Array<u64, 2> = Array::new();
#[btf_map]
pub static COUNTERS: PerCpuArray<u64, { Counter::ALL.len() }> = PerCpuArray::new();
/// By policy, namespace and egress IP: the account of their packets.
#[btf_map]
pub static ACCOUNTS: HashMap<AccountKey, u32, MAX_ACCOUNTS, GROW> = HashMap::new();
#[btf_map]
pub static TRAFFIC: PerCpuArray<Traffic, MAX_ACCOUNTS> = PerCpuArray::new();
/// Names of policies, nodes and endpoints, for tools that run while the agent does not. No program reads it.
#[btf_map]
pub static NAMES: HashMap<NameKey, Name, MAX_NAMES, GROW> = HashMap::new();

/// A search for a port in progress on this CPU (see `ports`): too large for the stack.
#[btf_map]
pub static SEARCH_V4: PerCpuArray<Search<V4>, 1> = PerCpuArray::new();
#[btf_map]
pub static SEARCH_V6: PerCpuArray<Search<V6>, 1> = PerCpuArray::new();

/// The collector's timer.
#[repr(C)]
pub struct Collector {
    pub timer: bpf_timer,
    /// Runs since the timer was armed.
    pub runs: u64,
}

#[btf_map]
pub static COLLECTOR: Array<Collector, 1> = Array::new();
