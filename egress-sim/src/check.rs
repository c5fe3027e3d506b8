//! Checks the invariants that must hold at every moment.

use super::{
    api::SharedObjects,
    cluster::{SimCluster, SimHost},
    machine::SimAgent,
};
use egress_common::port_block;
use egress_core::{
    model::NodeName,
    plan::{EgressIpPlan, Plan},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    rc::Rc,
    time::Duration,
};

/// The interval of checks while no tables are written.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The longest time in which no machine may answer, after the last fault began or ended and a carrier has become able.
const HOLE: Duration = Duration::from_millis(500);
/// The longest time in which two connected carriers may both answer.
const BOTH: Duration = Duration::from_secs(2);
/// How long a machine must have been healthy to count as a live and reachable carrier.
const WELL: Duration = Duration::from_secs(1);
/// The same after it has lost its lease while others had theirs: `reach::READ`, and the time to detect it.
const READ: Duration = Duration::from_millis(5_500);

/// The state of the checks.
#[derive(Default)]
struct Checks {
    /// The health of each machine.
    health: Vec<Health>,
    /// The last time at which each machine held its lease.
    held: Vec<Option<Duration>>,
    /// Since when no machine answers, and since when, in addition, not all able carriers wait for one that does not know its turn.
    holes: BTreeMap<IpAddr, (Duration, Duration)>,
    both: BTreeMap<(IpAddr, usize, usize), Duration>,
    answering: BTreeMap<IpAddr, Vec<usize>>,
    last_look: Duration,
    /// The numbers of writes of tables up to the last check, and up to the last check of the tables.
    writes: u64,
    checked: u64,
    last_fault: Duration,
    reported: BTreeMap<NodeName, BTreeSet<IpAddr>>,
    read: usize,
}

/// The health of a machine.
#[derive(Clone, Copy, Default)]
struct Health {
    /// Since when it is healthy.
    well: Duration,
    /// The last time at which its agent held its lease.
    held: Option<Duration>,
    /// Since when it holds its lease.
    holds: Option<Duration>,
    /// While it has no lease, the last time at which no other machine had one.
    nobody: Option<Duration>,
    /// Whether it has lost its lease while others could have theirs.
    lost: bool,
}

/// Runs a cluster until its end, or until an invariant is violated.
pub fn run(mut cluster: SimCluster) -> Result<(), String> {
    let machines = cluster.machines.len();
    let (health, held) = (vec![Health::default(); machines], vec![None; machines]);
    let mut checks = Checks { health, held, ..Checks::default() };
    cluster.begin();
    while cluster.step() {
        checks.look(&mut cluster)?;
    }
    checks.finish(&mut cluster)
}

impl Checks {
    /// Checks all invariants.
    fn look(&mut self, cluster: &mut SimCluster) -> Result<(), String> {
        let now = cluster.now;
        let writes = cluster.machines.iter().map(|machine| machine.kernel.writes).sum();
        if std::mem::replace(&mut self.writes, writes) == writes && now < self.last_look + LOOK_EVERY {
            return Ok(());
        }
        self.last_look = now;
        let ends = |f: &super::faults::Planned| [f.from, f.until].into_iter().filter(|at| *at <= now).max();
        self.last_fault = cluster.faults.iter().filter_map(ends).max().unwrap_or_default();
        for n in 0..cluster.machines.len() {
            self.note_health(cluster, n);
        }
        let Some(observed) = truth(cluster) else { return Ok(()) };
        let owned = observed.plan.egress_ips.iter().filter(|(_, e)| e.owner.is_some());
        for (ip, e) in owned {
            let answering: Vec<usize> =
                (0..cluster.machines.len()).filter(|n| answers(&cluster.machines[*n], *ip, now)).collect();
            if cluster.trace && self.answering.get(ip) != Some(&answering) {
                let names: Vec<&NodeName> = answering.iter().map(|n| &cluster.machines[*n].name).collect();
                let line = format!("{ip} is answered for by {names:?}, carriers are {:?}", e.carriers);
                cluster.say(format_args!("{line}"));
            }
            self.check_hole(cluster, *ip, e, &answering)?;
            self.check_both(cluster, *ip, &answering)?;
            self.answering.insert(*ip, answering);
        }
        if std::mem::replace(&mut self.checked, writes) != writes {
            self.note_reports(cluster);
            check_holders(cluster)?;
            self.check_carriers(cluster)?;
        }
        Ok(())
    }

    /// Checks that everything works at the end, after all machines have been healthy for a long time.
    fn finish(&mut self, cluster: &mut SimCluster) -> Result<(), String> {
        let Some(observed) = truth(cluster) else { return Err("there is no plan".into()) };
        for (ip, e) in &observed.plan.egress_ips {
            let answering: Vec<&NodeName> = cluster
                .machines
                .iter()
                .filter(|machine| answers(machine, *ip, cluster.now))
                .map(|machine| &machine.name)
                .collect();
            if answering != e.owner.iter().collect::<Vec<_>>() {
                return Err(format!("in the end {ip} is answered for by {answering:?}, its owner is {:?}", e.owner));
            }
            for machine in cluster.machines.iter().filter(|machine| !machine.is_gateway) {
                let entry = machine.kernel.tables.as_ref().and_then(|tables| tables.egress.get(ip));
                if entry.is_none_or(|entry| entry.blocks.is_empty() || entry.used.is_empty()) {
                    return Err(format!("in the end {} cannot use {ip}", machine.name));
                }
            }
        }
        match observed.plan.egress_ips.is_empty() {
            true => Err("there is no egress IP".into()),
            false => Ok(()),
        }
    }

    fn note_health(&mut self, cluster: &SimCluster, n: usize) {
        let (now, machine) = (cluster.now, &cluster.machines[n]);
        let health = &mut self.health[n];
        let Some(agent) = machine.agent.as_ref().filter(|_| runs(cluster, n)) else {
            // A frozen agent does not know whether others had a lease when its own ended.
            let frozen = machine.agent.as_ref().is_some_and(|agent| !agent.holds(now));
            *health = Health { well: now, lost: health.lost || frozen, ..Health::default() };
            return;
        };
        if !is_touched(cluster, n) || machine.uplink_faults > 0 || cluster.processes[n].api_faults > 0 {
            health.well = now;
        }
        if agent.holds(now) {
            self.held[n] = Some(now);
            health.held = Some(now);
            health.holds = health.holds.or(Some(now));
        } else {
            health.holds = None;
        }
        // As in `Reach`: a starting agent has one lease duration to get its lease.
        let late = match health.held {
            Some(held) => now > held + Duration::from_millis(250),
            None => now > agent.start + cluster.times.lease,
        };
        // If no other machine holds a lease, the API server is unreachable. Once it is back, each agent has one lease duration.
        let others = self.held.iter().enumerate();
        let others = others.filter(|(m, _)| *m != n).any(|(_, held)| held.is_some_and(|held| now < held + HOLE));
        health.nobody = if late && !others { Some(now) } else { health.nobody.filter(|_| late) };
        let passed_by = health.nobody.is_none_or(|last| now > last + cluster.times.lease);
        health.lost |= late && (passed_by || health.well == now);
        health.lost &= health.holds.is_none_or(|since| now < since + READ);
    }

    /// Returns since when a machine has been a live and reachable carrier, or `None` if it is not.
    fn able_since(&self, cluster: &SimCluster, n: usize, ip: IpAddr) -> Option<Duration> {
        let (health, machine) = (&self.health[n], &cluster.machines[n]);
        let read = machine.agent.as_ref()?.observed.plan.egress_ips.get(&ip)?;
        let since = health.well + WELL;
        (!health.lost && cluster.now >= since && read.order().any(|name| *name == machine.name)).then_some(since)
    }

    fn check_hole(&mut self, c: &SimCluster, ip: IpAddr, e: &EgressIpPlan, answering: &[usize]) -> Result<(), String> {
        if !answering.is_empty() {
            self.holes.remove(&ip);
            return Ok(());
        }
        let able = e.order().filter_map(|name| c.index(name)).filter_map(|n| Some((n, self.able_since(c, n, ip)?)));
        let able: Vec<(usize, Duration)> = able.collect();
        let Some(possible) = able.iter().map(|(_, since)| *since).min() else {
            self.holes.remove(&ip);
            return Ok(());
        };
        let (first, known) = self.holes.entry(ip).or_insert((c.now, c.now));
        if able.iter().all(|(n, _)| waits(c, *n, ip)) {
            *known = c.now;
        }
        let [first, known] = [*first, *known].map(|since| since.max(self.last_fault).max(possible));
        if c.now <= known + HOLE && c.now <= first + c.times.lease + HOLE {
            return Ok(());
        }
        let since = first;
        let names: Vec<&NodeName> = able.iter().map(|(n, _)| &c.machines[*n].name).collect();
        Err(format!("no machine has answered for {ip} since {since:?}, although {names:?} could"))
    }

    fn check_both(&mut self, c: &SimCluster, ip: IpAddr, answering: &[usize]) -> Result<(), String> {
        self.both.retain(|(of, a, b), _| *of != ip || answering.contains(a) && answering.contains(b));
        for (at, a) in answering.iter().enumerate() {
            for b in &answering[at + 1..] {
                let since = self.both.entry((ip, *a, *b)).or_insert(c.now);
                if are_parted(c, *a, *b) {
                    *since = c.now;
                }
                if c.now > *since + BOTH {
                    let names = [a, b].map(|n| &c.machines[*n].name);
                    return Err(format!(
                        "{names:?} have both answered for {ip} since {since:?}, although they are connected"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Records everything that agents have ever reported.
    fn note_reports(&mut self, cluster: &SimCluster) {
        for node in cluster.server.egress_nodes(&mut self.read) {
            let (Some(name), Some(status)) = (&node.metadata.name, &node.status) else { continue };
            let carries = self.reported.entry(name.as_str().into()).or_default();
            carries.extend(status.carries.iter().filter_map(|ip| ip.egress_ip.parse::<IpAddr>().ok()));
        }
    }

    /// Checks that a node uses a block only with carriers that have confirmed the block, have reported its egress IP, and have the block in
    /// their tables.
    fn check_carriers(&self, c: &SimCluster) -> Result<(), String> {
        for (n, machine) in c.machines.iter().enumerate() {
            let Some(tables) = machine.kernel.tables.as_ref() else { continue };
            // The objects that it has read may be stale.
            let late = c.now < self.health[n].well + WELL;
            for (ip, entry) in tables.egress.iter().filter(|(_, entry)| !entry.blocks.is_empty()) {
                for carrier in entry.used.iter().filter(|name| **name != machine.name) {
                    let highest = highest(tables.observed.plan.blocks.get(ip), &entry.blocks);
                    let said = c.index(carrier).and_then(|n| c.machines[n].said.get(&machine.name)).copied();
                    if said.is_none_or(|said| said < highest) {
                        return Err(format!(
                            "{} uses blocks of {ip} up to revision {highest} with {carrier}, which has confirmed revision {said:?}",
                            machine.name
                        ));
                    }
                    if self.reported.get(carrier).is_none_or(|ips| !ips.contains(ip)) {
                        return Err(format!(
                            "{} uses blocks of {ip} with {carrier}, which has not reported it",
                            machine.name
                        ));
                    }
                    if !late && let Some(block) = missing(c, carrier, *ip, machine, &entry.blocks) {
                        return Err(format!(
                            "{} uses block {block} of {ip} with {carrier}, whose tables do not have it",
                            machine.name
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the objects and the plan in the API server.
fn truth(cluster: &mut SimCluster) -> Option<Rc<SharedObjects>> {
    cluster.refresh_truth();
    cluster.truth.clone()
}

fn answers(machine: &SimHost, ip: IpAddr, now: Duration) -> bool {
    machine.powered && machine.uplink_faults == 0 && machine.kernel.answers(ip, now)
}

/// Returns whether a machine's agent runs.
fn runs(c: &SimCluster, n: usize) -> bool {
    c.machines[n].powered && c.machines[n].agent.is_some() && c.processes[n].frozen == 0
}

/// Returns whether a machine is connected with a relevant machine: another carrier of its egress IPs whose programs answer, or a node that
/// probes it.
fn is_touched(c: &SimCluster, n: usize) -> bool {
    if c.cuts.values().all(|faults| *faults == 0) && c.machines.iter().all(|machine| machine.powered) {
        return true;
    }
    let name = &c.machines[n].name;
    let plan = |m: usize| c.machines[m].agent.as_ref().map(|agent| &agent.observed.plan);
    let carries = |plan: &Plan, with: &NodeName| {
        plan.egress_ips.values().any(|e| e.order().any(|of| of == name) && e.order().any(|of| of == with))
    };
    let others = c.machines.iter().enumerate().filter(|(m, machine)| *m != n && machine.powered);
    others.filter(|(m, _)| c.is_linked(n, *m) && c.is_linked(*m, n)).any(|(m, machine)| {
        let answers = machine.kernel.tables.is_some() && plan(n).is_some_and(|plan| carries(plan, &machine.name));
        let asks = !machine.is_gateway && runs(c, m) && plan(m).is_some_and(|plan| carries(plan, name));
        answers || asks
    })
}

/// Returns whether a carrier waits for an earlier one that does not know its turn because its agent does not run or cannot read. The
/// earlier carrier's programs report it as able until the deadline, or until it has lost its lease.
fn waits(c: &SimCluster, n: usize, ip: IpAddr) -> bool {
    let Some(read) = c.machines[n].agent.as_ref().and_then(|agent| agent.observed.plan.egress_ips.get(&ip)) else {
        return false;
    };
    let before = read.order().take_while(|name| **name != c.machines[n].name).filter_map(|name| c.index(name));
    before.filter(|m| c.is_linked(n, *m) && c.is_linked(*m, n)).any(|m| {
        let knows =
            |agent: &SimAgent| agent.observed.plan.egress_ips.get(&ip).is_some_and(|e| e.order().eq(read.order()));
        let says = c.now < c.machines[m].kernel.able_until;
        says && !(runs(c, m) && c.machines[m].agent.as_ref().is_some_and(knows))
    })
}

/// Returns whether two machines are partitioned, or the agent of one does not run or is offline.
fn are_parted(c: &SimCluster, a: usize, b: usize) -> bool {
    let deaf = |n: usize| !runs(c, n) || !c.is_online(n);
    deaf(a) || deaf(b) || !c.is_linked(a, b) || !c.is_linked(b, a)
}

/// Checks that no block is used by two nodes or usable on two nodes.
fn check_holders(cluster: &SimCluster) -> Result<(), String> {
    let mut holders: BTreeMap<IpAddr, [Option<&NodeName>; port_block::COUNT as usize]> = BTreeMap::new();
    for machine in &cluster.machines {
        let flows = machine.kernel.flows.iter();
        let flows = flows.filter_map(|flow| Some((flow.egress, port_block::of_port(flow.port)?)));
        let usable = machine.kernel.tables.iter().flat_map(|tables| &tables.egress);
        let usable = usable.flat_map(|(ip, entry)| entry.blocks.iter().map(|block| (*ip, *block)));
        for (ip, block) in flows.chain(usable) {
            let of_address = holders.entry(ip).or_insert_with(|| [None; port_block::COUNT as usize]);
            let holder = of_address[usize::from(block)].get_or_insert(&machine.name);
            if **holder != machine.name {
                return Err(format!("{holder} and {} both use block {block} of {ip}", machine.name));
            }
        }
    }
    Ok(())
}

/// Returns the highest revision of some blocks' leases.
fn highest(leases: Option<&egress_core::plan::Blocks>, blocks: &[u16]) -> u64 {
    let leases = leases.into_iter().flat_map(|leases| blocks.iter().filter_map(|block| leases.get(block)));
    leases.map(|lease| lease.revision).max().unwrap_or(0)
}

/// Returns a block whose packets an able carrier would drop.
fn missing(c: &SimCluster, carrier: &NodeName, ip: IpAddr, of: &SimHost, blocks: &[u16]) -> Option<u16> {
    let machine = &c.machines[c.index(carrier)?];
    let able = machine.powered && c.now < machine.kernel.able_until;
    let tables = machine.kernel.tables.as_ref().filter(|_| able)?;
    let forwards = tables.egress.get(&ip).is_some_and(|entry| entry.forwards);
    let leases = tables.observed.plan.blocks.get(&ip).filter(|_| forwards);
    let lets = |block: &u16| leases.and_then(|l| l.get(block)).is_some_and(|lease| lease.node == of.name);
    blocks.iter().copied().find(|block| !lets(block))
}
