//! A simulated cluster: the decisions of all agents and of two controllers, in virtual time, over a network and an API server whose faults
//! follow from a seed.
//!
//! The real code of the agent and the controller makes the decisions: carriers, reach, blocks, probes, leases, electors, planner and the
//! objects in between. Only their environment is simulated: a kernel's maps, which outlive the agent; probes; the API server's versions,
//! watches and conflicts; time. ARCHITECTURE.md, "The simulated cluster", lists the checked invariants.
//!
//! `SPILLWAY_SIM_SEED=N` replays one seed and prints its events; `SPILLWAY_SIM_SEEDS=N` sets the number of seeds.

#![cfg(test)]

mod api;
mod boss;
mod check;
mod cluster;
mod disturb;
mod events;
mod faults;
mod keeper;
mod lifecycle;
mod machine;
mod rng;
mod scenario;
mod traffic;

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

/// The default number of seeds; `cargo xtask test` runs 1,000.
const SEEDS: u64 = 50;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn faults_leave_one_gateway_per_egress_ip_and_one_holder_per_block() {
    if let Some(seed) = number("SPILLWAY_SIM_SEED") {
        let outcome = check::run(scenario::cluster(seed, true));
        return outcome.unwrap_or_else(|broken| panic!("seed {seed}: {broken}"));
    }
    let (seeds, next) = (number("SPILLWAY_SIM_SEEDS").unwrap_or(SEEDS), AtomicU64::new(0));
    let zero = Instant::now();
    let run = || {
        let mut broken = Vec::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds {
                return broken;
            }
            broken.extend(check::run(scenario::cluster(seed, false)).err().map(|why| (seed, why)));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut broken: Vec<(u64, String)> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        running.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    broken.sort();
    println!("{seeds} seeds in {:?}", zero.elapsed());
    let first: Vec<String> = broken.iter().take(10).map(|(seed, why)| format!("seed {seed}: {why}")).collect();
    assert!(
        broken.is_empty(),
        "{} of {seeds} seeds fail:\n{}\nreplay one: SPILLWAY_SIM_SEED={} cargo test -p egress-sim -- --nocapture",
        broken.len(),
        first.join("\n"),
        broken[0].0
    );
}
