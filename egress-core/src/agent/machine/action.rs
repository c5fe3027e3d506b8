//! The inputs and outputs of the machine.

use crate::{
    agent::{
        facts::LeftInUse,
        gateways::Request,
        kept,
        ports::{Growth, Ports},
    },
    encode::{EndpointView, NodeView, name_text, tables::Tables},
    health::ProbeTimes,
    model::{Bandwidth, EndpointId, NodeName, Transport},
    network::{EgressLink, classify::InterfaceRules},
};
use egress_common::{
    abi::{NameKey, name_kind},
    config::DatapathConfig,
    egress::{CARRIER_ENTRIES, flags},
    net,
};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

/// The settings that an agent's decisions depend on.
#[derive(Clone, Debug)]
pub struct MachineSettings {
    /// The rules that classify interfaces, without the node's addresses.
    pub rules: InterfaceRules,
    /// The times of gateway probes.
    pub probe: ProbeTimes,
    /// How long a gateway's lease lasts.
    pub lease_duration: Duration,
    /// How long the programs trust a heartbeat.
    pub deadline: Duration,
    /// How long unknown sources are held for a selected pod without an address.
    pub start_limit: Duration,
    /// The transports to other nodes.
    pub transport: Transport,
    /// The largest packet that the tunnel's device takes.
    pub tunnel_mtu: u32,
    /// The configuration record for the programs, except the parts that depend on links.
    pub config: DatapathConfig,
    /// The programs' clock when the agent started.
    pub clock: Duration,
}

/// The state that an earlier agent has left in the maps.
#[derive(Default)]
pub struct Left {
    /// The egress IPs that the kernel forwards for, and whether it answers for each.
    pub carried: BTreeMap<IpAddr, bool>,
    /// By egress IP: the blocks that flows may use, and the carriers that they go to.
    pub used: BTreeMap<IpAddr, LeftInUse>,
    /// Pods.
    pub endpoints: BTreeMap<EndpointId, EndpointView>,
    /// The flags in the configuration record.
    pub flags: u32,
}

impl From<&Tables> for Left {
    fn from(tables: &Tables) -> Self {
        let carried = tables.egress_ips.values().filter(|e| e.flags & flags::CARRIED != 0);
        let answers = |flags: u32| flags & (flags::SILENT | flags::NODE_ADDRESS) == 0;
        let node = |id: u32| {
            let name = tables.names.get(&NameKey { kind: name_kind::NODE, id })?;
            Some(NodeName::from(name_text(name).as_str()))
        };
        let used = tables.blocks.iter().filter_map(|(index, list)| {
            let e = tables.egress_ips.get(index)?;
            let spread = tables.carriers.get(index).into_iter().flat_map(|table| &table.node[..CARRIER_ENTRIES]);
            let numbers: BTreeSet<u32> = spread.copied().map(u32::from).chain([e.gateway]).collect();
            let blocks = list.blocks.iter().take(list.count as usize).copied().collect();
            let carriers = numbers.into_iter().filter_map(node).collect();
            Some((net::from_any(e.addr), LeftInUse { carriers, blocks }))
        });
        Self {
            carried: carried.map(|e| (net::from_any(e.addr), answers(e.flags))).collect(),
            used: used.collect(),
            endpoints: kept::recover(tables),
            flags: tables.config.map_or(0, |config| config.flags),
        }
    }
}

/// The two ends of the device that limits bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShaperEnds {
    /// ifindex of the near end.
    pub near: u32,
    /// ifindex of the far end.
    pub far: u32,
}

/// A count of the ports in use.
#[derive(Clone, Debug)]
pub struct Counted {
    /// The ports; absent if they could not be counted.
    pub ports: Option<Ports>,
    /// When it began.
    pub began: Duration,
    /// The CPU time that it took, without the time that it waited for a CPU, which costs nothing.
    pub took: Duration,
}

/// One action that the machine requests.
#[derive(Clone, Debug)]
pub enum Action {
    /// Send a probe. A probe that cannot be sent counts as unanswered.
    Probe(NodeName, Request),
    /// Tell the programs for how long from now they say that this node is able to carry egress IPs and holds its lease.
    Heartbeat {
        /// How long the node is able; zero means not at all.
        able: Duration,
        /// How long the node holds its lease ([`says_held_until`](crate::health::terms::says_held_until)). Zero leaves what the programs
        /// were told before, which ends by itself: an agent that has just started does not know what its predecessor held.
        held: Duration,
    },
    /// Read the programs' counters. Answered by `handle_counters`, or not at all.
    ReadCounters,
    /// Begin to count the ports that flows use. Answered by `handle_ports`, later.
    CountPorts(Growth),
    /// Read again all state whose changes are not reported.
    LookAgain,

    /// Find the interfaces that lead to these pod addresses. Answered by `handle_interfaces`.
    FindInterfaces(BTreeSet<IpAddr>),
    /// Check whether every existing pod interface has its programs. Answered by `handle_covered`, if so.
    SeeIfCovered,
    /// Set up the host-stack path, with rules that hold packets that no program has seen, except packets to these networks. Answered by
    /// `handle_stack_path`, if that succeeds.
    MakeStackPath {
        /// Whether some policy selects a pod of this node.
        selects: bool,
        /// The networks to which packets are not held; absent if nothing is held.
        hold: Option<BTreeSet<IpNet>>,
    },
    /// Create the device that limits bandwidth, or remove it. Answered by `handle_shaper`.
    MakeShaper(bool),
    /// Attach the programs where they belong.
    Attach {
        /// The far end of the shaper.
        shaper: Option<u32>,
        /// Whether this node carries egress IPs.
        gateway: bool,
    },
    /// Find the routes to other nodes. Answered by `handle_routes`.
    FindRoutes(BTreeSet<IpAddr>),
    /// Write the tables. Answered by `handle_written`.
    Write {
        /// The contents of the tables.
        view: Box<NodeView>,
        /// The bandwidth limits of egress IPs, outbound and inbound.
        limits: BTreeMap<IpAddr, [Bandwidth; 2]>,
    },
    /// Make pods immediately reopen connections by these egress IPs if their first packets are unanswered: a gateway that they went to is
    /// no longer used and may have failed.
    OpenAgain(BTreeSet<IpAddr>),
    /// Keep routes to these egress IPs for others.
    Advertise(BTreeSet<IpAddr>),
    /// Forward packets that arrive on these interfaces.
    Forward(Vec<String>),
    /// Announce these egress IPs from now on, and ask for the MAC addresses of the next hops of their subnets.
    Announce(BTreeMap<IpAddr, EgressLink>),
    /// Keep the lease, or give it up.
    KeepLease(bool),
    /// Publish the node's state for people.
    Publish,

    /// Write the status, if it differs. Answered by `handle_status` or `handle_status_failed`, later.
    WriteStatus,
}
