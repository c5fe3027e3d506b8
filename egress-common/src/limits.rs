//! Every limit of the datapath, by name.

/// Flows per node and address family; the agent's setting `maxFlows` overrides it when the maps are made.
pub const MAX_FLOWS: usize = 131_072;
/// Records of connections that the outside opened, per node and address family (least recently used evicted).
pub const MAX_INBOUND: usize = 131_072;
/// Connections that a gateway itself masquerades with its own address that is also an egress IP,
/// per address family. A new connection evicts the least recently used one.
pub const MAX_MASQUERADED: usize = 16_384;
/// Endpoints per node and address family (kubelet's own default limit is 110 pods).
pub const MAX_ENDPOINTS: usize = 4_096;
/// (class, prefix) entries per address family.
pub const MAX_ROUTES: usize = 262_144;
/// Excepted prefixes per address family (nodes, pods, services, `exceptCIDRs`).
pub const MAX_EXCEPTS: usize = 65_536;
/// Policies in force on one node, counted once for each address family. Index 0 is never used.
pub const MAX_POLICIES: usize = 4_096;
/// Classes on one node: distinct sets of policies that select pods there. Class 0 is for pods that
/// no policy selects. A note in a packet has no room for a higher number.
pub const MAX_CLASSES: usize = 4_096;
/// Egress IPs that one node knows. Index 0 is never used.
pub const MAX_EGRESS_IPS: usize = 2_048;
/// Entries in which the programs cache indices of egress IPs (a power of two). Addresses that share
/// an entry evict each other, which costs only time.
pub const MAX_EGRESS_HINTS: usize = 4 * MAX_EGRESS_IPS;
/// (policy, egress IP) pairs that one node knows.
pub const MAX_MEMBERS: usize = 65_536;
/// (endpoint, policy) assignments of `PerEndpoint` policies on one node.
pub const MAX_ASSIGNMENTS: usize = 65_536;
/// Traffic accounts on one node: one for each policy, namespace and egress IP, and one more for
/// each policy and namespace. Traffic without an account is counted together.
pub const MAX_ACCOUNTS: usize = 2_048;
/// Nodes of the cluster. Index 0 is never used.
pub const MAX_NODES: usize = 16_384;
/// Tunnel addresses of all nodes together: one of each family for every node.
pub const MAX_NODE_ADDRESSES: usize = 2 * MAX_NODES;
/// MAC addresses of all nodes together.
pub const MAX_MACS: usize = 2 * MAX_NODES;
/// Bytes of the ring buffer in which answers to probes wait for the agent.
pub const PROBE_BUFFER: usize = 65_536;
/// Bytes of the ring buffer for flow events where flows are not logged: at least a page.
pub const FLOW_EVENTS_UNUSED: usize = 65_536;
/// Bytes of that buffer where flows are logged: 150,000 events over IPv4, 100,000 over IPv6.
pub const FLOW_EVENTS: u32 = 8 << 20;
/// Interfaces of a node that answer for egress IPs.
pub const MAX_UPLINKS: usize = 1_024;
/// Pairs of an egress IP and a destination whose next hop is cached briefly, per CPU and address
/// family (a power of two). The next hops of other pairs are looked up for each packet.
pub const MAX_HOPS: usize = 1_024;
/// Interfaces on which a gateway sends from XDP, before there is a socket buffer.
pub const MAX_DEVICES: usize = 256;
/// Sides of VLAN devices: the device itself, its card, and each port of that card.
pub const MAX_VLAN_SIDES: usize = 1_024;
/// Entries of all Maglev tables together, in chunks of [`MAGLEV_CHUNK`].
pub const MAX_MAGLEV_CHUNKS: usize = 32_768;
/// Maglev entries in one element of the map.
pub const MAGLEV_CHUNK: usize = 128;
/// Fragmented datagrams in flight at the same time, per address family.
pub const MAX_FRAGMENTS: usize = 8_192;
/// Fragments that wait for the first fragment of their datagram, per address family.
pub const MAX_HELD_FRAGMENTS: usize = 512;
/// Fragments of one datagram that may wait.
pub const HELD_PER_DATAGRAM: u32 = 8;
/// Longest frame that is held (a power of two).
pub const HELD_FRAME: usize = 2_048;
/// Ticks after which a fragment has waited too long.
pub const HELD_TICKS: u32 = 2;
/// Names kept for the tools.
pub const MAX_NAMES: usize = 32_768;

/// Ports tried for a new flow in one egress IP before the next slot is tried.
pub const PORT_PROBES: u32 = 256;
/// After this many failed attempts at a port, the agent learns that ports towards some destination
/// are getting scarce. With 30 % of the ports in use, this happens to one new flow in a hundred.
pub const TIGHT_PROBES: u32 = 4;
/// Largest sample of ports to estimate a pod's share of the ports towards a destination. A smaller sample would by chance refuse
/// flows of a pod that has little more than half of them: 32 would refuse one in fifty, while the pod waits for more blocks.
pub const SHARE_PROBES: u32 = 128;
/// A pod that has this many of the sampled ports gets no more: about the last quarter is for other pods.
pub const SHARE_LIMIT: u32 = 96;
/// Slots tried for a new flow before it is dropped.
pub const SLOT_PROBES: u32 = 4;
/// A flow whose packets the host's firewall drops is kept for at least this many ticks, plus the collector's round.
pub const PENDING_TICKS: u32 = 10;
/// Ticks for which an ended flow is kept for retransmissions, unless its place is needed. A flow ends when its
/// connection is closed or reset, or after a UDP exchange of one question with a well-known port ([`WELL_KNOWN_PORTS`]).
pub const ENDED_TICKS: u32 = 4;
/// RFC 4787, REQ-5a: shorter times are allowed for destination ports below this.
pub const WELL_KNOWN_PORTS: u16 = 1_024;
/// Ended flows examined to make room for a new one.
pub const RECLAIM_LOOKS: u32 = 256;
/// Ended flows removed in one batch, because other CPUs search for room concurrently.
pub const RECLAIM_BATCH: u64 = 8;
/// Flows that one run of the collector looks at, per address family.
pub const COLLECT_BATCH: u32 = 1_024;
/// Length of a collector's round in ticks, as a power of two: it looks at a flow at most once a
/// round. Each look reads two records that are in no cache, and idle times are minutes.
pub const COLLECT_ROUND_SHIFT: u32 = 3;
/// Tickets examined with each new flow. In a full table, flows end as fast as they begin, and each leaves its ticket behind.
pub const COLLECT_ALONG: u32 = 2;
/// Time between two runs of the collector.
pub const COLLECT_INTERVAL_NS: u64 = 25_000_000;
/// Decisions about one packet that a trace reports.
pub const TRACE_STEPS: usize = 12;
/// Packets that a trace reports per fifteenth of a second and CPU. Further packets are only counted.
pub const TRACE_PACKETS: u32 = 20;
/// IPv6 extension headers that are walked before a packet counts as malformed.
pub const MAX_EXTENSION_HEADERS: u32 = 6;

/// RFC 5382, REQ-5: an established connection is kept for no less than 2 h 4 min.
pub const TCP_ESTABLISHED_SECS: u64 = 7_440;
/// RFC 5382, REQ-5: a connection that is opening or closing is kept for no less than 4 min.
pub const TCP_TRANSITORY_SECS: u64 = 240;
/// RFC 4787, REQ-5: no less than 2 min, 5 min recommended.
pub const UDP_SECS: u64 = 300;
/// RFC 5508, REQ-2: no less than 60 s.
pub const ICMP_SECS: u64 = 60;

/// The fewest bytes that may wait in the shaper: four packets of 64 KiB.
pub const MIN_SHAPER_QUEUE: u32 = 256 << 10;
/// The most bytes that may wait in the shaper for one egress IP and direction.
pub const MAX_SHAPER_QUEUE: u32 = 64 << 20;
