//! The agent's loop: objects, links, probes and time in; maps, hooks, announcements and status out.

use super::{
    able,
    aside::Aside,
    count::Counting,
    facts::World,
    hooks::Hooks,
    networks::LeftAlone,
    owned::Owned,
    reconcile,
    routes::Routes,
    settings::Settings,
    status::{self, Report},
};
use crate::{
    api::{EgressNode, EgressNodeStatus, GatewayWay},
    datapath::{
        Pins,
        answers::Answers,
        attach::{self, Attacher},
        load::Programs,
        maps::{Maps, MapsError},
        write::Writer,
    },
    host::{
        advertise::Advertised,
        far::FarEnds,
        firewall::StackPath,
        links::{Links, LinksOptions},
        netlink::Netlink,
        ports::{NodePorts, PortsError},
        probe::ProbeSocket,
        shaper::Shaper,
        sysctl::Sysctls,
        tunnel,
    },
    observe::state::AgentState,
    store::{Store, StoreError, lease::LeaseKeeper},
};
use anyhow::Context as _;
use egress_common::{abi::name_kind, config, port_block};
use egress_core::{
    agent::{
        blocks::Withheld,
        carriers::Carriers,
        demand::{Past, Ports},
        effective::Effective,
        gateways::Gateways,
        history::Histories,
        kept,
        late::Late,
        objects::Known,
        programmed::Programmed,
        pulse::Pulse,
        reach::Reach,
    },
    encode::{Encoder, EndpointView},
    model::{EndpointId, NodeName, PolicyId, Trouble},
    network::{classify::Roles, reported::reported},
};
use futures::FutureExt as _;
use k8s_openapi::jiff::Timestamp;
use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// How an agent is started.
pub struct Options {
    /// The node that it is for.
    pub node: String,
    /// The loaded programs.
    pub programs: Programs,
    /// The objects.
    pub store: Store,
    /// Settings.
    pub settings: Settings,
    /// Directory of the pins.
    pub bpffs: PathBuf,
    /// Where the previous values of sysctls are kept.
    pub journal: PathBuf,
    /// Where the objects come from, for people: `directory /etc/spillway`.
    pub source: String,
    /// What the agent knows is published here.
    pub publish: watch::Sender<Arc<AgentState>>,
}

/// How often the view is made again and the tunnel device looked at although nothing seems to have changed.
const RESYNC: Duration = Duration::from_secs(5);
/// The least time between two writes of the status.
const STATUS_EVERY: Duration = Duration::from_millis(100);
/// How often the programs are asked whether ports are getting scarce: then ports are counted at once.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A running agent.
pub struct Agent {
    pub(super) node: NodeName,
    pub(super) store: Store,
    pub(super) settings: Settings,
    pub(super) links: Links,
    pub(super) tunnel: tunnel::Tunnel,
    pub(super) shaper: Shaper,
    pub(super) advertised: Advertised,
    pub(super) netlink: Netlink,
    pub(super) sysctls: Sysctls,
    pub(super) stack_path: StackPath,
    pub(super) hooks: Hooks,
    pub(super) effective: Effective,
    pub(super) carriers: Carriers,
    /// Whether this node is able to carry egress IPs: its tables are written, its way out is up, somebody reaches it.
    pub(super) able: bool,
    pub(super) reach: Reach,
    pub(super) writer: Writer,
    pub(super) encoder: Encoder,
    pub(super) socket: ProbeSocket,
    pub(super) answers: Answers,
    pub(super) routes: Routes,
    pub(super) kernel_flags: u32,
    pub(super) gateway_ways: Vec<GatewayWay>,
    pub(super) world: World,
    pub(super) histories: Histories,
    pub(super) endpoints: BTreeMap<EndpointId, EndpointView>,
    pub(super) far: FarEnds,
    pub(super) look_again: bool,
    pub(super) late: Late,
    pub(super) programmed: Programmed,
    pub(super) left_alone: LeftAlone,
    pub(super) troubles: BTreeSet<Trouble>,
    pub(super) gateways: Gateways,
    pub(super) owned: Owned,
    pub(super) lease: Option<LeaseKeeper>,
    pub(super) lease_held: bool,
    /// A lease on its way back.
    pub(super) releasing: Aside<()>,
    pub(super) roles: Roles,
    /// Interfaces with the program that translates first packets, as the rules of the firewall last had them.
    pub(super) exits: BTreeSet<u32>,
    pub(super) ports: Ports,
    pub(super) past: Past,
    pub(super) counted: Option<Duration>,
    pub(super) maps: Arc<Maps>,
    pub(super) counting: Aside<(Result<Ports, MapsError>, Counting)>,
    /// The status on its way to the store.
    pub(super) writing: Aside<Result<(), StoreError>>,
    pub(super) sockets: Aside<Result<NodePorts, PortsError>>,
    pub(super) node_ports: Option<NodePorts>,
    pub(super) used: BTreeSet<IpAddr>,
    pub(super) withheld: Withheld,
    pub(super) errors: Vec<String>,
    pub(super) leases: Known,
    pub(super) carries: BTreeSet<IpAddr>,
    pub(super) start: Instant,
    pub(super) source: String,
    pub(super) publish: watch::Sender<Arc<AgentState>>,
    pub(super) next_resync: Instant,
    pub(super) pulse: Pulse,
    pub(super) next_status: Instant,
    pub(super) status_due: bool,
    pub(super) next_count: Instant,
    pub(super) next_look: Instant,
    pub(super) at_once: Instant,
    pub(super) tight: u64,
}

impl Agent {
    /// Attaches what needs no object, and takes over what an earlier agent left.
    pub async fn start(options: Options) -> anyhow::Result<Self> {
        let Options { node, mut programs, store, settings, bpffs, journal, source, publish } = options;
        let start = Instant::now();
        let pins = Pins::new(&bpffs);
        let kernel_flags = programs.kernel_flags();
        let answers = Answers::open(&pins)?;
        let writer = Writer::open(Maps::open(&pins)?)?;
        let maps = Arc::new(Maps::open(&pins)?);
        let encoder = Encoder::recover(writer.present());
        let endpoints = kept::recover(writer.present());
        let histories = Histories::recover(&endpoints);
        let carriers = Carriers::recover(&able::carried(&writer));
        let mode = settings.attach.unwrap_or_else(attach::mode);
        let attacher = Attacher::new(programs, pins, mode);
        let links = Links::follow(LinksOptions::default()).await.context("links cannot be followed")?;
        let netlink = Netlink::open().context("netlink")?;
        let sysctls = Sysctls::open(journal).context("the journal of sysctls")?;
        let tunnel = tunnel::ensure(&netlink.handle, &settings.tunnel).await?;
        let socket = ProbeSocket::open(tunnel.index).context("probes cannot be sent")?;
        let node = NodeName::from(node.as_str());
        let mut world = World::default();
        world.read(&store, &node);
        let (reach, deadline) = (Reach::new(settings.probe), settings.deadline);
        let rules = reconcile::rules(&world, &node, &settings);
        let hooks = Hooks::start(attacher, links.subscribe(), reconcile::wanted(rules, &tunnel, &settings, None));
        let effective = Effective::recover(known_policies(&writer));
        Ok(Self {
            node,
            gateways: Gateways::new(settings.probe),
            owned: Owned::open(start).context("egress IPs cannot be announced")?,
            store,
            settings,
            links,
            tunnel,
            shaper: Shaper::default(),
            advertised: Advertised::default(),
            netlink,
            sysctls,
            stack_path: StackPath::default(),
            hooks,
            effective,
            carriers,
            able: false,
            reach,
            writer,
            encoder,
            socket,
            answers,
            routes: Routes::default(),
            kernel_flags,
            gateway_ways: Vec::new(),
            world,
            histories,
            endpoints,
            far: FarEnds::open().context("netlink")?,
            look_again: false,
            late: Late::default(),
            programmed: Programmed::default(),
            left_alone: LeftAlone::default(),
            troubles: BTreeSet::new(),
            lease: None,
            lease_held: false,
            releasing: Aside::default(),
            roles: Roles::default(),
            exits: BTreeSet::new(),
            ports: Ports::default(),
            past: Past::default(),
            counted: None,
            maps,
            counting: Aside::default(),
            writing: Aside::default(),
            sockets: Aside::default(),
            // Known before the first report.
            node_ports: NodePorts::read().inspect_err(|e| tracing::warn!("the node's own ports: {e}")).ok(),
            used: BTreeSet::new(),
            withheld: Withheld::default(),
            errors: Vec::new(),
            leases: Known::default(),
            carries: BTreeSet::new(),
            start,
            source,
            publish,
            next_resync: start,
            pulse: Pulse::new(deadline, Duration::ZERO),
            next_status: start,
            status_due: true,
            next_count: start,
            next_look: start,
            at_once: start,
            tight: 0,
        })
    }

    /// Runs until `stop` is ready. What was attached and written stays.
    pub async fn run(mut self, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        let mut changes = self.store.changes();
        let mut links = self.links.subscribe();
        let mut stop = std::pin::pin!(stop);
        // No packet is told to take the host-stack path before there are programs at its end.
        self.hooks.started().await;
        // What an earlier agent made stays; more is made when it is known whom policies select.
        self.find_networks();
        self.make_stack_path(self.has_flag(config::flags::HOLD), false).await?;
        self.reconcile().await;
        self.pulse = Pulse::new(self.settings.deadline, self.start.elapsed());
        loop {
            let current = self.links.current();
            let wake = self.next_wake();
            let (holding, unseen) = (self.has_flag(config::flags::HOLD), self.has_flag(config::flags::UNSEEN_INBOUND));
            let mut dirty = false;
            tokio::select! {
                () = &mut stop => break,
                () = changes.next() => {
                    dirty = self.world.read(&self.store, &self.node);
                }
                changed = links.changed() => {
                    changed.context("links are no longer followed")?;
                    links.borrow_and_update();
                    dirty = true;
                }
                answer = self.answers.next() => match answer {
                    Ok(answer) => dirty = self.gateways.reply(&answer, self.start.elapsed()),
                    Err(e) => {
                        tracing::warn!("answers to probes cannot be read: {e}");
                    }
                },
                rival = self.owned.rival(&current) => {
                    if self.owned.defend(rival) {
                        tracing::warn!("{rival} is claimed by another host: it is announced again");
                    }
                }
                () = self.hooks.changed() => {
                    dirty = holding || self.hooks.exits() != self.exits || self.hooks.bypass().is_some() != unseen;
                }
                (ports, counting) = self.counting.done() => dirty = self.take_count(ports, counting),
                ports = self.sockets.done() => match ports {
                    Ok(ports) => {
                        self.status_due |= self.node_ports.as_ref() != Some(&ports);
                        self.node_ports = Some(ports);
                    }
                    Err(e) => tracing::warn!("the node's own ports are not looked at: {e}"),
                },
                () = lease_changed(&mut self.lease) => {}
                () = self.releasing.done() => dirty = true,
                written = self.writing.done() => if let Err(e) = written {
                    // A conflict: the next look at the objects makes another one.
                    tracing::debug!("{e}");
                    self.status_due = true;
                },
                () = tokio::time::sleep_until(wake.into()) => {}
            }
            dirty |= self.tick().await;
            if dirty {
                self.reconcile().await;
            }
            self.write_status();
        }
        // The next agent goes on with the lease.
        self.hand_over().await;
        Ok(())
    }

    fn next_wake(&self) -> Instant {
        // While one is on its way, its end wakes the loop.
        let status = (self.status_due && !self.writing.is_busy()).then_some(self.next_status);
        let since_start = |at: Duration| self.start + at;
        let claims = self.owned.next().map(|next| next.max(since_start(self.pulse.silent_until())));
        [self.gateways.next().map(since_start), claims, status]
            .into_iter()
            .flatten()
            .chain([self.next_resync, since_start(self.pulse.next()), self.next_look])
            .chain((!self.counting.is_busy()).then_some(self.next_count))
            .min()
            .unwrap_or(self.next_resync)
    }

    /// What is due by the clock. Whether the view is to be made again.
    async fn tick(&mut self) -> bool {
        let mut dirty = false;
        // What has arrived is taken before anything counts as missed: this loop may be late, the gateways are not.
        while let Some(Ok(answer)) = self.answers.next().now_or_never() {
            dirty |= self.gateways.reply(&answer, self.start.elapsed());
        }
        let (now, elapsed) = (Instant::now(), self.start.elapsed());
        dirty |= self.gateways.tick(elapsed, |name, request| {
            // A probe that cannot be sent is a probe that is not answered.
            if let Err(e) = self.socket.send(request) {
                tracing::debug!("probe to {name} ({}): {e}", request.remote);
            }
        });
        let due = self.pulse.look(elapsed);
        if self.pulse.may_announce(elapsed) {
            self.owned.tick();
        }
        self.lease_held = self.lease.as_ref().is_some_and(|lease| lease.held().is_some());
        if due {
            self.sign_of_life();
        }
        dirty |= self.carriers.next().is_some_and(|next| elapsed >= next);
        if now >= self.next_look {
            self.next_look = now + LOOK_EVERY;
            dirty |= self.check_reach();
            if self.are_ports_tight() {
                self.next_count = self.next_count.min(self.at_once);
            }
        }
        if now >= self.next_count && !self.counting.is_busy() {
            self.begin_count();
        }
        if now >= self.next_resync {
            self.next_resync = now + RESYNC;
            self.look_again = true;
            self.reopen_tunnel().await;
            self.routes.check_secured();
            self.advertised.look_again();
            // It goes through the kernel's whole table of sockets, whoever's they are.
            self.sockets.begin(NodePorts::read);
            dirty = true;
        }
        dirty
    }

    /// Makes sure of the tunnel device, which anybody may have deleted.
    async fn reopen_tunnel(&mut self) {
        match tunnel::ensure(&self.netlink.handle, &self.settings.tunnel).await {
            Ok(tunnel) if tunnel.index == self.tunnel.index => {}
            Ok(tunnel) => match ProbeSocket::open(tunnel.index) {
                Ok(socket) => {
                    self.socket = socket;
                    self.tunnel = tunnel;
                }
                Err(e) => tracing::error!("probes cannot be sent: {e}"),
            },
            Err(e) => tracing::error!("{e}"),
        }
    }

    /// Writes the status if it is due and differs.
    fn write_status(&mut self) {
        let now = Instant::now();
        if !self.status_due || now < self.next_status || self.writing.is_busy() {
            return;
        }
        self.next_status = now + STATUS_EVERY;
        let links = self.links.current();
        let occupied = self.occupied_blocks();
        let store = self.store.clone();
        let Some(present) = self.world.egress_node(&self.node).map(|object| EgressNode::clone(object)) else {
            let object = EgressNode::new(self.node.as_str(), Default::default());
            // The cache shows it soon.
            self.writing.begin_task(async move { store.create(&object).await.map(drop) });
            return;
        };
        let tunnel_addresses = self.tunnel_addresses();
        // Until the first write, the tables are those that an earlier agent has reported.
        let reported = |s: &EgressNodeStatus| Known { all: s.lease_revision, own: s.own_lease_revision };
        let leases = present.status.as_ref().map_or(Known::default(), reported).max(self.leases);
        self.withheld.publish(&self.node, &self.world.plan, leases.own);
        let report = Report {
            node: &self.node,
            snapshot: &self.world.snapshot,
            plan: &self.world.plan,
            links: &links,
            roles: &self.roles,
            tunnel_addresses: &tunnel_addresses,
            firewall: self.settings.firewall,
            transport: self.settings.transport,
            gateways: &self.gateway_ways,
            attach: self.hooks.mode(),
            tables: self.writer.present(),
            leases,
            carries: &self.carries,
            ports: &self.ports,
            withheld: &self.withheld,
            occupied_blocks: occupied,
            troubles: &self.troubles,
            programmed: &self.programmed,
            unnamed: &self.left_alone.found,
            errors: &self.errors,
        };
        let status = status::status(&report, present.status.as_ref(), Timestamp::now());
        self.status_due = false;
        if present.status.as_ref() == Some(&status) {
            return;
        }
        let object = EgressNode { status: Some(status), ..present };
        // Nothing here waits for an API server.
        self.writing.begin_task(async move { store.replace_status(&object).await.map(drop) });
    }

    /// The blocks that this node uses itself on any of its addresses: what a policy may choose as an egress IP must be known
    /// before its blocks are leased. The tunnel's own port has no socket that could be found.
    fn occupied_blocks(&self) -> Vec<u16> {
        let Some(ports) = &self.node_ports else { return Vec::new() };
        let links = self.links.current();
        let addresses = reported(&self.node, &self.world.snapshot, &links, &self.roles).into_iter();
        let free: Vec<BTreeSet<u16>> = addresses.map(|(_, net)| ports.free_blocks(net.addr())).collect();
        let tunnel = port_block::of_port(self.settings.tunnel.port);
        let all = 0..egress_core::plan::blocks::FIXED_BLOCKS;
        all.filter(|b| Some(*b) == tunnel || free.iter().any(|f| !f.contains(b))).collect()
    }
}

/// Waits for news of the lease, if there is one. Cancel safe.
async fn lease_changed(lease: &mut Option<LeaseKeeper>) {
    match lease {
        Some(lease) => lease.changed().await,
        None => std::future::pending().await,
    }
}

/// The policies that an earlier agent had in force.
fn known_policies(writer: &Writer) -> BTreeSet<PolicyId> {
    let names = writer.present().names.iter().filter(|(k, _)| k.kind == name_kind::POLICY);
    names.filter_map(|(_, name)| egress_core::encode::name_text(name).parse().ok()).collect()
}
