//! Carries out the machine's actions.

use super::{Agent, AgentSettings, hooks::Wanted, status, tell};
use crate::store::{
    Key,
    lease::{LEASE_NAMESPACE, LeaseKeeper, LeaseTerms, gateway_lease},
};
use egress_common::{net, port_block, verdict::Counter};
use egress_core::{
    agent::{facts::Facts, machine::Action},
    encode::{NodeView, fit, tables::Tables},
    model::{Bandwidth, Transport},
    network::classify::{InterfaceRules, classify, outside},
};
use egress_node::{
    datapath::monotonic_ns,
    host::{
        firewall::{FirewallError, Spec},
        ports::NodePorts,
        probe::ProbeSocket,
        shaper::Rate,
        sysctl, tunnel,
    },
};
use egress_objects::api::{EgressNode, ProgrammedPolicy};
use ipnet::IpNet;
use k8s_openapi::{api::coordination::v1::Lease, jiff::Timestamp};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

/// The time in which a controller has usually created the object of a node that joins.
const OBJECT_WITHIN: Duration = Duration::from_secs(5);
/// Why the status of a node that joins is not written yet.
const NO_OBJECT: &str = "this node has no EgressNode yet, so its status waits";

/// Returns the inputs that determine where programs are attached.
pub(super) fn wanted(
    rules: InterfaceRules,
    tunnel: &tunnel::Tunnel,
    settings: &AgentSettings,
    shaper: Option<u32>,
    gateway: bool,
) -> Wanted {
    let underlay = settings.machine.transport != Transport::Device;
    Wanted { rules, tunnel: tunnel.index, underlay, shaper, xdp: settings.xdp, gateway }
}

impl Agent {
    pub(super) async fn carry_out(&mut self, action: Action) {
        match action {
            Action::Probe(name, request) => {
                if let Err(e) = self.socket.send(&request) {
                    tracing::debug!("probe to {name} ({}): {e}", request.remote);
                }
            }
            Action::Heartbeat { able, held } => self.send_heartbeat(able, held),
            Action::ReadCounters => self.read_counters(),
            Action::CountPorts(growth) => self.begin_count(growth),
            Action::LookAgain => self.look_again().await,
            Action::FindInterfaces(wanted) => {
                let anew = std::mem::take(&mut self.look_again);
                let facts = self.machine.facts();
                self.far.find(&wanted, &facts.links, &facts.roles.pods, anew).await;
                self.machine.handle_interfaces(self.far.interfaces());
            }
            Action::SeeIfCovered => {
                if self.are_pods_covered().await {
                    self.machine.handle_covered();
                }
            }
            Action::MakeStackPath { selects, hold } => match self.make_stack_path(selects, hold).await {
                Ok(()) => self.machine.handle_stack_path(),
                Err(e) => self.machine.handle_error(e),
            },
            Action::MakeShaper(wanted) => self.make_shaper(wanted).await,
            Action::Attach { shaper, gateway } => {
                self.hooks.set(wanted(self.machine.rules(), &self.tunnel, &self.settings, shaper, gateway));
                self.hooks.errors().into_iter().for_each(|e| self.machine.handle_error(e));
            }
            Action::FindRoutes(addresses) => {
                self.routes.find(&self.netlink, &self.machine.facts().links, &addresses).await;
                self.machine.handle_routes(self.routes.found().clone());
            }
            Action::Write { view, limits } => self.write(view, &limits).await,
            Action::OpenAgain(egress_ips) => self.open_again(&egress_ips),
            Action::Advertise(wanted) => {
                if let Err(e) = self.advertised.set(&self.netlink.handle, &wanted).await {
                    self.machine.handle_error(e);
                }
            }
            Action::Forward(uplinks) => self.forward(&uplinks),
            Action::Announce(wanted) => {
                self.owned.set(&wanted);
                self.announce_due();
                self.owned.ask_all();
            }
            Action::KeepLease(wanted) => self.keep_lease(wanted),
            Action::Publish => self.publish(),
            Action::WriteStatus => self.write_status(),
        }
    }

    fn send_heartbeat(&mut self, able: Duration, held: Duration) {
        let until = |length: Duration| (!length.is_zero()).then(|| monotonic_ns() + length.as_nanos() as u64);
        let written = self.writer.set_deadline(until(able).unwrap_or(0));
        if let Err(e) = written.and_then(|()| until(held).map_or(Ok(()), |held| self.writer.set_lease(held))) {
            tracing::error!("cannot extend the deadline; the datapath will stop answering for egress IPs: {e}");
        }
    }

    fn read_counters(&mut self) {
        // The time is taken before the counters are read, so later counts appear as changes at the next read.
        let now = self.now();
        let read = |counter| self.maps.counter(counter);
        match (read(Counter::ProbeAnswered), read(Counter::PortsTight)) {
            (Ok(answered), Ok(tight)) => self.machine.handle_counters(answered, tight, now),
            (Err(e), _) | (_, Err(e)) => tracing::warn!("{e}"),
        }
    }

    async fn look_again(&mut self) {
        self.look_again = true;
        self.reopen_tunnel().await;
        self.routes.check_secured();
        self.advertised.look_again();
        // This walks the kernel's whole socket table, which takes seconds on a node with a million connections.
        self.sockets.begin_sparingly(NodePorts::read);
    }

    /// Ensures that the tunnel device exists. Another program may have deleted it.
    async fn reopen_tunnel(&mut self) {
        match tunnel::ensure(&self.netlink.handle, &self.settings.tunnel).await {
            Ok(tunnel) if tunnel.index == self.tunnel.index => {}
            Ok(tunnel) => match ProbeSocket::open(tunnel.index) {
                Ok(socket) => {
                    self.socket = socket;
                    self.machine.handle_tunnel(tunnel.index);
                    self.tunnel = tunnel;
                }
                Err(e) => tracing::error!("probes cannot be sent: {e}"),
            },
            Err(e) => tracing::error!("{e}"),
        }
    }

    /// Returns whether every pod is behind an interface that has our programs.
    async fn are_pods_covered(&self) -> bool {
        self.links.is_up_to_date(&self.netlink.handle).await
            && self.hooks.cover(&classify(&self.links.current(), &self.machine.rules()))
    }

    /// Ensures that the host-stack path exists before any packet takes it.
    pub(super) async fn make_stack_path(
        &mut self,
        selects: bool,
        hold: Option<BTreeSet<IpNet>>,
    ) -> Result<(), FirewallError> {
        let Facts { links, roles, exits, .. } = self.machine.facts();
        let spec = Spec {
            mark: self.settings.firewall_mark,
            index: self.tunnel.index,
            port: self.settings.tunnel.port,
            addresses: self.machine.tunnel_addresses().into_iter().collect(),
            exits: exits.iter().filter_map(|i| Some(links.links.get(i)?.name.clone())).collect(),
            outside: outside(links, roles, self.tunnel.index),
            selects,
            hold,
        };
        if self.stack_path.ensure(&self.netlink.handle, links, &spec).await? {
            tracing::info!("the host-stack path for first packets is set up");
        }
        Ok(())
    }

    /// Creates the shaper if an egress IP has a limit (`wanted`), and removes it otherwise.
    async fn make_shaper(&mut self, wanted: bool) {
        let done = match wanted {
            true => self.shaper.ensure(&self.netlink.handle).await.map(drop),
            false => self.shaper.remove(&self.netlink.handle).await,
        };
        if let Err(e) = done {
            self.machine.handle_error(e);
        }
        self.machine.handle_shaper(self.shaper.ends());
    }

    async fn write(&mut self, mut view: Box<NodeView>, limits: &BTreeMap<IpAddr, [Bandwidth; 2]>) {
        let written = match self.encoder.fit(&mut view, self.writer.present()) {
            Ok((tables, refused)) => {
                let classes = classes_of_shaper(&tables, limits);
                if let Err(e) = self.shaper.set(&self.netlink.handle, &classes).await {
                    self.machine.handle_error(e);
                }
                self.writer.write(tables).map(|()| refused).map_err(|e| e.to_string())
            }
            Err(overflow) => {
                let held = self.writer.write(fit::held(self.writer.present()));
                let what = held.map_or_else(
                    |e| format!("unknown sources are not held: {e}"),
                    |()| "unknown sources are held".into(),
                );
                Err(format!("{overflow}: nothing else was changed, and {what}"))
            }
        };
        match written {
            Ok(refused) => self.machine.handle_written(&view, &refused, self.start.elapsed()),
            Err(e) => self.machine.handle_not_written(e, self.writer.present().config.map_or(0, |config| config.flags)),
        }
        self.view = view;
    }

    fn forward(&mut self, uplinks: &[String]) {
        match self.sysctls.apply(&sysctl::forwarding_settings(uplinks.iter().map(String::as_str))) {
            Ok(warnings) => {
                let told = warnings.iter().map(|w| format!("{}: {}: {}", w.object, w.message, w.remedy));
                told.for_each(|warning| self.machine.handle_error(warning));
            }
            Err(e) => self.machine.handle_error(e),
        }
    }

    /// Holds the lease while the plan uses this node as a gateway and packets of egress IPs can leave it. Otherwise releases the lease,
    /// even one that an earlier agent left, because it would report the node as alive.
    fn keep_lease(&mut self, wanted: bool) {
        let key = Key { namespace: LEASE_NAMESPACE.into(), name: gateway_lease(self.node.as_str()) };
        if self.releasing.is_busy() {
            return;
        }
        if self.lease.is_none() && (wanted || self.holds(&key)) {
            let terms = LeaseTerms {
                key,
                identity: self.node.to_string(),
                duration: self.settings.machine.lease_duration,
                renew_every: self.settings.lease_renew,
            };
            self.lease = Some(LeaseKeeper::start(self.store.clone(), terms));
        }
        if !wanted && let Some(lease) = self.lease.take() {
            self.releasing.begin_task(lease.release());
        }
    }

    /// Returns whether this node holds its lease according to the store.
    fn holds(&self, key: &Key) -> bool {
        let lease = self.store.get::<Lease>(key);
        let holder = lease.as_ref().and_then(|lease| lease.spec.as_ref()?.holder_identity.as_deref());
        holder == Some(self.node.as_str())
    }

    fn publish(&mut self) {
        let view = std::mem::take(&mut self.view);
        let state = tell::state(self, &view);
        self.publish.send_replace(Arc::new(state));
        self.log_errors();
    }

    pub(super) fn log_errors(&self) {
        self.machine.outcome().errors.iter().for_each(|error| tracing::error!("{error}"));
    }

    /// Writes the status if it differs.
    fn write_status(&mut self) {
        let store = self.store.clone();
        // Read the current object. The observed one may lack this agent's last write, and the next write would then conflict.
        let present = store.get::<EgressNode>(&Key::cluster(self.node.as_str()));
        let Some(present) = present.map(Arc::unwrap_or_clone) else {
            // The controller creates the object. Its appearance leads to a round, and each round to a report.
            if self.now() >= OBJECT_WITHIN && self.status_writes.is_news(NO_OBJECT) {
                tracing::info!("{NO_OBJECT}: a controller that runs creates it, if the node has a Node object");
            }
            return self.machine.handle_status(true);
        };
        let status = status::status(self, present.status.as_ref(), Timestamp::now());
        let settled =
            |p: &ProgrammedPolicy| p.policy.parse().is_ok_and(|id| self.observed.is_settled(&id, p.generation));
        if present.status.as_ref().is_some_and(|old| !status::is_news(old, &status, settled)) {
            return self.machine.handle_status(true);
        }
        let object = EgressNode { status: Some(status), ..present };
        // The agent's loop must not wait for an API server.
        self.writing.begin_task(async move { store.replace_status(&object).await.map(drop) });
    }

    /// Returns the port blocks that this node itself uses on any of its addresses. A policy may choose one of these addresses, and the
    /// controller must know its blocks before it leases them. The tunnel's port is added because it has no socket that could be found.
    pub(super) fn occupied_blocks(&self) -> Vec<u16> {
        let Some(ports) = &self.node_ports else { return Vec::new() };
        let addresses = self.machine.facts().addresses().into_iter();
        let free: Vec<BTreeSet<u16>> = addresses.map(|(_, net)| ports.free_blocks(net.addr())).collect();
        let tunnel = port_block::of_port(self.settings.tunnel.port);
        let all = 0..egress_core::plan::blocks::FIXED_BLOCKS;
        all.filter(|b| Some(*b) == tunnel || free.iter().any(|f| !f.contains(b))).collect()
    }
}

/// Returns the shaper's classes for these tables: an outbound and an inbound class for each egress IP with limits.
fn classes_of_shaper(tables: &Tables, limits: &BTreeMap<IpAddr, [Bandwidth; 2]>) -> BTreeMap<u16, Rate> {
    let limited = tables.egress_ips.iter().filter_map(|(index, e)| {
        Some((u16::try_from(*index).ok()?, limits.get(&net::from_any(e.addr)).filter(|_| e.queue != 0)?))
    });
    let rate = |limit: &Bandwidth| Rate { bits: limit.rate_bps, burst: limit.burst_bytes };
    limited.flat_map(|(index, [out, r#in])| [(2 * index + 1, rate(out)), (2 * index + 2, rate(r#in))]).collect()
}
