//! `egressctl diff`: the changes that the objects of a file would cause, as the planner computes them. Reads the file, the objects
//! and the flows of nodes; writes nothing.

mod change;
#[cfg(test)]
mod tests;
mod view;

pub use view::{DiffRow, DiffView};

use super::dump::Dump;
use super::views::{FlowFilter, FlowRow, FlowsView, TRANSLATED, ViewSources, flows, protocol};
use super::{NodeAccess, check_node};
use crate::config::{Config, Foreign};
use crate::controller::objects;
use crate::store::{Files, Kind, Kubernetes, ObjectRef, Reader, Store, parse};
use anyhow::{Context as _, Result, bail};
use egress_core::{
    health::Health,
    model::{EndpointId, Snapshot},
    plan::preview::{LiveFlow, Side, preview, settled},
};
use egress_node::datapath::Pins;
use egress_objects::snapshot::{ApiObjects, previous, snapshot};
use egress_objects::translate::Problem;
use k8s_openapi::api::coordination::v1::Lease;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Read as _;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// How long a cluster may take to return its objects.
const PATIENCE: Duration = Duration::from_secs(30);
const TCP: u32 = 6;
/// The exit code if the changes could not be determined. 0, 1 and this code have the same meaning as for `kubectl diff`.
pub const UNKNOWN: u8 = 2;

/// The inputs of a comparison.
#[derive(Clone, Debug)]
pub struct DiffOptions {
    /// The files with the objects; `-` is stdin.
    pub files: Vec<PathBuf>,
    /// Whether to delete the objects instead of applying them.
    pub delete: bool,
    /// The directory whose objects are in force.
    pub manifests: Option<PathBuf>,
    /// The kubeconfig of the cluster whose objects are in force; `None`: the one that kubectl would use.
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig's context.
    pub context: Option<String>,
    /// The file with the controller's settings, some of which affect the plan.
    pub config: Option<PathBuf>,
}

/// Determines the changes, and the fate of these flows.
pub fn diff(options: &DiffOptions, flows: &[FlowsView]) -> Result<DiffView> {
    let config = Config::load(options.config.as_deref())?;
    let changed = read(&options.files)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = open(options, &config, &changed).await?;
        let (before, leases) = (objects(&store), store.list::<Lease>());
        let health = change::health(leases.iter().map(AsRef::as_ref), config.lease.duration);
        compare(before, changed, options.delete, (&health, &config), flows)
    })
}

/// Returns the flows of this node; `None` if its maps cannot be read, such as when no agent has run with these pins. Fails if the node must
/// have a name that the maps do not show.
pub fn flows_here(access: &NodeAccess) -> Result<Option<FlowsView>> {
    let dump = Dump::read(&Pins::new(&access.bpffs), true).ok();
    check_node(access, dump.as_ref().and_then(Dump::own_name))?;
    Ok(dump.map(|dump| flows(ViewSources { dump: &dump, agent: None }, &FlowFilter::default())))
}

fn read(files: &[PathBuf]) -> Result<Vec<(ObjectRef, Value)>> {
    let (mut all, mut problems) = (Vec::new(), Vec::new());
    for file in files {
        let text = match file.as_os_str() == "-" {
            true => {
                let mut text = Vec::new();
                std::io::stdin().read_to_end(&mut text).context("stdin cannot be read")?;
                text
            }
            false => std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?,
        };
        let (objects, found) = parse(file, &text)?;
        all.extend(objects);
        problems.extend(found.iter().map(ToString::to_string));
    }
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    Ok(all)
}

async fn open(options: &DiffOptions, config: &Config, changed: &[(ObjectRef, Value)]) -> Result<Store> {
    if let Some(directory) = &options.manifests {
        return Files::open(directory).context("--manifests");
    }
    let client = Kubernetes::client_as_kubectl(options.kubeconfig.as_deref(), options.context.as_deref()).await;
    let client = client.context("the cluster")?;
    let mut foreign: Vec<Kind> = config.foreign_kinds.iter().flat_map(Foreign::kinds).copied().collect();
    foreign.extend(changed.iter().map(|(object, _)| object.kind).filter(|kind| kind.is_foreign()));
    foreign.sort();
    foreign.dedup();
    let opening = Kubernetes::open(client, &Reader::Controller, &foreign);
    let store = tokio::time::timeout(PATIENCE, opening).await;
    store.context("the API server has not listed all objects in 30 s: check that you may list every kind that the controller lists")
}

fn compare(
    before: ApiObjects,
    changed: Vec<(ObjectRef, Value)>,
    delete: bool,
    (health, config): (&Health, &Config),
    nodes: &[FlowsView],
) -> Result<DiffView> {
    let mut after = before.clone();
    let mut edits = Vec::new();
    for (object, value) in changed {
        let edit = change::apply(&mut after, &object, (!delete).then_some(value))?;
        edits.extend(edit.map(|edit| (object, edit)));
    }
    let model = |objects: &ApiObjects| {
        let (mut snapshot, problems) = snapshot(objects);
        snapshot.max_egress_ips = config.max_egress_ips_per_node;
        snapshot.drain_timeout = config.drain_timeout;
        (snapshot, problems)
    };
    let ((old, known), (new, problems)) = (model(&before), model(&after));
    refuse(&known, &problems)?;
    let plan = settled(&old, health, &previous(&before));
    let planned = settled(&new, health, &plan);
    let (flows, rows) = live(&old, nodes);
    let found = preview(Side { snapshot: &old, plan: &plan }, Side { snapshot: &new, plan: &planned }, &flows);
    let fates = found.flows.iter().map(|(at, fate)| (rows[*at].clone(), fate.clone())).collect();
    let names = nodes.iter().filter_map(|node| node.node.clone()).collect();
    Ok(DiffView::new(names, flows.len(), &edits, fates, &found))
}

/// Fails if the changed objects have problems that the present objects do not have.
fn refuse(known: &[Problem], problems: &[Problem]) -> Result<()> {
    let new: Vec<String> =
        problems.iter().filter(|problem| !known.contains(problem)).map(ToString::to_string).collect();
    if !new.is_empty() {
        bail!("{}", new.join("\n"));
    }
    Ok(())
}

/// Returns the translated flows of the existing pods, and their rows.
fn live<'a>(snapshot: &Snapshot, nodes: &'a [FlowsView]) -> (Vec<LiveFlow>, Vec<&'a FlowRow>) {
    let pods = snapshot.endpoints.values().flat_map(|pod| pod.ips.iter().map(|ip| (*ip, &pod.id)));
    let pods: BTreeMap<IpAddr, &EndpointId> = pods.collect();
    let of = |row: &'a FlowRow| {
        let live = LiveFlow {
            pod: (*pods.get(&row.pod_address)?).clone(),
            remote: row.remote_address,
            tcp: row.protocol == protocol(TCP),
            egress: row.egress_ip?,
        };
        Some((live, row))
    };
    nodes.iter().flat_map(|node| &node.items).filter(|row| row.kind == TRANSLATED).filter_map(of).unzip()
}
