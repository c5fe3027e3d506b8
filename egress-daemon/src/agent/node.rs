//! The agent's loop: feeds events to the machine and carries out its decisions.

use super::{
    aside::Aside, count, facts::ObservedObjects, failing::Failing, hooks::Hooks, owned::Owned, reopen, routes::Routes,
    settings::AgentSettings, trace::Change,
};
use crate::{
    observe::state::AgentState,
    store::{
        Changes, Store, StoreError,
        lease::{LeaseKeeper, LeaseState},
    },
};
use anyhow::Context as _;
use egress_core::{
    agent::{
        facts::Facts,
        machine::{Left, Machine},
    },
    encode::{Encoder, NodeView},
    model::NodeName,
};
use egress_node::{
    datapath::{
        Pins,
        answers::Answers,
        attach::{self, Attacher},
        load::Programs,
        maps::Maps,
        monotonic_ns,
        write::MapWriter,
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
};
use futures::FutureExt as _;
use std::{
    collections::BTreeMap,
    future::Future,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::{mpsc, watch};

/// The options of an agent.
pub struct Options {
    /// The agent's node.
    pub node: String,
    /// The loaded programs.
    pub programs: Programs,
    /// The objects.
    pub store: Store,
    /// The settings.
    pub settings: AgentSettings,
    /// The directory of the pins.
    pub bpffs: PathBuf,
    /// The file that keeps the previous values of sysctls.
    pub journal: PathBuf,
    /// The source of the objects, for display: `directory /etc/spillway`.
    pub source: String,
    /// The channel on which the agent publishes its state.
    pub publish: watch::Sender<Arc<AgentState>>,
    /// The traces that begin and end.
    pub traces: mpsc::UnboundedReceiver<Change>,
}

/// The number of probe intervals after which every node knows that this node no longer answers, and the next carrier has announced itself.
const NOTICE: u32 = 10;
/// The longest wait for this when the agent stops. The rest of the pod's grace period (10 s) is for a cleanup of the node.
const NOTICE_AT_MOST: Duration = Duration::from_secs(3);

/// After a turn that read objects, changes wait for this many times its duration, at most [`REST_AT_MOST`]. Such a turn's cost grows with
/// the cluster, so that thousands of successive changes would otherwise keep a processor busy.
const REST: u32 = 3;
const REST_AT_MOST: Duration = Duration::from_millis(500);

/// A running agent: the machine that decides, and the state of the node that it decides about.
pub struct Agent {
    pub(super) machine: Machine,
    pub(super) node: NodeName,
    pub(super) settings: AgentSettings,
    pub(super) observed: ObservedObjects,
    pub(super) start: Instant,
    pub(super) store: Store,
    pub(super) links: Links,
    pub(super) tunnel: tunnel::Tunnel,
    pub(super) shaper: Shaper,
    pub(super) advertised: Advertised,
    pub(super) netlink: Netlink,
    pub(super) sysctls: Sysctls,
    pub(super) stack_path: StackPath,
    pub(super) hooks: Hooks,
    pub(super) maps: Arc<Maps>,
    pub(super) writer: MapWriter,
    pub(super) encoder: Encoder,
    /// The view of the last attempt to write the maps, until it is published.
    pub(super) view: Box<NodeView>,
    pub(super) socket: ProbeSocket,
    pub(super) answers: Answers,
    pub(super) routes: Routes,
    pub(super) far: FarEnds,
    pub(super) look_again: bool,
    pub(super) owned: Owned,
    pub(super) lease: Option<LeaseKeeper>,
    /// A lease that is being released.
    pub(super) releasing: Aside<()>,
    pub(super) counting: Aside<count::Count>,
    /// Sends the egress IPs whose connections may have to be reopened.
    pub(super) reopening: mpsc::UnboundedSender<BTreeMap<u32, u32>>,
    /// The number of flows of each account at the last count.
    pub(super) account_flows: BTreeMap<u32, u64>,
    /// The status that is being written to the store.
    pub(super) writing: Aside<Result<(), StoreError>>,
    /// The failures of writes of the status.
    pub(super) status_writes: Failing,
    pub(super) sockets: Aside<Result<NodePorts, PortsError>>,
    pub(super) node_ports: Option<NodePorts>,
    pub(super) source: String,
    pub(super) publish: watch::Sender<Arc<AgentState>>,
}

impl Agent {
    /// Starts everything that needs no object, and takes over the maps and hooks that an earlier agent left.
    pub async fn start(options: Options) -> anyhow::Result<Self> {
        let Options { node, mut programs, store, mut settings, bpffs, journal, source, publish, traces } = options;
        let start = Instant::now();
        settings.machine.clock = Duration::from_nanos(monotonic_ns());
        let pins = Pins::new(&bpffs);
        settings.machine.config.flags |= programs.kernel_flags();
        let answers = Answers::open(&pins)?;
        let writer = MapWriter::open(Maps::open(&pins)?)?;
        let maps = Arc::new(Maps::open(&pins)?);
        let mode = settings.attach.unwrap_or_else(attach::mode);
        let attacher = Attacher::new(programs, pins, mode);
        let links = Links::follow(LinksOptions::default()).await.context("links cannot be followed")?;
        let netlink = Netlink::open().context("netlink")?;
        let sysctls = Sysctls::open(journal).context("the journal of sysctls")?;
        let tunnel = tunnel::ensure(&netlink.handle, &settings.tunnel).await?;
        let socket = ProbeSocket::open(tunnel.index).context("probes cannot be sent")?;
        let node = NodeName::from(node.as_str());
        let mut observed = ObservedObjects::default();
        observed.read(&store, &node);
        let facts = Facts {
            node: node.clone(),
            objects: observed.meant.clone(),
            links: links.current(),
            tunnel: tunnel.index,
            ..settings.facts.clone()
        };
        let left = Left::from(writer.present());
        let gateway = !left.carried.is_empty();
        let machine = Machine::new(settings.machine.clone(), left, facts);
        let wanted = super::actions::wanted(machine.rules(), &tunnel, &settings, None, gateway);
        let reopening = reopen::start(maps.clone(), settings.machine.probe.interval);
        Ok(Self {
            machine,
            node,
            observed,
            start,
            hooks: Hooks::start(attacher, links.subscribe(), wanted, traces),
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
            maps,
            encoder: Encoder::recover(writer.present()),
            writer,
            view: Box::default(),
            socket,
            answers,
            routes: Routes::default(),
            far: FarEnds::open().context("netlink")?,
            look_again: false,
            lease: None,
            releasing: Aside::default(),
            counting: Aside::default(),
            reopening,
            account_flows: BTreeMap::new(),
            writing: Aside::default(),
            status_writes: Failing::default(),
            sockets: Aside::default(),
            // The first report needs them.
            node_ports: NodePorts::read().inspect_err(|e| tracing::warn!("cannot read the node's own ports: {e}")).ok(),
            source,
            publish,
        })
    }

    /// Runs until `stop` is ready. The attached programs and written maps stay.
    pub async fn run(mut self, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        let mut changes = self.store.changes();
        let mut links = self.links.subscribe();
        let mut stop = std::pin::pin!(stop);
        // No packet may take the host-stack path before the programs at its end are attached.
        self.hooks.started().await;
        self.see_hooks();
        // An earlier agent's rules stay. More follow once the agent knows which pods are selected.
        self.make_stack_path(false, self.machine.held()).await?;
        self.carry_all_out().await;
        self.machine.handle_start(self.now());
        let mut rest_until = self.start;
        loop {
            let mut read_at = None;
            let current = self.links.current();
            let wake = self.next_wake();
            tokio::select! {
                () = &mut stop => break,
                () = objects_changed(&mut changes, rest_until) => {
                    read_at = Some(Instant::now());
                    if self.observed.read(&self.store, &self.node) {
                        self.machine.handle_objects(self.observed.meant.clone());
                    }
                }
                changed = links.changed() => {
                    changed.context("the watch of links has ended")?;
                    self.machine.handle_links(links.borrow_and_update().clone());
                }
                answer = self.answers.next() => match answer {
                    Ok(answer) => self.machine.handle_probe(&answer, self.now()),
                    Err(e) => tracing::warn!("cannot read replies to probes: {e}"),
                },
                rival = self.owned.rival(&current) => if self.owned.defend(rival) {
                    tracing::warn!("another host claims {rival}: announcing it again");
                },
                () = self.hooks.changed() => self.see_hooks(),
                counted = self.counting.done() => self.take_count(counted.unwrap_or_else(|| count::failed(self.now()))),
                ports = self.sockets.done() => match ports {
                    Some(Ok(ports)) if self.node_ports.as_ref() != Some(&ports) => {
                        self.node_ports = Some(ports);
                        self.machine.handle_news();
                    }
                    Some(Err(e)) => tracing::warn!("cannot read the node's own ports: {e}"),
                    _ => {}
                },
                () = lease_changed(&mut self.lease) => {}
                _ = self.releasing.done() => self.machine.handle_released(),
                written = self.writing.done() => {
                    self.take_written(written);
                }
                () = tokio::time::sleep_until(wake.into()) => {}
            }
            self.turn().await;
            if let Some(read_at) = read_at {
                rest_until = Instant::now() + (read_at.elapsed() * REST).min(REST_AT_MOST);
            }
        }
        // The lease is not released, because the next agent continues it.
        if self.machine.handle_stop(self.now()) {
            self.carry_all_out().await;
            self.log_errors();
            tokio::time::sleep(notice(self.settings.machine.probe.interval)).await;
        }
        self.hooks.stop().await;
        Ok(())
    }

    /// Returns the time since the start.
    pub(super) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn next_wake(&self) -> Instant {
        let (_, silent_until) = self.machine.may_announce(self.now());
        let claims = self.owned.next().map(|next| next.max(self.start + silent_until));
        claims.into_iter().fold(self.start + self.machine.next_wake(), Instant::min)
    }

    /// Runs the steps that follow each event.
    async fn turn(&mut self) {
        // Takes all answers that have arrived before any counts as missed. This loop may be late, rather than the gateways.
        while let Some(Ok(answer)) = self.answers.next().now_or_never() {
            self.machine.handle_probe(&answer, self.now());
        }
        let until = match self.lease.as_ref().map(LeaseKeeper::state) {
            Some(LeaseState::Held { until, .. }) => until.saturating_duration_since(self.start),
            _ => Duration::ZERO,
        };
        self.machine.handle_lease(until);
        self.machine.handle_timeout(self.now());
        self.announce_due();
        self.carry_all_out().await;
    }

    /// Announces the egress IPs that are due, unless pending events must be read first.
    pub(super) fn announce_due(&mut self) {
        if self.machine.may_announce(self.now()).0 {
            self.owned.tick();
        }
    }

    async fn carry_all_out(&mut self) {
        while let Some(action) = self.machine.poll_action(self.now()) {
            self.carry_out(action).await;
        }
    }

    /// Processes the result of a write of the status, which is `None` if its task has failed.
    fn take_written(&mut self, written: Option<Result<(), StoreError>>) {
        match written {
            Some(Ok(())) => {
                self.status_writes.is_over();
                self.machine.handle_status(true);
            }
            // The next read of the objects leads to another write.
            Some(Err(e)) if e.is_conflict() => {
                tracing::debug!("{e}");
                self.machine.handle_status(false);
            }
            failed => {
                let why =
                    failed.and_then(Result::err).map_or_else(|| "its task has failed".to_owned(), |e| e.to_string());
                if self.status_writes.is_news(&why) {
                    tracing::warn!("the status of this node is not up to date: {why}");
                }
                self.machine.handle_status_failed(self.now());
            }
        }
    }

    fn see_hooks(&mut self) {
        self.machine.handle_hooks(self.hooks.exits(), self.hooks.bypass().is_some());
    }
}

/// Returns how long a stopping agent waits for the other nodes to notice.
fn notice(probe_interval: Duration) -> Duration {
    probe_interval.saturating_mul(NOTICE).min(NOTICE_AT_MOST)
}

/// Waits for a change of the objects, but not before `rest_until`. Cancel safe.
async fn objects_changed(changes: &mut Changes, rest_until: Instant) {
    tokio::time::sleep_until(rest_until.into()).await;
    changes.next().await;
}

/// Waits for news of the lease, if there is one. Cancel safe.
async fn lease_changed(lease: &mut Option<LeaseKeeper>) {
    match lease {
        Some(lease) => lease.changed().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_leaves_time_for_a_cleanup_however_rare_probes_are() {
        assert_eq!(notice(Duration::from_millis(200)), Duration::from_secs(2));
        assert_eq!(notice(Duration::from_secs(60)), Duration::from_secs(3));
    }
}
