//! `cargo xtask bench --scale`: measures the planner on clusters too large for any machine, an agent with a full node,
//! and a controller with a large cluster (KWOK). Writes docs/scale.md.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::{Lab, StartOptions, wait_for, wait_until};
use serde::Deserialize;

use super::figures::number;
use super::large::{self, Measured, Size, memory};
use super::report::machine;
use xtask::progress::{self, Step};
use xtask::{build, workspace};

/// Nodes, pods, policies, egress IPs. Spillway is designed for the first size; the others vary one number each.
const SIZES: [[u32; 4]; 5] = [
    [10_000, 150_000, 1_000, 1_000],
    [1_000, 150_000, 1_000, 1_000],
    [10_000, 15_000, 1_000, 1_000],
    [10_000, 150_000, 100, 1_000],
    [10_000, 150_000, 1_000, 100],
];
/// The size that a real API server on this machine can handle.
const LARGE: Size = Size { nodes: 5_000, pods: 50_000, policies: 1_000, egress_ips: 1_000 };
/// Bounds, in milliseconds and bytes.
const FULL_PLAN_MS: f64 = 1_000.0;
const ONE_POD_MS: f64 = 1.0;
const AGENT_BYTES: u64 = 64 << 20;
const CONTROLLER_BYTES: u64 = 1 << 30;

/// The pods and policies of a full node.
const PODS: u32 = 250;
const POLICIES: u32 = 1_000;
const PATIENCE: Duration = Duration::from_secs(120);
/// The time without growth of the agent's memory after which it is read.
const SETTLED: Duration = Duration::from_secs(3);

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Planned {
    nodes: u32,
    pods: u32,
    policies: u32,
    #[serde(rename = "egressIPs")]
    egress_ips: u32,
    plan_from_nothing_ms: f64,
    plan_again_ms: f64,
    plan_and_remember_ms: f64,
    pod_more_ms: f64,
    pod_elsewhere_ms: f64,
    pod_relabelled_ms: f64,
    pod_gone_ms: f64,
    with_plan_bytes: u64,
}

impl Planned {
    fn counts(&self) -> String {
        [self.nodes, self.pods, self.policies, self.egress_ips].map(|n| number(n.into())).join(" | ")
    }

    /// Returns the time of the slowest kind of change of one pod.
    fn one_pod_ms(&self) -> f64 {
        self.pod_more_ms.max(self.pod_elsewhere_ms).max(self.pod_relabelled_ms).max(self.pod_gone_ms)
    }
}

/// The memory of an agent with a full node, in bytes.
struct MeasuredAgent {
    resident: u64,
    maps: u64,
}

/// Measures and writes the page. Fails if a bound is exceeded.
pub fn run() -> Result<()> {
    let binaries = build::binaries(true)?;
    let mut build = workspace::cargo("build");
    build.args(["--release", "-p", "egress-daemon", "--example", "scale", "--example", "fill"]);
    progress::run("build the examples", &mut build)?;
    let planned: Vec<Planned> = SIZES.iter().map(|size| plan(&binaries, size)).collect::<Result<_>>()?;
    let found = Found { planned, agent: agent(&binaries)?, controller: large::measure(&binaries, LARGE)? };
    let path = workspace::root().join("docs/scale.md");
    let page = found.page();
    fs::write(&path, &page).with_context(|| format!("cannot write {}", path.display()))?;
    print!("{page}");
    let missed: Vec<&str> = found.bounds().into_iter().filter(|(_, _, holds)| !holds).map(|(name, ..)| name).collect();
    ensure!(missed.is_empty(), "missed: {}", missed.join("; "));
    Ok(())
}

fn plan(binaries: &Path, size: &[u32; 4]) -> Result<Planned> {
    let step = Step::start(&format!(
        "plan for {} nodes, {} pods, {} policies, {} egress IPs",
        size[0], size[1], size[2], size[3]
    ));
    let program = binaries.join("examples/scale");
    let output = lab::command::output(Command::new(program).args(size.map(|n| n.to_string())))?;
    let planned: Planned = serde_json::from_str(&output).context("what the planner's example printed")?;
    step.end("✓", &format!("{:.0} ms", planned.plan_again_ms));
    Ok(planned)
}

fn agent(binaries: &Path) -> Result<MeasuredAgent> {
    let step = Step::start(&format!("an agent with {PODS} pods and {POLICIES} policies"));
    let mut lab = Lab::builder().workers(1).gateways(1).servers(0).far_servers(0).build()?;
    for n in 0..PODS {
        lab.manifests().write(&format!("pod-{n:03}"), &pod(n))?;
    }
    for n in 0..POLICIES {
        lab.manifests().write(&format!("policy-{n:04}"), &policy(n))?;
    }
    let options = StartOptions::new().binary(&binaries.join("egress-daemon"));
    lab.start_controller("controller", &options)?;
    lab.start_agents(&options)?;
    let maps = lab.pins("worker1").join("maps");
    for (map, count) in [("ENDPOINTS_V4", PODS), ("POLICIES", POLICIES)] {
        let path = maps.join(map);
        let entries = || lab::bpf::map_entries(&path);
        wait_until(&format!("{map} has {count} entries"), PATIENCE, entries, |found| *found >= count as usize)?;
    }
    let pid = lab.agent("worker1").pid();
    let (mut resident, mut since) = (0, Instant::now());
    wait_for("the agent's memory stays as it is", PATIENCE, || {
        let now = memory(pid, "VmHWM")?;
        if now > resident {
            (resident, since) = (now, Instant::now());
        }
        Ok(since.elapsed() >= SETTLED)
    })?;
    let mut total = 0;
    for entry in fs::read_dir(&maps)? {
        total += lab::bpf::map_bytes(&entry?.path())?;
    }
    step.end("✓", &format!("{} MiB", resident >> 20));
    Ok(MeasuredAgent { resident, maps: total })
}

fn pod(n: u32) -> String {
    let app = n % PODS;
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: app-{n}, namespace: default, uid: 00000000-0000-4000-a000-{n:012}, \
         labels: {{app: app-{app}, tier: web}}}}\nspec: {{nodeName: worker1, containers: [{{name: main, image: lab}}]}}\n\
         status: {{phase: Running, podIP: 10.244.1.{n}, podIPs: [{{ip: 10.244.1.{n}}}]}}\n",
    )
}

/// Returns a policy. Four policies select each pod, each for a separate network.
fn policy(n: u32) -> String {
    let (app, host) = (n % PODS, 10 + n % 80);
    format!(
        "apiVersion: spillway.io/v1beta1\nkind: EgressGatewayPolicy\nmetadata: {{name: policy-{n:04}}}\nspec:\n  selectors: \
         [{{podSelector: {{matchLabels: {{app: app-{app}}}}}}}]\n  destinationCIDRs: [\"203.{}.{}.0/24\"]\n  \
         egressGateways:\n  - {{nodeSelector: {{matchLabels: {{egress: \"true\"}}}}, egressIP: \"192.0.2.{host}\"}}\n",
        n / 250,
        n % 250
    )
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// All measurements.
struct Found {
    planned: Vec<Planned>,
    agent: MeasuredAgent,
    controller: Measured,
}

impl Found {
    fn bounds(&self) -> Vec<(&'static str, String, bool)> {
        let Found { planned, agent, controller } = self;
        let largest = &planned[0];
        vec![
            (
                "a full plan in less than 1 s",
                format!("{} ms", number(largest.plan_again_ms)),
                largest.plan_again_ms.max(largest.plan_from_nothing_ms) < FULL_PLAN_MS,
            ),
            (
                "one pod's change in less than 1 ms",
                format!("{} ms", number(largest.one_pod_ms())),
                largest.one_pod_ms() < ONE_POD_MS,
            ),
            (
                "an agent with 250 pods and 1,000 policies in less than 64 MiB",
                format!("{:.1} MiB", mebibytes(agent.resident)),
                agent.resident < AGENT_BYTES,
            ),
            (
                "a controller with 5,000 nodes, 50,000 pods, 1,000 policies and 1,000 egress IPs in less than 1 GiB",
                format!("{:.0} MiB", mebibytes(controller.resident)),
                controller.resident < CONTROLLER_BYTES,
            ),
        ]
    }

    fn page(&self) -> String {
        let Found { planned, agent, controller } = self;
        let mut page = format!(
            "# Scale\n\nWritten by `cargo xtask bench --scale`; do not edit. {}\n\n| | bound | measured |\n| --- | --- | --- |\n",
            machine()
        );
        for (name, measured, holds) in self.bounds() {
            let mark = if holds { "kept" } else { "**missed**" };
            let _ = writeln!(page, "| {mark} | {name} | {measured} |");
        }
        page += "\n## The planner\n\nOne call of the planner, without reading or writing objects: `egress-daemon/examples/scale.rs NODES PODS \
             POLICIES EGRESS_IPS`, built with `--release`. Every hundredth node is a gateway; each policy selects one \
             application, every fourth one with `PerEndpoint`. \"From nothing\" allocates everything anew, \"again\" plans with \
             the previous plan, \"with counts\" does the same and counts what small changes need later, as the controller's \
             full rounds do. Times are CPU time (the planner has one thread), memory is the process's, with snapshot and plan.\n\n\
             | nodes | pods | policies | egress IPs | from nothing, ms | again, ms | with counts, ms | memory, MiB |\n\
             | --: | --: | --: | --: | --: | --: | --: | --: |\n";
        for one in planned {
            let times = [one.plan_from_nothing_ms, one.plan_again_ms, one.plan_and_remember_ms].map(number);
            let memory = mebibytes(one.with_plan_bytes);
            let _ = writeln!(page, "| {} | {} | {memory:.0} |", one.counts(), times.join(" | "));
        }
        page += "\nAfter that, one pod's change is applied to the plan, with the same result as a full plan: one more pod on a node \
             that has pods of the same application; one on a node that has none, which needs port blocks and makes the others' \
             shares smaller; a pod that changes to another application; a pod that is gone. Each is the slowest of \
             eight policies, two of them `PerEndpoint`.\n\n\
             | nodes | pods | policies | egress IPs | more, ms | on another node, ms | relabelled, ms | gone, ms |\n\
             | --: | --: | --: | --: | --: | --: | --: | --: |\n";
        for one in planned {
            let times = [one.pod_more_ms, one.pod_elsewhere_ms, one.pod_relabelled_ms, one.pod_gone_ms].map(number);
            let _ = writeln!(page, "| {} | {} |", one.counts(), times.join(" | "));
        }
        page += "\nA full plan is made for everything else: nodes, namespaces, policies, pools and gateways that change, pods that make \
             two policies conflict, and source nodes that come or go where a policy requires their zone; after an error; and every \
             minute. The other costs of a change grow with the endpoints of its `PerEndpoint` policies, and with the blocks of the \
             egress IPs that its policies share with others.\n";
        let _ = writeln!(
            page,
            "\n## An agent\n\n{PODS} pods of its own node, each selected by four of {POLICIES} policies: at most {:.1} MiB in the \
         process (`VmHWM`, release build), and {:.1} MiB in the kernel for all maps with their default sizes.",
            mebibytes(agent.resident),
            mebibytes(agent.maps)
        );
        let _ = writeln!(
            page,
            "\n## A cluster\n\nA real API server with {} nodes, {} pods, {} policies and {} egress IPs, which `egress-daemon/examples/fill.rs` \
         makes and whose kubelets [KWOK](https://kwok.sigs.k8s.io) simulates; every {}th node is a gateway. In front of it are the real \
         controller, which holds at most {:.0} MiB, and {} real agents, each in a network namespace: those of all gateways, and those of \
         some other nodes, which get the remaining processor time. At the end an agent on a gateway holds {:.0} MiB, and another one \
         {:.0} MiB; one takes {:.1} ms of processor time a second when nothing happens. By the API server's metrics: writes of Spillway's objects; changes of EgressNodes that it sends, to the controller and all these \
         agents together, also in bytes; lists answered by the watch cache, and lists that reach etcd.\n\n| | writes | sent | bytes | lists | at etcd |\n\
         | --- | --: | --: | --: | --: | --: |",
            number(LARGE.nodes.into()),
            number(LARGE.pods.into()),
            number(LARGE.policies.into()),
            number(LARGE.egress_ips.into()),
            number(large::GATEWAY_EVERY.into()),
            mebibytes(controller.resident),
            controller.agents,
            mebibytes(controller.agent[0]),
            mebibytes(controller.agent[1]),
            controller.idle.as_secs_f64() * 1_000.0,
        );
        for (what, cost) in [("all from nothing", &controller.everything)]
            .into_iter()
            .chain(controller.changes.iter().map(|(w, c)| (*w, c)))
        {
            let [cached, etcd] = cost.lists;
            let figures = [cost.writes, cost.told[0], cost.told[1], cached, etcd].map(|count| number(count as f64));
            let _ = writeln!(page, "| {what} | {} |", figures.join(" | "));
        }
        page += "\nRenewals of leases and Events are not counted; writes that are refused are. A node that joins costs two, its object and its \
             status. A pod on a node that has none of its application costs one write immediately, the node's lease. Its policy reports new \
             numbers 5 s later, in one write for all pods that were added meanwhile. Where many policies have new numbers, the controller then \
             waits one second for each of these writes before it makes the next ones: at most one a second on average, however many \
             policies and pods there are. The metric `spillway_policy_endpoints` always has the number of the last plan. Gateways write \
             nothing for it: their answers to probes tell nodes which leases they know. A node's object is sent to the controller, to its own \
             agent and to the gateways' agents; a gateway's is sent to every agent.\n";
        page
    }
}
