//! Spillway on a real Kubernetes, installed as a user would: the image `FROM scratch`, `kubectl apply -k manifests/`,
//! pods by Deployments, the shipped roles, real packets.
//!
//! One cluster serves all tests sequentially, so this is a custom harness; its output is that of Rust's. `cargo xtask test cluster` builds
//! what the tests need and runs them; SPILLWAY_CLUSTER_BIN, SPILLWAY_IMAGE and SPILLWAY_NEXT_IMAGE name the results.

mod changes;
mod export;
mod failures;
mod foreign;
mod install;
mod maintenance;
mod networks;
mod objects;
mod plugin;
mod world;
mod writes;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use world::InstalledCluster;

/// Tests that check how fast a gateway is replaced, or that nothing is lost under load. Each has the machine to itself.
const ALONE: [&str; 3] = ["failures::a_gateway_", "maintenance::", "under_load"];

/// Tests that wait for minutes and load nothing. They take no share of the machine: others may have it to themselves meanwhile.
const WAITING: [&str; 3] = ["failures::the_api_server_", "writes::a_cluster_at_rest", "writes::first_pod"];

type Test = (&'static str, fn(&InstalledCluster) -> Result<()>);

const TESTS: &[&[Test]] = &[
    objects::TESTS,
    changes::TESTS,
    writes::TESTS,
    networks::TESTS,
    foreign::TESTS,
    install::TESTS,
    maintenance::TESTS,
    plugin::TESTS,
    export::TESTS,
    failures::TESTS,
];

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (mut filters, mut exact, mut list) = (Vec::new(), false, false);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--exact" => exact = true,
            "--list" => list = true,
            "--test-threads" | "--format" => drop(arguments.next()),
            other if other.starts_with('-') => {}
            filter => filters.push(filter.to_owned()),
        }
    }
    let wanted = |name: &str| {
        filters.is_empty() || filters.iter().any(|filter| if exact { name == filter } else { name.contains(filter) })
    };
    let tests: Vec<Test> = TESTS.iter().copied().flatten().copied().filter(|(name, _)| wanted(name)).collect();
    if list {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    run(&tests)
}

fn run(tests: &[Test]) -> ExitCode {
    let started = Instant::now();
    println!("\nrunning {} tests", tests.len());
    let (mut passed, mut failures) = (0, Vec::new());
    let outcome = if tests.is_empty() {
        Ok(Err(String::new()))
    } else {
        lab::machine::take(false).and_then(|_share| InstalledCluster::open())
    };
    match &outcome {
        Ok(Ok(world)) => {
            let mut whole = None;
            for (name, test) in tests {
                let any_of = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
                let (alone, waiting) = (any_of(&ALONE), any_of(&WAITING));
                let result = catch_unwind(AssertUnwindSafe(|| {
                    // All other tests must end before a test has the machine alone, so consecutive tests of this kind keep the lock.
                    let kept = whole.take().filter(|_| alone);
                    let share = match kept {
                        None if !waiting => Some(lab::machine::take(alone)?),
                        kept => kept,
                    };
                    let result = world.fresh().and_then(|()| test(world));
                    whole = share.filter(|_| alone);
                    result
                }));
                let failure = match result {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(format!("{error:#}")),
                    Err(_) => Some("panicked, see above".to_owned()),
                };
                println!("test {name} ... {}", if failure.is_none() { "ok" } else { "FAILED" });
                match failure {
                    None => passed += 1,
                    Some(failure) => failures.push((*name, format!("{failure}\n{}", world.picture()))),
                }
            }
        }
        Ok(Err(reason)) => {
            for (name, _) in tests {
                lab::skip::record(name, reason);
                println!("test {name} ... ok");
                passed += 1;
            }
        }
        Err(error) => failures.extend(tests.iter().map(|(name, _)| {
            println!("test {name} ... FAILED");
            (*name, format!("{error:#}"))
        })),
    }
    // Remove the cluster before the verdict.
    drop(outcome);
    if !failures.is_empty() {
        println!("\nfailures:\n");
        failures.iter().for_each(|(name, failure)| println!("---- {name} stdout ----\n{failure}\n"));
        println!("failures:");
        failures.iter().for_each(|(name, _)| println!("    {name}"));
    }
    let verdict = if failures.is_empty() { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {verdict}. {passed} passed; {} failed; 0 ignored; 0 measured; 0 filtered out; finished in {:.2}s",
        failures.len(),
        started.elapsed().as_secs_f64()
    );
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
