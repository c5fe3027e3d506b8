//! Carrying a view out: everything that changes when objects, links or probes do.

use super::{
    Agent, Settings,
    facts::World,
    hooks::Wanted,
    status,
    tell::{self, Running},
};
use crate::{
    config::Firewall,
    datapath::monotonic_ns,
    host::{
        firewall::{FirewallError, Spec},
        shaper::Rate,
        sysctl, tunnel,
    },
    store::{
        Key,
        lease::{LEASE_NAMESPACE, LeaseKeeper, LeaseTerms, gateway_lease},
    },
};
use egress_common::{
    abi::{TICK_SHIFT, ticks},
    config::{self, Config},
    net,
    transport::DIRECT,
};
use egress_core::{
    agent::{
        blocks::Circumstances,
        carriers,
        gateways::Target,
        kept, late,
        transports::{self, Peer, Transports},
        view::{self, Facts},
    },
    encode::{NodeView, tables::Tables},
    model::{Bandwidth, NodeName, Transport},
    network::{
        classify::{InterfaceRules, classify, outside},
        links::LinkTable,
    },
};
use k8s_openapi::api::coordination::v1::Lease;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

/// Bytes that a packet grows by in the tunnel: outer Ethernet is not counted, inner Ethernet (14), VXLAN (8), UDP (8) and
/// outer IPv4 (20) or IPv6 (40) are.
const OVERHEAD: [u32; 2] = [50, 70];
/// IP and TCP headers without options, for IPv4 and IPv6.
const HEADERS: [u32; 2] = [40, 60];
/// The smallest segment that is ever asked for (RFC 9293, section 3.7.1).
const MIN_MSS: u32 = 536;

/// What tells this node's interfaces apart.
pub(super) fn rules(world: &World, node: &NodeName, settings: &Settings) -> InterfaceRules {
    let node = world.snapshot.nodes.get(node);
    InterfaceRules {
        uplinks: settings.uplinks.clone(),
        pod_interfaces: settings.pod_interfaces.clone(),
        tunnel: settings.tunnel.name.clone(),
        node_addresses: node.into_iter().flat_map(|n| n.addresses.iter().copied()).collect(),
    }
}

/// What decides where programs belong.
pub(super) fn wanted(
    rules: InterfaceRules,
    tunnel: &tunnel::Tunnel,
    settings: &Settings,
    shaper: Option<u32>,
) -> Wanted {
    Wanted { rules, tunnel: tunnel.index, underlay: settings.transport != Transport::Device, shaper }
}

impl Agent {
    /// Makes the view again and carries out what is different.
    pub(super) async fn reconcile(&mut self) {
        self.errors.clear();
        self.find_networks();
        let links = self.links.current();
        let rules = rules(&self.world, &self.node, &self.settings);
        let own = self.tunnel_addresses();
        let gone = kept::gone(&self.endpoints, &self.world.snapshot, &self.node, &links);
        let mut classes = view::classes_of(&self.world.snapshot, &self.node);
        classes.extend(gone.iter().map(|(id, pod)| (id.clone(), pod.class.clone())));
        let selects = classes.values().any(|class| !class.is_empty());
        let held = self.has_flag(config::flags::HOLD);
        self.find_interfaces(&links, &classes).await;
        let interfaces = view::interfaces(&links, &self.roles, self.far.interfaces());
        let (limit, now) = (self.settings.start_limit, self.start.elapsed());
        self.late.update(&late::Circumstances {
            node: &self.node,
            snapshot: &self.world.snapshot,
            classes: &classes,
            interfaces: &interfaces,
            pods: &self.roles.pods,
            now,
        });
        self.troubles = self.late.troubles(&classes, limit, now);
        let mut hold = self.late.holds(limit, now) || held && !self.are_pods_covered().await;
        // Rules look for what the programs note, so they come after it and go before it.
        if let Err(e) = self.make_stack_path(hold && held, selects).await {
            self.errors.push(e.to_string());
            hold |= held;
        }
        self.used = view::used(&self.world.plan, &classes);
        self.decide_blocks();
        self.histories.update(&self.world.snapshot, &classes, self.idle_from_now());
        let probes = self.gateways.states();
        let cut_off = view::cut_off(&self.node, &self.world.snapshot, &self.world.plan, &links, &self.roles);
        self.errors.extend(cut_off.iter().map(|(ip, why)| format!("egress IP {ip} cannot be carried: {why}")));
        let able = cut_off.is_empty() && self.reach.is_reached();
        let turned = std::mem::replace(&mut self.able, able) != able;
        self.carriers.update(&carriers::Circumstances {
            node: &self.node,
            snapshot: &self.world.snapshot,
            plan: &self.world.plan,
            probes: &probes,
            able: self.able,
            now: self.start.elapsed(),
        });
        let limits = view::limits(&self.world.snapshot, &self.world.plan, &self.carriers);
        self.open_shaper(&limits).await;
        let config = self.config(&own);
        let facts = Facts {
            node: &self.node,
            snapshot: &self.world.snapshot,
            plan: &self.world.plan,
            links: &links,
            roles: &self.roles,
            unanswered: &self.world.unanswered,
            probes: &probes,
            carriers: &self.carriers,
            gone: &gone,
            interfaces: &interfaces,
            histories: &self.histories,
            except_cidrs: &self.left_alone.all,
            api_server: self.settings.api_server,
            silent: self.settings.silent,
            withheld: &self.withheld,
            now: self.start.elapsed(),
            hold,
            config,
        };
        let mut view = view::view(&facts, &mut self.effective);
        self.endpoints.clone_from(&view.endpoints);
        let mut announced = view::announced(&facts);
        let leases = self.world.leases(&self.node).max(self.leases);

        let shaper = self.shaper.ends().map(|ends| ends.far);
        self.hooks.set(wanted(rules, &self.tunnel, &self.settings, shaper));
        self.errors.extend(self.hooks.errors());
        let setting = self.settings.transport;
        let watched = self.carriers.watched(&self.node, &self.world.plan, &self.used);
        let peers = peers(&self.node, &view, &self.world, &watched);
        let addresses = peers.values().map(|peer| peer.address).collect();
        self.routes.find(&self.netlink, &links, &addresses).await;
        let transports: BTreeMap<NodeName, Transports> = peers
            .iter()
            .map(|(n, peer)| (n.clone(), transports::to(setting, peer, &self.routes.get(peer.address), &links, &own)))
            .collect();
        self.gateways.set(targets(&watched, &view, &transports, setting));
        let chosen = |n: &NodeName| self.gateways.transport(n).unwrap_or_default();
        view.transports = transports.iter().map(|(n, w)| (n.clone(), w.view(chosen(n), setting))).collect();
        let mut written = false;
        match self.encoder.fit(&mut view, self.writer.present()) {
            Ok((tables, refused)) => {
                self.troubles.extend(refused.troubles(&self.world.plan.egress_ips));
                let classes = classes_of_shaper(&tables, &limits);
                if let Err(e) = self.shaper.set(&self.netlink.handle, &classes).await {
                    self.errors.push(e.to_string());
                }
                match self.writer.write(tables) {
                    Ok(()) => {
                        self.leases = leases;
                        let now = self.start.elapsed();
                        self.programmed.written(&self.world.snapshot.policies, &view.policies, now);
                        self.carries = self.carriers.carried().clone();
                        self.carries.retain(|ip| view.egress_ips.contains_key(ip));
                        let advertised = self.carriers.advertised() & &self.carries;
                        if let Err(e) = self.advertised.set(&self.netlink.handle, &advertised).await {
                            self.errors.push(e.to_string());
                        }
                        written = true;
                    }
                    Err(e) => self.errors.push(e.to_string()),
                }
            }
            Err(overflow) => self.errors.push(format!("{overflow}: nothing was changed")),
        }
        // Where nothing was written, the tables carry what they carried before.
        announced.retain(|ip, _| self.carries.contains(ip));
        self.errors.extend(self.troubles.iter().map(|trouble| {
            let about =
                trouble.pod.as_ref().map(|pod| format!(", pod {}/{}", pod.namespace, pod.name)).unwrap_or_default();
            format!("policy {}{about}: {}", trouble.policy, trouble.message)
        }));
        let gateways = tell::gateways(&self.gateways, &transports);
        self.gateway_ways = gateways.iter().map(status::gateway).collect();
        let running = Running {
            uptime: self.start.elapsed(),
            store: &self.source,
            firewall: self.settings.firewall,
            attach: self.hooks.mode(),
            bypass: self.hooks.bypass(),
            tunnel_addresses: own,
            transport: setting,
            lease_held: self.lease.as_ref().map(|_| self.lease_held),
            lease_revision: self.leases.all,
            gateways,
            ports: &self.ports,
            store_connected: self.store.is_connected(),
            store_problems: self.store.problems(),
            unnamed: &self.left_alone.found,
            errors: &self.errors,
        };
        let mut state = tell::state(&self.world, &facts, &view, &running);
        let mut later = self.forward();
        if !held
            && self.has_flag(config::flags::HOLD)
            && let Err(e) = self.make_stack_path(true, selects).await
        {
            later.push(e.to_string());
        }
        state.problems.extend(later.iter().map(|error| tell::problem(&self.node, error)));
        self.errors.extend(later);
        self.publish.send_replace(Arc::new(state));
        if written {
            self.withheld.written(self.start.elapsed());
        }
        // Before the tables are written, answers to probes and ARP are what an earlier agent left.
        if turned {
            self.sign_of_life();
        }
        self.owned.set(&if self.settings.silent { BTreeMap::new() } else { announced });
        if self.pulse.may_announce(self.start.elapsed()) {
            self.owned.tick();
        }
        self.owned.ask_all();
        self.reach.set_peers(self.carriers.peers(&self.node, &self.world.plan));
        self.keep_lease(cut_off.is_empty());
        for error in &self.errors {
            tracing::error!("{error}");
        }
        self.status_due = true;
    }

    /// Finds out behind which interface each selected pod is, where no route tells.
    async fn find_interfaces(&mut self, links: &LinkTable, classes: &view::Classes) {
        // Whose interface is new is to be known while a pod is overdue.
        let all = self.late.is_any_overdue(self.settings.start_limit, self.start.elapsed());
        let pods = classes.iter().filter(|(_, class)| all || !class.is_empty());
        let ips = pods.filter_map(|(id, _)| Some(&self.world.snapshot.endpoints.get(id)?.ips)).flatten().copied();
        let routed = |ip: &IpAddr| links.host_routes.get(ip).is_some_and(|index| self.roles.pods.contains(index));
        let wanted = ips.filter(|ip| !routed(ip)).collect();
        self.far.find(&wanted, links, &self.roles.pods, std::mem::take(&mut self.look_again)).await;
    }

    /// Makes the shaper where some egress IP has a limit, and removes it where none has.
    async fn open_shaper(&mut self, limits: &BTreeMap<IpAddr, [Bandwidth; 2]>) {
        let done = match limits.is_empty() {
            true => self.shaper.remove(&self.netlink.handle).await,
            false => self.shaper.ensure(&self.netlink.handle).await.map(drop),
        };
        if let Err(e) = done {
            self.errors.push(e.to_string());
        }
    }

    /// Decides which leased blocks are not used for new flows and which are given back. Whether the tables have to be
    /// written again.
    pub(super) fn decide_blocks(&mut self) -> bool {
        let reported = self.world.snapshot.report(&self.node);
        self.withheld.update(&Circumstances {
            node: &self.node,
            plan: &self.world.plan,
            used: &self.used,
            reported,
            ports: &self.ports,
            counted: self.counted,
            now: self.start.elapsed(),
        })
    }

    /// A gateway forwards, and so does a node whose stack sees the first packets of flows. Its errors.
    fn forward(&mut self) -> Vec<String> {
        if !self.world.may_be_gateway(&self.node) && self.settings.firewall == Firewall::Bypass {
            return Vec::new();
        }
        let links = self.links.current();
        let names: Vec<&str> =
            self.roles.uplinks.iter().filter_map(|i| Some(links.links.get(i)?.name.as_str())).collect();
        match self.sysctls.apply(&sysctl::forwarding_settings(names)) {
            Ok(warnings) => warnings.iter().map(|w| format!("{}: {}: {}", w.object, w.message, w.remedy)).collect(),
            Err(e) => vec![e.to_string()],
        }
    }

    /// Keeps the lease while the plan counts on this node as a gateway, and packets of egress IPs can leave it. One that an earlier agent
    /// has left is given up where it does not: that shows that the node lives.
    fn keep_lease(&mut self, connected: bool) {
        let key = Key { namespace: LEASE_NAMESPACE.into(), name: gateway_lease(self.node.as_str()) };
        let wanted = connected && self.world.is_named(&self.node);
        if self.releasing.is_busy() {
            return;
        }
        if self.lease.is_none() && (wanted || self.holds(&key)) {
            let terms = LeaseTerms {
                key,
                identity: self.node.to_string(),
                duration: self.settings.lease_duration,
                renew_every: self.settings.lease_renew,
            };
            self.lease = Some(LeaseKeeper::start(self.store.clone(), terms));
        }
        if !wanted && let Some(lease) = self.lease.take() {
            self.releasing.begin_task(lease.release());
        }
    }

    /// Whether the store says that this node has its lease.
    fn holds(&self, key: &Key) -> bool {
        let lease = self.store.get::<Lease>(key);
        let holder = lease.as_ref().and_then(|lease| lease.spec.as_ref()?.holder_identity.as_deref());
        holder == Some(self.node.as_str())
    }

    /// Whether the settings that the programs have contain a flag.
    pub(super) fn has_flag(&self, flag: u32) -> bool {
        self.writer.present().config.is_some_and(|config| config.flags & flag != 0)
    }

    /// Whether no pod can be behind an interface without our programs.
    async fn are_pods_covered(&self) -> bool {
        if !self.links.is_up_to_date(&self.netlink.handle).await {
            return false;
        }
        let roles = classify(&self.links.current(), &rules(&self.world, &self.node, &self.settings));
        self.hooks.cover(&roles)
    }

    /// Looks what the links are for, and makes sure of the host-stack path: it is there before anything is told to take it.
    pub(super) async fn make_stack_path(&mut self, hold: bool, selects: bool) -> Result<(), FirewallError> {
        let links = self.links.current();
        self.roles = classify(&links, &rules(&self.world, &self.node, &self.settings));
        self.exits = self.hooks.exits();
        let spec = Spec {
            mark: self.settings.firewall_mark,
            index: self.tunnel.index,
            port: self.settings.tunnel.port,
            addresses: self.tunnel_addresses().into_iter().collect(),
            exits: self.exits.iter().filter_map(|i| Some(links.links.get(i)?.name.clone())).collect(),
            outside: outside(&links, &self.roles, self.tunnel.index),
            selects,
            hold: hold.then(|| view::excepts(&self.node, &self.world.snapshot, &self.left_alone.all)),
        };
        if self.stack_path.ensure(&self.netlink.handle, &links, &spec).await? {
            tracing::info!("the host-stack path of first packets is made");
        }
        Ok(())
    }

    /// The largest packet that fits the tunnel.
    fn room(&self) -> u32 {
        let links = self.links.current();
        let underlays = self.roles.underlays.keys().filter_map(|i| links.links.get(i));
        let mtu = underlays.map(|l| l.mtu).min().unwrap_or(tunnel::MTU).min(tunnel::MTU);
        let ipv6_underlay = self.tunnel_addresses().first().is_some_and(IpAddr::is_ipv6);
        mtu.saturating_sub(OVERHEAD[ipv6_underlay as usize])
    }

    /// The tick at which a TCP connection is over that is silent from now on.
    fn idle_from_now(&self) -> u32 {
        let now = (monotonic_ns() >> TICK_SHIFT) as u32;
        now.saturating_add(ticks(self.settings.timeouts.tcp_established.as_secs()))
    }

    fn config(&self, own: &[IpAddr]) -> Config {
        let room = self.room();
        let mss = |family: usize| room.saturating_sub(HEADERS[family]).max(MIN_MSS);
        let t = &self.settings.timeouts;
        let firewall = match self.settings.firewall {
            Firewall::Respect => config::flags::RESPECT_FIREWALL,
            Firewall::Bypass => 0,
        };
        let unseen = if self.hooks.bypass().is_some() { config::flags::UNSEEN_INBOUND } else { 0 };
        Config {
            tunnel_ifindex: self.tunnel.index,
            mss_v4: mss(0),
            mss_v6: mss(1),
            flags: self.kernel_flags | firewall | unseen,
            room,
            pod_flows: self.settings.pod_flows,
            tcp_established: ticks(t.tcp_established.as_secs()),
            tcp_transitory: ticks(t.tcp_transitory.as_secs()),
            udp: ticks(t.udp.as_secs()),
            icmp: ticks(t.icmp.as_secs()),
            tunnel_port: self.settings.tunnel.port.into(),
            own_v4: own
                .iter()
                .find_map(|a| if let IpAddr::V4(a) = a { Some(net::v4(*a)) } else { None })
                .unwrap_or([0]),
            own_v6: own
                .iter()
                .find_map(|a| if let IpAddr::V6(a) = a { Some(net::v6(*a)) } else { None })
                .unwrap_or([0; 4]),
            shaper_ifindex: self.shaper.ends().map_or(0, |ends| ends.near),
            ..config::UNSET
        }
    }

    /// Where other nodes reach this node's tunnel: its addresses in Kubernetes, IPv4 first, or those of the underlay.
    pub(super) fn tunnel_addresses(&self) -> Vec<IpAddr> {
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
}

/// The classes of the shaper for what tables say: two for each egress IP with limits, out and in.
fn classes_of_shaper(tables: &Tables, limits: &BTreeMap<IpAddr, [Bandwidth; 2]>) -> BTreeMap<u16, Rate> {
    let limited = tables.egress_ips.iter().filter_map(|(index, e)| {
        Some((u16::try_from(*index).ok()?, limits.get(&net::from_any(e.addr)).filter(|_| e.queue != 0)?))
    });
    let rate = |limit: &Bandwidth| Rate { bits: limit.rate_bps, burst: limit.burst_bytes };
    limited.flat_map(|(index, [out, r#in])| [(2 * index + 1, rate(out)), (2 * index + 2, rate(r#in))]).collect()
}

/// The nodes that this one sends to: the gateways that it watches, and as a gateway those that hold blocks of its egress IPs.
fn peers(
    node: &NodeName,
    view: &NodeView,
    world: &World,
    watched: &BTreeSet<(&NodeName, IpAddr)>,
) -> BTreeMap<NodeName, Peer> {
    let own = view.egress_ips.values().filter(|e| e.forwards);
    let sources: BTreeSet<&NodeName> = own.flat_map(|e| e.leases.values()).filter(|n| *n != node).collect();
    let all: BTreeSet<&NodeName> = sources.into_iter().chain(watched.iter().map(|(name, _)| *name)).collect();
    let peer = |name: &NodeName| {
        let address = *view.nodes.get(name)?.first()?;
        let report = world.snapshot.report(name);
        let mac = report.and_then(|r| r.macs.get(&address)).copied();
        // A MAC address that two nodes claim says nothing.
        let mac = mac.filter(|mac| view.macs.get(mac) == Some(name));
        let direct = report.is_some_and(|r| r.receives.contains(transports::name(DIRECT)));
        Some((name.clone(), Peer { address, mac, direct }))
    };
    all.into_iter().filter_map(peer).collect()
}

/// The gateways to probe, and how.
fn targets(
    watched: &BTreeSet<(&NodeName, IpAddr)>,
    view: &NodeView,
    transports: &BTreeMap<NodeName, Transports>,
    setting: Transport,
) -> BTreeMap<NodeName, Target> {
    let mut targets: BTreeMap<NodeName, Target> = BTreeMap::new();
    for (gateway, egress) in watched {
        let (Some(transports), Some(address)) =
            (transports.get(*gateway), view.nodes.get(*gateway).and_then(|a| a.first()))
        else {
            continue;
        };
        let new = || Target { address: *address, egress: BTreeMap::new(), transports: transports.candidates(setting) };
        targets.entry((*gateway).clone()).or_insert_with(new).egress.entry(egress.is_ipv6()).or_insert(*egress);
    }
    targets
}
