//! The agent's loop: objects, links, probes and time in; maps, hooks, announcements and status out.

use super::{
    demand::{Ports, Used},
    facts::{Histories, World},
    gateways::Gateways,
    owned::Owned,
    settings::Settings,
    status::{self, Report},
    view::{self, Facts},
};
use crate::{
    api::EgressNode,
    datapath::{
        Pins,
        attach::{self, Attacher, Hook},
        encode::Encoder,
        load::{self, Programs},
        maps::{Maps, MapsError},
        write::Writer,
    },
    host::{
        classify::{InterfaceRules, Roles, classify},
        links::{Links, LinksOptions},
        netlink::Netlink,
        ports::NodePorts,
        probe::ProbeSocket,
        sysctl::{self, Sysctls},
        tunnel,
    },
    model::{EndpointId, NodeName},
    store::{
        Key, Store,
        lease::{LEASE_NAMESPACE, LeaseKeeper, LeaseTerms, gateway_lease},
    },
};
use anyhow::Context as _;
use egress_common::{
    abi::{name_kind, ticks},
    config::{self, Config},
    endpoint::endpoint_flags,
    flow::{Flow, kind},
    net,
};
use k8s_openapi::jiff::Timestamp;
use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    net::IpAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

/// How an agent is started.
pub struct Options {
    /// The node that it is for.
    pub node: String,
    /// The objects.
    pub store: Store,
    /// Settings.
    pub settings: Settings,
    /// Directory of the pins.
    pub bpffs: PathBuf,
    /// Where the previous values of sysctls are kept.
    pub journal: PathBuf,
}

/// Bytes that a packet grows by in the tunnel: outer Ethernet is not counted, inner Ethernet (14), VXLAN (8), UDP (8) and
/// outer IPv4 (20) or IPv6 (40) are.
const OVERHEAD: [u32; 2] = [50, 70];
/// IP and TCP headers without options, for IPv4 and IPv6.
const HEADERS: [u32; 2] = [40, 60];
/// The smallest segment that is ever asked for (RFC 9293, section 3.7.1).
const MIN_MSS: u32 = 536;
/// How often the hooks are looked at although nothing seems to have changed.
const RESYNC: Duration = Duration::from_secs(5);
/// The least time between two writes of the status.
const STATUS_EVERY: Duration = Duration::from_millis(100);
/// The least time between two counts of the ports in use.
const COUNT_EVERY: Duration = Duration::from_secs(2);
/// A count may take one part in so many of the time.
const COUNT_SHARE: u32 = 20;

/// A running agent.
pub struct Agent {
    node: NodeName,
    store: Store,
    settings: Settings,
    links: Links,
    tunnel: tunnel::Tunnel,
    netlink: Netlink,
    sysctls: Sysctls,
    attacher: Attacher,
    writer: Writer,
    encoder: Encoder,
    socket: ProbeSocket,
    world: World,
    histories: Histories,
    gateways: Gateways,
    owned: Owned,
    lease: Option<LeaseKeeper>,
    lease_held: bool,
    roles: Roles,
    ports: Ports,
    complaints: Vec<String>,
    lease_revision: u64,
    next_resync: Instant,
    next_deadline: Instant,
    next_status: Instant,
    status_due: bool,
    next_count: Instant,
}

impl Agent {
    /// Loads and attaches what needs no object, and takes over what an earlier agent left.
    pub async fn start(options: Options) -> anyhow::Result<Self> {
        let Options { node, store, settings, bpffs, journal } = options;
        let start = Instant::now();
        let pins = Pins::new(&bpffs);
        let programs = Programs::load(&pins, settings.sizes)?;
        let writer = Writer::open(Maps::open(&pins)?)?;
        let encoder = Encoder::recover(writer.present());
        let histories = Histories::recover(known_histories(&writer));
        let mode = settings.attach.unwrap_or_else(attach::mode);
        let attacher = Attacher::new(programs, pins, mode);
        let links = Links::follow(LinksOptions::default()).await.context("links cannot be followed")?;
        let netlink = Netlink::open().context("netlink")?;
        let sysctls = Sysctls::open(journal).context("the journal of sysctls")?;
        let tunnel = tunnel::ensure(&netlink.handle, &settings.tunnel).await?;
        let socket = ProbeSocket::open(tunnel.index).context("probes cannot be sent")?;
        Ok(Self {
            node: NodeName::from(node.as_str()),
            gateways: Gateways::new(settings.probe, start),
            owned: Owned::open(start).context("egress IPs cannot be announced")?,
            store,
            settings,
            links,
            tunnel,
            netlink,
            sysctls,
            attacher,
            writer,
            encoder,
            socket,
            world: World::default(),
            histories,
            lease: None,
            lease_held: false,
            roles: Roles::default(),
            ports: Ports::default(),
            complaints: Vec::new(),
            lease_revision: 0,
            next_resync: start,
            next_deadline: start,
            next_status: start,
            status_due: true,
            next_count: start,
        })
    }

    /// Runs until `stop` is ready. What was attached and written stays.
    pub async fn run(mut self, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        let mut changes = self.store.changes();
        let mut links = self.links.subscribe();
        let mut stop = std::pin::pin!(stop);
        self.reconcile(true).await;
        loop {
            let current = self.links.current();
            let wake = self.next_wake();
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
                reply = self.socket.receive() => match reply {
                    Ok(reply) => dirty = self.gateways.reply(&reply),
                    Err(e) => {
                        tracing::warn!("probes: {e}");
                        self.reopen_tunnel().await;
                        dirty = true;
                    }
                },
                rival = self.owned.rival(&current) => {
                    if !self.lease_held {
                        tracing::warn!("{rival} is claimed by another node while the lease cannot be renewed: withdrawing");
                        self.owned.withdraw(rival);
                        dirty = true;
                    }
                }
                () = lease_changed(&mut self.lease) => {
                    dirty = self.lease_check();
                }
                () = tokio::time::sleep_until(wake.into()) => {}
            }
            dirty |= self.tick().await;
            if dirty {
                self.reconcile(false).await;
            }
            self.write_status().await;
        }
        if let Some(lease) = self.lease.take() {
            lease.release().await;
        }
        Ok(())
    }

    fn next_wake(&self) -> Instant {
        let status = self.status_due.then_some(self.next_status);
        [Some(self.gateways.next()), self.owned.next(), status]
            .into_iter()
            .flatten()
            .chain([self.next_resync, self.next_deadline, self.next_count])
            .min()
            .unwrap_or(self.next_resync)
    }

    /// What is due by the clock. Whether the view is to be made again.
    async fn tick(&mut self) -> bool {
        let now = Instant::now();
        let mut dirty = self.gateways.tick(&self.socket);
        self.owned.tick();
        dirty |= self.lease_check();
        if now >= self.next_deadline {
            self.next_deadline = now + self.settings.deadline / 8;
            let until = monotonic_ns() + self.settings.deadline.as_nanos() as u64;
            if let Err(e) = self.writer.set_deadline(until) {
                tracing::error!("the datapath will stop answering for egress IPs: {e}");
            }
        }
        if now >= self.next_count {
            let started = Instant::now();
            match self.count_ports() {
                Ok(ports) => {
                    self.status_due |= ports != self.ports;
                    self.ports = ports;
                }
                Err(e) => tracing::warn!("ports in use are not counted: {e}"),
            }
            self.next_count = started + COUNT_EVERY.max(started.elapsed() * COUNT_SHARE);
        }
        if now >= self.next_resync {
            self.next_resync = now + RESYNC;
            self.reopen_tunnel().await;
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

    /// Notes whether the lease is held. Whether something withdrawn is answered for again.
    fn lease_check(&mut self) -> bool {
        let held = self.lease.as_ref().is_some_and(|l| l.held().is_some());
        let regained = held && !self.lease_held;
        self.lease_held = held;
        regained && self.owned.lease_regained()
    }

    /// Makes the view again and carries out what is different.
    async fn reconcile(&mut self, first: bool) {
        if first {
            self.world.read(&self.store, &self.node);
        }
        self.complaints.clear();
        let links = self.links.current();
        let addresses: Vec<IpAddr> =
            self.world.snapshot.nodes.get(&self.node).into_iter().flat_map(|n| n.addresses.iter().copied()).collect();
        let rules = InterfaceRules {
            uplinks: self.settings.uplinks.clone(),
            pod_interfaces: self.settings.pod_interfaces.clone(),
            tunnel: self.settings.tunnel.name.clone(),
            node_addresses: addresses,
        };
        self.roles = classify(&links, &rules);
        let config = self.config();
        let mut facts = Facts {
            node: &self.node,
            snapshot: &self.world.snapshot,
            plan: &self.world.plan,
            links: &links,
            roles: &self.roles,
            probes: &self.gateways.states(),
            with_history: &BTreeSet::new(),
            except_cidrs: &self.settings.except_cidrs,
            silent: self.settings.silent,
            withdrawn: &self.owned.withdrawn(),
            config,
        };
        self.histories.update(facts.snapshot, &facts.classes());
        let with_history = self.histories.with_history();
        facts.with_history = &with_history;
        let view = view::view(&facts);
        let announced = view::announced(&facts);
        let revision = self.world.plan.lease_revision;

        let names: BTreeMap<u32, String> = links.links.values().map(|l| (l.index, l.name.clone())).collect();
        let hooks = hooks(&self.roles, self.tunnel.index, &names);
        // A pod's interface is covered before its address is known, and an uplink before it carries anything.
        self.complaints.extend(self.attacher.sync(&hooks, &names).iter().map(ToString::to_string));
        match self.encoder.encode(&view, self.writer.present()) {
            Ok(tables) => match self.writer.write(tables) {
                Ok(()) => self.lease_revision = revision,
                Err(e) => self.complaints.push(e.to_string()),
            },
            Err(overflow) => self.complaints.push(overflow.to_string()),
        }
        let probed = self.probed(&view);
        self.gateways.set(&probed);
        let places = announced
            .into_iter()
            .filter_map(|(ip, place)| Some((ip, (place, self.world.plan.egress_ips.get(&ip)?.epoch))));
        self.owned.set(&if self.settings.silent { BTreeMap::new() } else { places.collect() });
        self.owned.tick();
        self.forward();
        self.keep_lease();
        for complaint in &self.complaints {
            tracing::error!("{complaint}");
        }
        self.status_due = true;
    }

    /// The gateways that policies of this node's pods use, and where they are.
    fn probed(&self, view: &crate::datapath::encode::NodeView) -> BTreeMap<NodeName, IpAddr> {
        let slots = view.policies.values().flat_map(|p| &p.slots);
        let owners = slots.filter_map(|s| view.egress_ips.get(&s.address)?.owner.as_ref());
        owners
            .filter(|owner| **owner != self.node)
            .filter_map(|owner| Some((owner.clone(), *view.nodes.get(owner)?.first()?)))
            .collect()
    }

    /// A gateway forwards.
    fn forward(&mut self) {
        if !self.world.may_be_gateway(&self.node) {
            return;
        }
        let links = self.links.current();
        let names: Vec<&str> =
            self.roles.uplinks.iter().filter_map(|i| Some(links.links.get(i)?.name.as_str())).collect();
        match self.sysctls.apply(&sysctl::forwarding_settings(names)) {
            Ok(warnings) => {
                self.complaints.extend(warnings.iter().map(|w| format!("{}: {}: {}", w.object, w.message, w.remedy)))
            }
            Err(e) => self.complaints.push(e.to_string()),
        }
    }

    /// Keeps the lease while this node may be a gateway.
    fn keep_lease(&mut self) {
        match (self.world.may_be_gateway(&self.node), self.lease.is_some()) {
            (true, false) => {
                let terms = LeaseTerms {
                    key: Key { namespace: LEASE_NAMESPACE.into(), name: gateway_lease(self.node.as_str()) },
                    identity: self.node.to_string(),
                    duration: self.settings.lease_duration,
                    renew_every: self.settings.lease_renew,
                };
                self.lease = Some(LeaseKeeper::start(self.store.clone(), terms));
            }
            // Dropped, it lapses: whatever this node owned goes to others.
            (false, true) => self.lease = None,
            _ => {}
        }
    }

    fn config(&self) -> Config {
        let links = self.links.current();
        let underlays = self.roles.underlays.keys().filter_map(|i| links.links.get(i));
        let mtu = underlays.map(|l| l.mtu).min().unwrap_or(tunnel::MTU).min(tunnel::MTU);
        let ipv6_underlay = self.tunnel_addresses().first().is_some_and(IpAddr::is_ipv6);
        let room = mtu.saturating_sub(OVERHEAD[ipv6_underlay as usize]);
        let mss = |family: usize| room.saturating_sub(HEADERS[family]).max(MIN_MSS);
        let t = &self.settings.timeouts;
        Config {
            flags: load::config_flags(),
            tunnel_ifindex: self.tunnel.index,
            mss_v4: mss(0),
            mss_v6: mss(1),
            tcp_established: ticks(t.tcp_established.as_secs()),
            tcp_transitory: ticks(t.tcp_transitory.as_secs()),
            udp: ticks(t.udp.as_secs()),
            icmp: ticks(t.icmp.as_secs()),
            ..config::UNSET
        }
    }

    /// Where other nodes reach this node's tunnel: its addresses in Kubernetes, IPv4 first, or those of the underlay.
    fn tunnel_addresses(&self) -> Vec<IpAddr> {
        let links = self.links.current();
        let node = self.world.snapshot.nodes.get(&self.node);
        let mut addresses: Vec<IpAddr> = node.into_iter().flat_map(|n| n.addresses.iter().copied()).collect();
        addresses.retain(|a| links.by_address(*a).is_some());
        if addresses.is_empty() {
            addresses = self.roles.underlays.values().flatten().copied().collect();
        }
        addresses.sort_by_key(|a| (a.is_ipv6(), *a));
        addresses
    }

    /// The ports that flows of this node use.
    fn count_ports(&self) -> Result<Ports, MapsError> {
        let maps = self.writer.maps();
        let tables = self.writer.present();
        let address = |flow: &Flow| {
            let e = tables.egress_ips.get(&flow.egress)?;
            (e.generation == flow.egress_generation).then_some(net::from_any(e.addr))
        };
        let mut used = Vec::new();
        for (key, flow) in maps.v4.flows.entries()? {
            if flow.kind == kind::TRANSLATED
                && let Some(egress) = address(&flow)
            {
                let remote = (net::from_v4(key.dst).into(), u16::from_be(key.dst_port), key.proto);
                used.push(Used { egress, remote, port: u16::from_be(flow.port) });
            }
        }
        for (key, flow) in maps.v6.flows.entries()? {
            if flow.kind == kind::TRANSLATED
                && let Some(egress) = address(&flow)
            {
                let remote = (net::from_v6(key.dst).into(), u16::from_be(key.dst_port), key.proto);
                used.push(Used { egress, remote, port: u16::from_be(flow.port) });
            }
        }
        Ok(Ports::count(used))
    }

    /// Writes the status if it is due and differs.
    async fn write_status(&mut self) {
        let now = Instant::now();
        if !self.status_due || now < self.next_status {
            return;
        }
        self.next_status = now + STATUS_EVERY;
        let links = self.links.current();
        let occupied = self.occupied_blocks();
        let present = match self.world.egress_node(&self.node).cloned() {
            Some(object) => EgressNode::clone(&object),
            None => match self.store.create(&EgressNode::new(self.node.as_str(), Default::default())).await {
                Ok(created) => created,
                // The cache shows it soon.
                Err(e) => {
                    tracing::debug!("{e}");
                    return;
                }
            },
        };
        let tunnel_addresses = self.tunnel_addresses();
        let report = Report {
            node: &self.node,
            plan: &self.world.plan,
            links: &links,
            roles: &self.roles,
            tunnel_addresses: &tunnel_addresses,
            attach: self.attacher.mode(),
            tables: self.writer.present(),
            lease_revision: self.lease_revision,
            ports: &self.ports,
            occupied_blocks: occupied,
            complaints: &self.complaints,
        };
        let status = status::status(&report, present.status.as_ref(), Timestamp::now());
        self.status_due = false;
        if present.status.as_ref() == Some(&status) {
            return;
        }
        let object = EgressNode { status: Some(status), ..present };
        if let Err(e) = self.store.replace_status(&object).await {
            // A conflict: the next look at the objects makes another one.
            tracing::debug!("{e}");
            self.status_due = true;
        }
    }

    /// The blocks in which the node's own sockets are, for egress IPs that are the node's own address.
    fn occupied_blocks(&self) -> Vec<u16> {
        let fixed = self.world.plan.egress_ips.iter().filter(|(_, e)| e.fixed && e.owner.as_ref() == Some(&self.node));
        let addresses: Vec<IpAddr> = fixed.map(|(ip, _)| *ip).collect();
        if addresses.is_empty() {
            return Vec::new();
        }
        let Ok(ports) = NodePorts::read() else { return Vec::new() };
        let free: Vec<BTreeSet<u16>> = addresses.iter().map(|a| ports.free_blocks(*a)).collect();
        let all = 0..crate::plan::blocks::FIXED_BLOCKS;
        all.filter(|b| free.iter().any(|f| !f.contains(b))).collect()
    }
}

/// Waits for news of the lease, if there is one. Cancel safe.
async fn lease_changed(lease: &mut Option<LeaseKeeper>) {
    match lease {
        Some(lease) => lease.changed().await,
        None => std::future::pending().await,
    }
}

/// The hooks that should hold our programs.
fn hooks(roles: &Roles, tunnel: u32, names: &BTreeMap<u32, String>) -> BTreeMap<Hook, String> {
    let pods = roles.pods.iter().flat_map(|i| [("pod_egress", *i), ("pod_ingress", *i)]);
    let uplinks = roles.uplinks.iter().map(|i| ("uplink_ingress", *i));
    let all = pods.chain(uplinks).chain([("tunnel_ingress", tunnel), ("tunnel_egress", tunnel)]);
    all.filter_map(|hook| Some((hook, names.get(&hook.1)?.clone()))).collect()
}

/// Which pods an earlier agent knew, and whether they may have older connections.
fn known_histories(writer: &Writer) -> BTreeMap<EndpointId, bool> {
    let tables = writer.present();
    let flags: BTreeMap<u32, u32> =
        tables.v4.endpoints.values().chain(tables.v6.endpoints.values()).map(|e| (e.id, e.flags)).collect();
    let names = tables.names.iter().filter(|(k, _)| k.kind == name_kind::ENDPOINT);
    names
        .filter_map(|(k, name)| {
            let id = crate::datapath::maps::name_text(name).parse().ok()?;
            Some((id, flags.get(&k.id)? & endpoint_flags::HAS_HISTORY != 0))
        })
        .collect()
}

/// `CLOCK_MONOTONIC` in ns, the kernel programs' clock.
fn monotonic_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    now.map_or(0, |t| Duration::from(t).as_nanos() as u64)
}
