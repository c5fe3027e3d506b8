//! One node's programs and maps, filled by hand, and single packets to run through them.

use super::{BpfDir, scenes};
use crate::datapath::{
    load::{Programs, Sizes},
    maps::Maps,
    monotonic_ns,
    write::MapWriter,
};
use aya::programs::{TestRun as _, TestRunOptions};
use egress_common::{
    abi::{TICK_SHIFT, TUNNEL_PORT},
    config::DatapathConfig,
    limits::{ICMP_SECS, TCP_ESTABLISHED_SECS, TCP_TRANSITORY_SECS, UDP_SECS},
    net,
    verdict::Counter,
};
use egress_core::encode::{
    EgressView, Encoder, EndpointView, NodeView, PolicyView, SlotView,
    transport::{Path, TransportView},
};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use std::{collections::BTreeMap, net::IpAddr};

pub const POD4: &str = "10.1.0.2";
pub const POD6: &str = "fd00:1::2";
pub const STRANGER: &str = "10.1.0.3";
pub const EGRESS4: &str = "192.0.2.10";
pub const EGRESS6: &str = "2001:db8::10";
pub const SERVER4: &str = "203.0.113.5";
pub const SERVER6: &str = "2001:db8:f::5";
/// The addresses of another selected pod, in [`with_neighbor`].
pub const NEIGHBOR: [&str; 2] = ["10.1.0.7", "fd00:1::7"];
/// Pod networks of another node.
pub const REMOTE_PODS4: &str = "10.2.0.0/24";
pub const REMOTE_PODS6: &str = "fd00:2::/64";
/// Blocks of both egress IPs: this node's own, and one of another node.
pub const OWN_BLOCKS: [u16; 2] = [3, 900];
pub const OTHER_BLOCK: u16 = 5;
/// The revision up to which the leases of all nodes except `n1` are known; those of `n1` are known up to the next one. All its bytes
/// differ.
pub const KNOWN: u64 = 0x0102_0304_0506_0708;

/// This node's address on the underlay and the other node's, in each family.
pub const UNDERLAYS: [[&str; 2]; 2] = [["10.0.0.1", "10.0.0.3"], ["fd88::1", "fd88::3"]];
/// The other node's MAC address.
pub const THEIR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 3];

/// Words of `struct __sk_buff` that a test may set.
pub const INGRESS_IFINDEX: usize = 9;
pub const IFINDEX: usize = 10;
/// The number of its bytes that are given to the kernel.
const CONTEXT: usize = 192;

pub const NEXT: i32 = -1;
pub const SHOT: i32 = 2;
pub const REDIRECT: i32 = 7;

/// Returns a `struct __sk_buff` with some fields set, each identified by the index of its word.
pub fn context(fields: &[(usize, u32)]) -> [u8; CONTEXT] {
    let mut context = [0; CONTEXT];
    for (word, value) in fields {
        context[4 * word..4 * word + 4].copy_from_slice(&value.to_ne_bytes());
    }
    context
}

pub fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Returns the CPUs that this thread may run on.
pub fn cpus() -> Vec<usize> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
    (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false)).collect()
}

/// Restricts this thread to these CPUs.
pub fn run_on(cpus: &[usize]) {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu).unwrap());
    sched_setaffinity(Pid::from_raw(0), &set).unwrap();
}

/// Returns the current tick.
pub fn now_tick() -> u32 {
    (monotonic_ns() >> TICK_SHIFT) as u32
}

/// Returns a view: a selected pod, an unselected one, a policy for everything outside, and two egress IPs of `n1` with their blocks.
pub fn scene() -> NodeView {
    let slots = [EGRESS4, EGRESS6].map(|a| SlotView { address: addr(a), weight: 1, usable: true });
    let policy = PolicyView { slots: slots.into(), ..PolicyView::default() };
    let class = std::collections::BTreeSet::from([scenes::policy_id(0)]);
    let leases = OWN_BLOCKS.map(|b| (b, scenes::node(0))).into_iter().chain([(OTHER_BLOCK, scenes::node(2))]);
    let egress = EgressView {
        gateway: Some(scenes::node(1)),
        epoch: 1,
        blocks: OWN_BLOCKS.into(),
        leases: leases.collect(),
        ..EgressView::default()
    };
    let everywhere = ["0.0.0.0/0", "::/0"].map(|n| (n.parse().unwrap(), Some(scenes::policy_id(0))));
    let pod = EndpointView {
        ips: [addr(POD4), addr(POD6)].into(),
        class: class.clone(),
        history_until: 0,
        interfaces: BTreeMap::new(),
    };
    let other = EndpointView {
        ips: [addr(STRANGER)].into(),
        class: Default::default(),
        history_until: 0,
        interfaces: BTreeMap::new(),
    };
    NodeView {
        node: Some(scenes::node(0)),
        endpoints: [(scenes::endpoint_id(0), pod), (scenes::endpoint_id(1), other)].into(),
        policies: [(scenes::policy_id(0), policy)].into(),
        classes: [(class, everywhere.into())].into(),
        excepts: ["198.18.0.0/15", REMOTE_PODS4, REMOTE_PODS6].map(|net| net.parse().unwrap()).into(),
        api_server: None,
        elsewhere: [REMOTE_PODS4, REMOTE_PODS6].map(|net| net.parse().unwrap()).into(),
        egress_ips: [EGRESS4, EGRESS6].map(|a| (addr(a), egress.clone())).into(),
        nodes: (0..3).map(|n| (scenes::node(n), vec![IpAddr::from([10, 0, 0, n as u8 + 1])])).collect(),
        transports: BTreeMap::new(),
        macs: BTreeMap::new(),
        uplinks: BTreeMap::new(),
        known_leases: [(scenes::node(0), KNOWN), (scenes::node(1), KNOWN + 1), (scenes::node(2), KNOWN)].into(),
        // A test's flows do not expire meanwhile, even in an emulated guest that gets little processor time.
        config: Some(DatapathConfig {
            tcp_established: TCP_ESTABLISHED_SECS as u32,
            tcp_transitory: TCP_TRANSITORY_SECS as u32,
            udp: UDP_SECS as u32,
            icmp: ICMP_SECS as u32,
            ..scenes::settings()
        }),
    }
}

/// Returns [`scene`] with another selected pod, the endpoint 7.
pub fn with_neighbor() -> NodeView {
    let mut view = scene();
    let mut pod = view.endpoints[&scenes::endpoint_id(0)].clone();
    pod.ips = NEIGHBOR.map(addr).into();
    view.endpoints.insert(scenes::endpoint_id(7), pod);
    view
}

/// Returns [`scene`] on an underlay between this node and `n1`, through the interface `ifindex` with the MAC address `mac`. Packets to `n1`
/// use `transport`.
pub fn scene_between([ours, theirs]: [&str; 2], ifindex: u32, mac: [u8; 6], transport: u32) -> NodeView {
    let mut view = scene();
    let config = view.config.as_mut().unwrap();
    config.tunnel_port = TUNNEL_PORT.into();
    match addr(ours) {
        IpAddr::V4(a) => config.own_v4 = net::v4(a),
        IpAddr::V6(a) => config.own_v6 = net::v6(a),
    }
    let path = Path { ifindex, mtu: 1500, hop: addr(theirs), source: addr(ours), macs: Some([THEIR_MAC, mac]) };
    view.nodes = [(scenes::node(0), vec![addr(ours)]), (scenes::node(1), vec![addr(theirs)])].into();
    let may = egress_common::transport::bit(transport);
    view.transports.insert(scenes::node(1), TransportView { forward: transport, may, why: None, path: Some(path) });
    view
}

/// Makes this node a gateway with the interface `uplink`: it carries the egress IPs, and `n1` holds a block of each.
pub fn carry(view: &mut NodeView, uplink: u32) {
    for egress in view.egress_ips.values_mut() {
        egress.gateway = Some(scenes::node(0));
        egress.forwards = true;
        egress.interface = Some(uplink);
        egress.leases.insert(OTHER_BLOCK, scenes::node(1));
    }
}

/// Small enough that a test can fill the tables.
pub const SIZES: Sizes = Sizes { max_flows: 4096, flow_events: 0 };

pub struct Rig {
    pub programs: Programs,
    pub writer: MapWriter,
    pub encoder: Encoder,
    dir: BpfDir,
}

impl Rig {
    pub fn new(test: &str, view: &NodeView) -> Option<Self> {
        Self::of_size(test, view, SIZES)
    }

    pub fn of_size(test: &str, view: &NodeView, sizes: Sizes) -> Option<Self> {
        BpfDir::new(test).map(|dir| Self::in_dir(dir, view, sizes))
    }

    pub fn in_dir(dir: BpfDir, view: &NodeView, sizes: Sizes) -> Self {
        let programs = Programs::load_lazily(&dir.pins, sizes).unwrap();
        let writer = MapWriter::open(Maps::open(&dir.pins).unwrap()).unwrap();
        let mut rig = Self { programs, encoder: Encoder::recover(writer.present()), writer, dir };
        rig.write(view);
        rig
    }

    /// Starts again with emptied maps.
    pub fn restart(&mut self, view: &NodeView) {
        self.programs.start_collector().unwrap();
        self.writer = MapWriter::open(Maps::open(&self.dir.pins).unwrap()).unwrap();
        self.encoder = Encoder::recover(self.writer.present());
        self.write(view);
    }

    pub fn pins(&self) -> &crate::datapath::Pins {
        &self.dir.pins
    }

    pub fn write(&mut self, view: &NodeView) {
        let tables = self.encoder.encode(view, self.writer.present()).unwrap();
        self.writer.write(tables).unwrap();
    }

    /// Runs a program with a frame. Returns the verdict's code and the resulting frame.
    pub fn run(&mut self, program: &'static str, frame: &[u8]) -> (i32, Vec<u8>) {
        self.try_run(program, frame).expect("a frame that the kernel runs programs with")
    }

    /// Does the same; `None` for a frame that the kernel does not accept as a packet. A packet into a pod has arrived on an interface other
    /// than `lo`, which has index 1.
    pub fn try_run(&mut self, program: &'static str, frame: &[u8]) -> Option<(i32, Vec<u8>)> {
        let forwarded = [(INGRESS_IFINDEX, 2)];
        self.run_with(program, frame, if program == "pod_ingress" { &forwarded } else { &[] })
    }

    /// Does the same for a packet with some fields of its `__sk_buff` set, each identified by the index of its word.
    pub fn run_with(&mut self, program: &'static str, frame: &[u8], fields: &[(usize, u32)]) -> Option<(i32, Vec<u8>)> {
        let mut out = vec![0; frame.len() + 256];
        let context = context(fields);
        let ctx_in = (!fields.is_empty()).then_some(&context[..]);
        let options = TestRunOptions { data_in: Some(frame), data_out: Some(&mut out), ctx_in, ..Default::default() };
        let result = self.programs.get(program).unwrap().test_run(options).ok()?;
        out.truncate(result.data_size_out as usize);
        Some((result.return_value as i32, out))
    }

    /// Runs a program for drivers with a frame at the loopback device. Returns the action and the resulting frame.
    pub fn run_native(&mut self, program: &'static str, frame: &[u8]) -> (u32, Vec<u8>) {
        let mut out = vec![0; frame.len() + 256];
        let options = TestRunOptions { data_in: Some(frame), data_out: Some(&mut out), ..Default::default() };
        let result = self.programs.native(program).unwrap().test_run(options).unwrap();
        out.truncate(result.data_size_out as usize);
        (result.return_value, out)
    }

    pub fn count(&self, counter: Counter) -> u64 {
        self.writer.maps().counters().unwrap()[&counter]
    }

    /// Runs a frame, and asserts that it is dropped for this reason.
    #[track_caller]
    pub fn dropped(&mut self, program: &'static str, frame: &[u8], why: Counter) {
        let before = self.count(why);
        assert_eq!(self.run(program, frame).0, SHOT, "{program} does not drop {frame:02x?}");
        assert_eq!(self.count(why), before + 1, "not {}: {:?}", why.name(), self.writer.maps().counters());
    }
}
