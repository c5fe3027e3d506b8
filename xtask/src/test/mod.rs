//! `cargo xtask test`: everything that shows that the tree is in order, counted in one last line.
//!
//! A stage that fails does not stop the next one, unless that one needs it.

mod binaries;
mod checks;
pub mod libtest;
mod space;
pub mod tally;

use std::path::Path;
use std::process::Command;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use crate::guest::{self, Kernel};
use crate::{build, cluster, image, process, progress, setup, workspace};
use binaries::{Binary, Kind};
use libtest::Run;
use tally::Tally;

/// End-to-end tests mostly wait, so more of them than there are processors run at once. Those that others would disturb say so
/// (`Builder::alone` of the lab).
const E2E_THREADS: &str = "4";
/// The tests on a Kubernetes.
const CLUSTER: &str = "tests/cluster";
const UNIT_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// How many seeds of the simulated cluster a whole run tries.
const SEEDS: &str = "10000";
/// The crates that the simulated cluster spends its time in, and how much each is optimized for it.
const OPTIMIZED: [(&str, u8); 2] = [("egress-core", 2), ("egress-daemon", 1)];
/// It gets what the other tests leave of the processors.
const SIMULATION_TIMEOUT: Duration = Duration::from_secs(60 * 60);
/// The end-to-end tests that run once more for each of [`OTHER_TRANSPORTS`].
const BY_TRANSPORT: &str = "spillway";
const OTHER_TRANSPORTS: [&str; 2] = ["vxlan", "device"];
/// Their modules in which the way between the nodes matters.
const DEPENDING_ON_TRANSPORT: [&str; 8] =
    ["exits::", "failover::", "host_rules::", "policies::", "ports::", "protocols::", "restart::", "slots::"];
const E2E_TIMEOUT: Duration = Duration::from_secs(25 * 60);
/// Those on a Kubernetes run one after the other, and one of them lasts two minutes by itself.
const CLUSTER_TIMEOUT: Duration = Duration::from_secs(30 * 60);

#[derive(clap::Args)]
pub struct Args {
    /// Only tests whose name, or whose binary's name, contains this; no other checks
    filter: Option<String>,
    /// Only the checks and the unit tests
    #[arg(long, conflicts_with = "e2e")]
    unit: bool,
    /// Only the end-to-end tests
    #[arg(long)]
    e2e: bool,
    /// Only the datapath's tests, under another kernel, in QEMU
    #[arg(long, value_name = "VERSION", conflicts_with_all = ["filter", "unit", "e2e"])]
    kernel: Vec<Kernel>,
    /// What the kernels' verifiers count becomes the baseline of later runs
    #[arg(long, requires = "kernel")]
    bless: bool,
}

/// Runs what `args` ask for. The last line of the output is the counts, also when something failed.
pub fn run(args: &Args) -> ExitCode {
    let mut tally = Tally::default();
    if let Err(error) = run_all(args, &mut tally) {
        tally.fail("cargo xtask test", &format!("{error:#}"));
    }
    tally.print();
    if tally.has_failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn run_all(args: &Args, tally: &mut Tally) -> Result<()> {
    setup::ensure(if args.unit { setup::Scope::Build } else { setup::Scope::Tests })?;
    if !args.unit && !nix::unistd::geteuid().is_root() {
        bail!("the end-to-end tests make network namespaces and load programs: run as root, or add --unit");
    }
    let part = args.filter.is_some() || args.unit || args.e2e || !args.kernel.is_empty();
    if !part {
        space::ensure()?;
    }
    if args.filter.is_none() && !args.e2e && args.kernel.is_empty() {
        checks::run(tally);
    }
    let bin_dir = build::binaries(false)?;
    let binaries = binaries::build()?;
    if !args.kernel.is_empty() {
        return guests(&args.kernel, true, &binaries, &bin_dir, args.bless, tally);
    }
    if part {
        return run_tests(args, &binaries, &bin_dir, tally);
    }
    thread::scope(|scope| {
        let simulation = scope.spawn(|| {
            let mut tally = Tally::default();
            simulated_cluster(&mut tally).map(|()| tally)
        });
        let outcome = run_tests(args, &binaries, &bin_dir, tally);
        let simulated = simulation.join().map_err(|_| anyhow!("the simulated cluster's thread has panicked"))?;
        simulated.map(|simulated| tally.add(simulated)).and(outcome)
    })
}

/// Runs the tests that `args` ask for, one binary after the other.
fn run_tests(args: &Args, binaries: &[Binary], bin_dir: &Path, tally: &mut Tally) -> Result<()> {
    for binary in binaries.iter().filter(|binary| wanted(args, binary)) {
        run_binary(binary, args.filter.as_deref(), bin_dir, None, tally)?;
    }
    // In the lab `Auto` comes to `direct`, so the tests above have run by that.
    let by_transport = |binary: &&Binary| binary.name.ends_with(BY_TRANSPORT) && wanted(args, binary);
    for binary in binaries.iter().filter(by_transport).filter(|_| args.filter.is_none()) {
        for transport in OTHER_TRANSPORTS {
            run_binary(binary, None, bin_dir, Some(transport), tally)?;
        }
    }
    if !args.unit && args.filter.is_none() {
        guests(&Kernel::USUAL, false, binaries, bin_dir, false, tally)?;
    }
    if !args.e2e && args.filter.is_none() {
        let mut command = workspace::cargo("test");
        command.args(["--quiet", "--workspace", "--exclude", "egress-ebpf", "--doc", "--no-fail-fast"]);
        let how = Run { filter: None, timeout: UNIT_TIMEOUT, second_try: false };
        libtest::run("doc tests", command, &how, tally)?;
    }
    if let Some(filter) = args.filter.as_ref().filter(|_| tally.is_empty()) {
        bail!("no test's name contains {filter}");
    }
    Ok(())
}

/// Runs all seeds of the simulated cluster, beside the other tests: those mostly wait. It runs only while nothing else wants a processor
/// (`SCHED_IDLE`), so none of them notices. Its crates are optimized, which makes it four times as fast; the others are those of the other
/// tests, because a second tree of them costs minutes and gigabytes.
fn simulated_cluster(tally: &mut Tally) -> Result<()> {
    let test = || {
        let mut command = process::behind(&["chrt", "--idle", "0"], &workspace::cargo("test"));
        for (package, level) in OPTIMIZED {
            command.arg("--config").arg(format!("profile.dev.package.{package}.opt-level={level}"));
        }
        command.args(["--package", "egress-daemon", "--lib"]);
        command
    };
    progress::run("build the simulated cluster", test().arg("--no-run"))?;
    let mut command = test();
    command.args(["--quiet", "--", "agent::sim"]).env("SPILLWAY_SIM_SEEDS", SEEDS);
    let how = Run { filter: None, timeout: SIMULATION_TIMEOUT, second_try: false };
    libtest::run("the simulated cluster", command, &how, tally)
}

fn find<'a>(binaries: &'a [Binary], name: &str) -> Result<&'a Binary> {
    binaries.iter().find(|binary| binary.name == name).with_context(|| format!("cargo builds no test binary {name}"))
}

/// Runs the datapath's tests under other kernels, and one end-to-end test where `whole` is wanted: that one takes minutes.
fn guests(
    kernels: &[Kernel],
    whole: bool,
    binaries: &[Binary],
    bin_dir: &Path,
    bless: bool,
    tally: &mut Tally,
) -> Result<()> {
    let unit = find(binaries, "egress-daemon")?.path();
    let end_to_end = whole.then(|| find(binaries, "tests/spillway").map(Binary::path)).transpose()?;
    for kernel in kernels {
        guest::run(*kernel, &guest::Binaries { unit, end_to_end, bin_dir }, bless, tally)?;
    }
    Ok(())
}

fn wanted(args: &Args, binary: &Binary) -> bool {
    match binary.kind {
        Kind::Unit => !args.e2e,
        Kind::EndToEnd => !args.unit,
    }
}

/// Builds what the tests on a Kubernetes need. They are skipped, and say why, where something is missing that set-up does
/// not install; a continuous integration has to have it.
fn prepare_cluster(command: &mut Command) -> Result<()> {
    if workspace::in_ci() {
        setup::ensure(setup::Scope::Cluster)?;
    }
    let missing = lab::cluster::missing();
    if !missing.is_empty() {
        if workspace::in_ci() {
            bail!("the tests on a Kubernetes need:\n- {}", missing.join("\n- "));
        }
        command.env("SPILLWAY_CLUSTER_LACKS", missing.join("; "));
        return Ok(());
    }
    cluster::build()?;
    command.env("SPILLWAY_CLUSTER_BIN", cluster::binaries()?);
    command.env("SPILLWAY_IMAGE", image::for_tests()?).env("SPILLWAY_NEXT_IMAGE", image::next_for_tests()?);
    Ok(())
}

/// Runs one test binary. A filter that its own name contains selects all of its tests.
/// With a transport, all nodes use that one where a test does not say another, and only what depends on it is run.
fn run_binary(
    binary: &Binary,
    filter: Option<&str>,
    bin_dir: &Path,
    transport: Option<&str>,
    tally: &mut Tally,
) -> Result<()> {
    let mut command = binary.command();
    command.env("SPILLWAY_BIN", bin_dir);
    if binary.name == CLUSTER {
        prepare_cluster(&mut command)?;
    }
    if let Some(transport) = transport {
        command.env("SPILLWAY_TEST_TRANSPORT", transport).args(DEPENDING_ON_TRANSPORT);
    }
    let filter = filter.filter(|filter| !binary.name.contains(filter));
    command.args(filter);
    let timeout = match binary.kind {
        Kind::Unit => UNIT_TIMEOUT,
        Kind::EndToEnd => {
            command.args(["--test-threads", E2E_THREADS]);
            if binary.name == CLUSTER { CLUSTER_TIMEOUT } else { E2E_TIMEOUT }
        }
    };
    let how = Run { filter, timeout, second_try: binary.kind == Kind::EndToEnd };
    let name = transport.map_or(binary.name.clone(), |transport| format!("{} by {transport}", binary.name));
    libtest::run(&name, command, &how, tally)
}
