//! Measures the planner on a large cluster, for `cargo xtask bench --scale`. Prints one JSON object with times in
//! milliseconds and memory in bytes.
//!
//! The cluster's nodes are in three zones, and every hundredth node is a gateway. Pods are spread evenly over the nodes, in
//! as many applications as there are policies. Each policy selects one application and has its share of the egress IPs;
//! every fourth policy is `PerEndpoint`. Sizes are arguments, so that a benchmark can vary each of them.

use anyhow::{Context, bail, ensure};
use egress_core::health::{Health, LeaseState, NodeHealth};
use egress_core::model::*;
use egress_core::plan::{Changes, Memo, Plan, plan, plan_and_remember};
use nix::time::{ClockId, clock_gettime};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// The number of measurements of each figure; the median is reported.
const SAMPLES: usize = 5;

struct Size {
    nodes: u32,
    pods: u32,
    policies: u32,
    egress_ips: u32,
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<u32> = std::env::args()
        .skip(1)
        .map(|text| text.parse().with_context(|| format!("{text} is not a number")))
        .collect::<Result<_, _>>()?;
    let [nodes, pods, policies, egress_ips] = arguments[..] else {
        bail!("usage: scale NODES PODS POLICIES EGRESS_IPS")
    };
    ensure!(
        nodes > 0 && policies > 0 && egress_ips <= 60_000,
        "at least one node and policy, at most 60000 egress IPs"
    );
    let size = Size { nodes, pods, policies, egress_ips };
    let (snapshot, health) = cluster(&size);
    let with_snapshot = resident()?;

    let (first, from_nothing) = timed(1, || plan(&snapshot, &health, &Plan::default()))?;
    let (again, unchanged) = timed(SAMPLES, || plan(&snapshot, &health, &first))?;
    ensure!(again.egress_ips == first.egress_ips, "planning again changed an owner");
    ensure!(first.egress_ips.len() == egress_ips as usize, "{} of {egress_ips} egress IPs", first.egress_ips.len());
    drop(first);
    let ((mut current, memo), remembering) = {
        let mut snapshot = Some(snapshot);
        timed(1, || plan_and_remember(snapshot.take().unwrap_or_default(), &health, &again))?
    };
    drop(again);
    let with_plan = resident()?;
    let mut pods = Pods { memo: Some(memo), health: &health, plan: &mut current };
    let one_pod = pods.measure(&size)?;
    println!(
        "{{\"nodes\": {nodes}, \"pods\": {}, \"policies\": {policies}, \"egressIPs\": {egress_ips}, \
         \"planFromNothingMs\": {:.3}, \"planAgainMs\": {:.3}, \"planAndRememberMs\": {:.3}, \
         \"podMoreMs\": {:.3}, \"podElsewhereMs\": {:.3}, \"podRelabelledMs\": {:.3}, \"podGoneMs\": {:.3}, \
         \"snapshotBytes\": {with_snapshot}, \"withPlanBytes\": {with_plan}}}",
        size.pods,
        millis(from_nothing),
        millis(unchanged),
        millis(remembering),
        millis(one_pod.more),
        millis(one_pod.elsewhere),
        millis(one_pod.relabelled),
        millis(one_pod.gone),
    );
    Ok(())
}

/// A plan that is updated by one pod at a time.
struct Pods<'a> {
    memo: Option<Memo>,
    health: &'a Health,
    plan: &'a mut Plan,
}

/// The times of one pod's changes: for each kind of change, the slowest of the applications' medians.
#[derive(Default)]
struct OnePod {
    /// A new pod on a node that has pods of the same application.
    more: Duration,
    /// A new pod on a node that has no such pods, and so needs port blocks.
    elsewhere: Duration,
    /// A pod that is relabelled to another application.
    relabelled: Duration,
    gone: Duration,
}

impl Pods<'_> {
    /// Measures with pods of the first eight applications. The policy of every fourth application is `PerEndpoint`.
    fn measure(&mut self, size: &Size) -> anyhow::Result<OnePod> {
        let mut slowest = OnePod::default();
        for application in 0..size.policies.min(8) {
            let [mut more, mut elsewhere, mut relabelled, mut gone] = [const { Vec::new() }; 4];
            for sample in 0..SAMPLES as u32 {
                let n = size.pods + sample * size.policies + application;
                let on = |node: u32| pod(n, application, node % size.nodes);
                let home = application + sample * size.policies;
                more.push(self.put(on(home))?);
                gone.push(self.take(on(home))?);
                elsewhere.push(self.put(on(home + 501 + sample))?);
                let id = on(home + 501 + sample).id;
                let other = pod(n, (application + 1) % size.policies, (home + 501 + sample) % size.nodes);
                relabelled.push(self.put(Endpoint { id, ..other })?);
                gone.push(self.take(on(home + 501 + sample))?);
            }
            slowest.more = slowest.more.max(median(more));
            slowest.elsewhere = slowest.elsewhere.max(median(elsewhere));
            slowest.relabelled = slowest.relabelled.max(median(relabelled));
            slowest.gone = slowest.gone.max(median(gone));
        }
        Ok(slowest)
    }

    fn put(&mut self, endpoint: Endpoint) -> anyhow::Result<Duration> {
        self.change(endpoint.id.clone(), Some(endpoint))
    }

    fn take(&mut self, endpoint: Endpoint) -> anyhow::Result<Duration> {
        self.change(endpoint.id, None)
    }

    fn change(&mut self, id: EndpointId, endpoint: Option<Endpoint>) -> anyhow::Result<Duration> {
        let memo = self.memo.take().context("a full plan was needed")?;
        let changes = Changes { pods: BTreeMap::from([(id, endpoint)]), ..Changes::default() };
        let mut once = Some((memo, changes));
        let (changed, time) = timed(1, || {
            let (memo, changes) = once.take()?;
            memo.change(self.health, self.plan, changes)
        })?;
        self.memo = changed.map(|(memo, _)| memo);
        Ok(time)
    }
}

/// Returns the last result and the median CPU time of this thread. The planner uses one thread and never blocks, and
/// other processes disturb CPU time less than wall-clock time.
fn timed<T>(samples: usize, mut work: impl FnMut() -> T) -> anyhow::Result<(T, Duration)> {
    let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let mut sample = || {
        let start = now()?;
        let result = work();
        Ok::<_, nix::Error>((result, now()? - start))
    };
    let (mut last, time) = sample()?;
    let mut times = vec![time];
    for _ in 1..samples {
        let (result, time) = sample()?;
        last = result;
        times.push(time);
    }
    Ok((last, median(times)))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Returns the resident memory of this process, in bytes.
fn resident() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").context("cannot read /proc/self/statm")?;
    let pages: u64 = text.split_whitespace().nth(1).context("no resident size")?.parse()?;
    Ok(pages * 4096)
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn cluster(size: &Size) -> (Snapshot, Health) {
    let (mut snapshot, mut health) = (Snapshot::default(), Health::default());
    for n in 0..size.nodes {
        let mut of_node = labels(&[("kubernetes.io/os", "linux"), ("kubernetes.io/arch", "amd64")]);
        if n % 100 == 0 {
            of_node.insert("egress".to_owned(), "true".to_owned());
        }
        let node = Node {
            name: node_name(n),
            labels: of_node,
            zone: Some(format!("zone-{}", n % 3)),
            addresses: BTreeSet::from([IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + n))]),
            pod_cidrs: BTreeSet::new(),
            ready: true,
            draining: false,
            max_egress_ips: None,
            report: Some(NodeReport::default()),
        };
        if n % 100 == 0 {
            let lease = LeaseState::Fresh { since: Duration::from_secs(100), returned: false, proven: true };
            health.nodes.insert(node.name.clone(), NodeHealth { lease, gone: false });
        }
        snapshot.nodes.insert(node.name.clone(), node);
    }
    for n in 0..50 {
        snapshot.namespaces.insert(format!("team-{n}").into(), labels(&[("team", &n.to_string())]));
    }
    for n in 0..size.pods {
        add_pod(&mut snapshot, size, n);
    }
    let first = Ipv4Addr::new(198, 18, 0, 1).to_bits();
    let range = |a, b| IpRange::new(Ipv4Addr::from_bits(a).into(), Ipv4Addr::from_bits(b).into());
    let pool = PoolId::new(PoolKind::Native, "public");
    snapshot.pools.insert(
        pool.clone(),
        Pool {
            id: pool.clone(),
            ranges: range(first, first + size.egress_ips).into_iter().collect(),
            nodes: Selector::label("egress", "true"),
            subnet: None,
            max_per_node: None,
            failback: Failback::default(),
            carriers: egress_core::model::DEFAULT_CARRIERS,
            announce: egress_core::model::Announce::Arp,
            outbound: egress_core::model::Outbound::Owner,
            allowed: None,
            quotas: Vec::new(),
        },
    );
    for n in 0..size.policies {
        let share = |n: u32| u64::from(n) * u64::from(size.egress_ips) / u64::from(size.policies);
        let count = (share(n + 1) - share(n)) as u32;
        let policy = policy(n, PoolRequest { pool: pool.clone(), count, ips: BTreeSet::new() });
        snapshot.policies.insert(policy.id.clone(), policy);
    }
    (snapshot, health)
}

fn node_name(n: u32) -> NodeName {
    format!("node-{n:05}").as_str().into()
}

fn add_pod(snapshot: &mut Snapshot, size: &Size, n: u32) {
    let endpoint = pod(n, n % size.policies, n % size.nodes);
    snapshot.endpoints.insert(endpoint.id.clone(), endpoint);
}

fn pod(n: u32, application: u32, node: u32) -> Endpoint {
    let id =
        EndpointId::new(&format!("team-{}", application % 50), &format!("app-{application}-{n}"), &format!("{n:036}"));
    let of_pod = labels(&[("app", &format!("app-{application}")), ("tier", "web"), ("pod-template-hash", "5d4f8c7b9")]);
    let ips = BTreeSet::from([IpAddr::V4(Ipv4Addr::from_bits(0x0b00_0000 + n))]);
    Endpoint { id, node: node_name(node), ips, labels: of_pod }
}

fn policy(n: u32, request: PoolRequest) -> Policy {
    let everything: BTreeMap<_, _> = labels(&[("app", &format!("app-{n}"))]);
    Policy {
        id: PolicyId::new(PolicyKind::Native, &format!("policy-{n:04}")),
        uid: format!("{n:036}"),
        generation: 1,
        created: i64::from(n),
        selectors: vec![EndpointSelector { pod: Some(Selector::from_labels(everything)), ..Default::default() }],
        destinations: "0.0.0.0/0".parse().into_iter().collect(),
        excluded: "10.0.0.0/8".parse().into_iter().collect(),
        source: Source::Pools(vec![request]),
        distribution: if n.is_multiple_of(4) { Distribution::PerEndpoint } else { Distribution::PerFlow },
        zone: ZoneMode::Any,
        prefer_local_node: false,
        on_no_gateway: OnNoGateway::Drop,
        existing: Existing::Keep,
        bandwidth: None,
    }
}
