//! Keeps the programs attached to their hooks, in a separate task. A pod sends its first packet milliseconds after its
//! interface appears, so attaching must not wait until the agent's loop is free.

use super::{
    native::{self, Natives},
    trace::{self, Change},
};
use egress_core::network::{
    classify::{InterfaceRules, Roles, classify},
    links::LinkTable,
    xdp::Xdp,
};
use egress_node::datapath::{
    attach::{AttachError, Attacher, Hook, Mode},
    load::NATIVE,
    native::Devices,
    strangers::Lookout,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::{mpsc, watch},
    task::{JoinHandle, block_in_place},
};

/// The interval at which the hooks are checked without a change. Other software may detach a program or attach one before it.
const VERIFY: Duration = Duration::from_secs(1);

/// One in this many checks searches all interfaces for foreign programs. New interfaces are searched immediately.
const SEARCH: u32 = 5;

/// The inputs besides the links that determine where programs are attached.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The rules for the roles of links.
    pub rules: InterfaceRules,
    /// The index of the tunnel device.
    pub tunnel: u32,
    /// Whether programs take packets off the underlay's interfaces before the tunnel device sees them.
    pub underlay: bool,
    /// The far end of the shaper, if it exists.
    pub shaper: Option<u32>,
    /// Whether a gateway's packets may be forwarded at the driver.
    pub xdp: Xdp,
    /// Whether this node carries egress IPs.
    pub gateway: bool,
}

/// The task's findings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// The hooks that hold our programs.
    hooks: BTreeSet<Hook>,
    /// The foreign program that may deliver packets to a pod past `pod_ingress`, for display.
    bypass: Option<String>,
    /// The drivers that hold a gateway's program, and why others do not.
    native: Natives,
}

/// A handle to the task that attaches programs.
pub struct Hooks {
    wanted: watch::Sender<Wanted>,
    errors: watch::Receiver<Vec<String>>,
    seen: watch::Receiver<Seen>,
    mode: Mode,
    task: JoinHandle<()>,
}

impl Hooks {
    /// Starts the task, which attaches programs as links and `traces` come and go.
    pub fn start(
        attacher: Attacher,
        links: watch::Receiver<Arc<LinkTable>>,
        wanted: Wanted,
        traces: mpsc::UnboundedReceiver<Change>,
    ) -> Self {
        let mode = attacher.mode();
        let (wanted, receiver) = watch::channel(wanted);
        let (report, errors) = watch::channel(Vec::new());
        let (saw, seen) = watch::channel(Seen::default());
        let task = tokio::spawn(keep(attacher, links, receiver, traces, report, saw));
        Self { wanted, errors, seen, mode, task }
    }

    /// Ends the task and waits for its end. Otherwise it could still attach and pin programs while a cleanup removes them.
    pub async fn stop(&mut self) {
        self.task.abort();
        // The cancellation is not an error.
        let _ = (&mut self.task).await;
    }

    /// Returns how programs are attached.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Replaces the inputs that determine where programs are attached.
    pub fn set(&self, wanted: Wanted) {
        self.wanted.send_replace(wanted);
    }

    /// Returns whether every pod interface in `roles` has its programs or cannot have them.
    pub fn cover(&self, roles: &Roles) -> bool {
        let seen = self.seen.borrow();
        roles.pods.iter().all(|index| seen.hooks.contains(&("pod_egress", *index)))
    }

    /// Returns the interfaces at which outgoing packets are inspected.
    pub fn exits(&self) -> BTreeSet<u32> {
        self.seen.borrow().hooks.iter().filter(|hook| hook.0 == "exit_egress").map(|hook| hook.1).collect()
    }

    /// Waits for the first attempt to attach programs.
    pub async fn started(&mut self) {
        // The channel closes only when the task ends.
        let _ = self.seen.wait_for(|seen| !seen.hooks.is_empty()).await;
    }

    /// Returns the foreign program that may deliver packets to a pod past `pod_ingress`, and its location.
    pub fn bypass(&self) -> Option<String> {
        self.seen.borrow().bypass.clone()
    }

    /// Returns for each interface of a gateway whether its program is at the driver, or why not.
    pub fn native(&self) -> Natives {
        self.seen.borrow().native.clone()
    }

    /// Waits until interfaces gain or lose their programs, or foreign programs come or go. Cancel safe.
    pub async fn changed(&mut self) {
        if self.seen.changed().await.is_err() {
            std::future::pending().await
        }
    }

    /// Returns the errors of the last attempt to attach programs.
    pub fn errors(&self) -> Vec<String> {
        self.errors.borrow().clone()
    }
}

impl Drop for Hooks {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn keep(
    mut attacher: Attacher,
    mut links: watch::Receiver<Arc<LinkTable>>,
    mut wanted: watch::Receiver<Wanted>,
    mut traces: mpsc::UnboundedReceiver<Change>,
    report: watch::Sender<Vec<String>>,
    saw: watch::Sender<Seen>,
) {
    let mut verify = tokio::time::interval(VERIFY);
    let (mut lookout, mut looks) = (Lookout::default(), 0);
    let mut devices = Devices::open(attacher.pins()).ok();
    loop {
        let all = tokio::select! {
            changed = links.changed() => match changed {
                Ok(()) => false,
                Err(_) => return,
            },
            changed = wanted.changed() => match changed {
                Ok(()) => false,
                Err(_) => return,
            },
            _ = verify.tick() => true,
            Some(change) = traces.recv() => {
                block_in_place(|| trace::carry_out(change, &mut attacher));
                true
            }
        };
        let table = links.borrow_and_update().clone();
        let wanted = wanted.borrow_and_update().clone();
        let names: BTreeMap<u32, String> = table.links.values().map(|l| (l.index, l.name.clone())).collect();
        let mut hooks = hooks(&classify(&table, &wanted.rules), &wanted, &table, &names);
        let found = match wanted.gateway && wanted.xdp != Xdp::Off {
            true => block_in_place(|| native::find(wanted.xdp, &hooks, &table, &attacher)),
            false => native::Found::default(),
        };
        hooks.extend(found.hooks().clone());
        let errors = block_in_place(|| {
            // Fill the maps that a program at a driver needs before it is attached.
            found.allow(devices.as_mut());
            attacher.sync(&hooks, &names, all)
        });
        let (failed, errors): (Vec<AttachError>, Vec<AttachError>) =
            errors.into_iter().partition(|error| NATIVE.contains(&error.program));
        let failed = failed.into_iter().map(|error| (error.interface, error.source.to_string())).collect();
        let native = found.in_force(&failed);
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        report.send_if_modified(|old| {
            let changed = *old != errors;
            *old = errors;
            changed
        });
        // An exit without its program must not count, because nothing may leave through it.
        let seen = hooks.into_keys().filter(|hook| hook.0 != "exit_egress" || attacher.attached().contains_key(hook));
        let seen: BTreeSet<Hook> = seen.collect();
        looks += u32::from(all);
        // Search after attaching: the programs of an earlier agent are then gone.
        let ours = attacher.programs();
        let bypass = block_in_place(|| lookout.look(&names, &ours, all && looks % SEARCH == 0)).map(str::to_owned);
        log(saw.borrow().bypass.as_deref(), bypass.as_deref());
        let seen = Seen { hooks: seen, bypass, native };
        saw.send_if_modified(|old| {
            let changed = *old != seen;
            *old = seen;
            changed
        });
    }
}

/// Logs when a foreign program begins or ceases to be able to deliver packets to pods past our programs.
fn log(before: Option<&str>, now: Option<&str>) {
    match (before, now) {
        (None, Some(stranger)) => tracing::warn!(
            "{stranger} may deliver packets to pods without passing our programs, so SYN+ACKs of selected pods pass without a recorded SYN"
        ),
        (Some(_), None) => tracing::info!(
            "no foreign program can deliver packets to pods: a SYN+ACK of a selected pod without a recorded SYN is dropped"
        ),
        _ => {}
    }
}

/// Returns the hooks that should hold our programs. Each interface has one program at its ingress, so that no order matters;
/// the underlay's program also does the uplink's work.
fn hooks(roles: &Roles, wanted: &Wanted, table: &LinkTable, names: &BTreeMap<u32, String>) -> BTreeMap<Hook, String> {
    let tunnel = wanted.tunnel;
    let ethernet = |i: &u32| table.links.get(i).is_some_and(|link| link.mac.is_some() && !link.kind.is_tunnel());
    let underlays: BTreeSet<u32> =
        roles.underlays.keys().filter(|i| wanted.underlay && ethernet(i) && !roles.pods.contains(i)).copied().collect();
    let pods = roles.pods.iter().flat_map(|i| [("pod_egress", *i), ("pod_ingress", *i)]);
    let uplinks = roles.uplinks.iter().filter(|i| !underlays.contains(i)).map(|i| ("uplink_ingress", *i));
    let uplinks = uplinks.chain(underlays.iter().map(|i| ("underlay_ingress", *i)));
    let shaper = wanted.shaper.map(|index| ("shaper_ingress", index));
    let exits = roles.exits.iter().chain([&tunnel]).map(|i| ("exit_egress", *i));
    let all = pods.chain(uplinks).chain(exits).chain([("tunnel_ingress", tunnel)]).chain(shaper);
    all.filter_map(|hook| Some((hook, names.get(&hook.1)?.clone()))).collect()
}
