//! `cargo xtask test`: runs all checks and tests, and prints their counts in the last line.
//!
//! The jobs of a run are data ([`plan`]). A failed job does not stop the next one.

mod binaries;
mod checks;
pub mod libtest;
mod plan;
mod space;
pub mod tally;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use lab::cluster::Kubernetes;

use crate::guest::{self, Extent, Kernel};
use crate::{build, cluster, image, process, setup, workspace};
use binaries::{Binary, Kind};
use libtest::Run;
use plan::Job;
use tally::Tally;

const UNIT_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// The number of seeds of the simulated cluster in a whole run. They take two minutes of processor time.
const SEEDS: &str = "1000";
/// The timeout of the simulated cluster, which gets only the processor time that other tests leave.
const SIMULATION_TIMEOUT: Duration = Duration::from_secs(60 * 60);
/// The timeout of the end-to-end tests of one job. Jobs in labs and on Kubernetes wait for each other.
const LAB_TIMEOUT: Duration = Duration::from_secs(60 * 60);

/// The time after which a whole run in CI starts no more optional work, and reports it as skipped. CI ends a run after 90 minutes, and its
/// machines differ in speed by a factor of three.
const LATE: Duration = Duration::from_secs(45 * 60);

#[derive(clap::Args)]
pub struct Args {
    /// Run only tests whose name, or whose binary's name, contains this; no other checks
    filter: Option<String>,
    /// Run only the checks and the unit tests
    #[arg(long, conflicts_with = "e2e")]
    unit: bool,
    /// Run only the end-to-end tests
    #[arg(long)]
    e2e: bool,
    /// Run a subset that takes at most four minutes once everything is built: no lints, no other kernels, only the common end-to-end tests
    #[arg(long, conflicts_with_all = ["filter", "unit", "e2e", "kernel"])]
    quick: bool,
    /// Run only the datapath's tests, under another kernel, in QEMU
    #[arg(long, value_name = "VERSION", conflicts_with_all = ["filter", "unit", "e2e"])]
    kernel: Vec<Kernel>,
    /// Run only the tests on Kubernetes, with this version: 1.32 is the oldest that the chart accepts, 1.37 the newest and the default
    #[arg(long, value_name = "VERSION", conflicts_with_all = ["unit", "quick", "kernel"])]
    kubernetes: Option<Kubernetes>,
    /// Test only the page of `egressctl serve`, in a real Chromium; its screenshot becomes docs/page.png
    #[arg(long, conflicts_with_all = ["filter", "unit", "e2e", "quick", "kernel"])]
    page: bool,
    /// Record the counts of the kernels' verifiers as the baseline for later runs
    #[arg(long, requires = "kernel")]
    bless: bool,
}

impl Args {
    /// Returns whether nothing is left out.
    fn is_whole(&self) -> bool {
        let part = self.unit || self.e2e || self.quick || self.page || self.kubernetes.is_some();
        self.filter.is_none() && !part && self.kernel.is_empty()
    }
}

/// The time budget for optional work: repeated tests in other modes, other kernels, many seeds.
#[derive(Clone, Copy)]
struct Schedule {
    /// The end of this time, in a whole run in CI.
    late: Option<Instant>,
}

impl Schedule {
    fn of(args: &Args) -> Self {
        Self { late: (args.is_whole() && workspace::in_ci()).then(|| Instant::now() + LATE) }
    }

    /// Returns whether there is time to start `what`; otherwise counts it as skipped.
    fn allows(self, what: &str, tally: &mut Tally) -> bool {
        let late = self.late.is_some_and(|late| Instant::now() > late);
        if late {
            tally.skip(what, &format!("not started: the run has taken more than {} minutes", LATE.as_secs() / 60));
        }
        !late
    }
}

/// Runs the jobs of `args`. The last line of the output has the counts, even if something failed.
pub fn run(args: &Args) -> ExitCode {
    let mut tally = Tally::default();
    if let Err(error) = run_all(args, &mut tally) {
        tally.fail("cargo xtask test", &format!("{error:#}"));
    }
    tally.print();
    if tally.has_failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn run_all(args: &Args, tally: &mut Tally) -> Result<()> {
    let schedule = Schedule::of(args);
    setup::ensure(match args {
        Args { unit: true, .. } => setup::Scope::Build,
        Args { page: true, .. } => setup::Scope::Page,
        _ => setup::Scope::Tests,
    })?;
    if !args.unit && !nix::unistd::geteuid().is_root() {
        bail!("the end-to-end tests make network namespaces and load programs: run as root, or add --unit");
    }
    if args.is_whole() {
        space::ensure()?;
    }
    if args.is_whole() || args.unit || args.quick {
        checks::quick(tally);
    }
    if args.unit {
        checks::slow(tally);
        doc_tests(tally)?;
    }
    let (binaries, programs) = compile(args);
    let binaries = binaries?;
    if !args.kernel.is_empty() {
        return guests(&args.kernel, true, schedule, &binaries, args.bless, tally);
    }
    let (with_cluster, others): (Vec<_>, Vec<_>) =
        plan::jobs(args, &binaries).into_iter().partition(Job::uses_cluster_programs);
    let environment = match with_cluster.iter().any(Job::is_on_cluster) {
        true => programs.unwrap_or_else(|| cluster_programs(args)).and_then(environment),
        false => Ok(Environment::new()),
    };
    let (behind, on_cluster) = thread::scope(|scope| {
        let behind = args.is_whole().then(|| scope.spawn(|| behind_the_tests(schedule, &binaries)));
        let on_cluster = scope.spawn(|| tests_with_cluster(&with_cluster, schedule, environment));
        run_jobs(&others, schedule, &Environment::new(), tally);
        (behind.map(|thread| thread.join()), on_cluster.join())
    });
    let panicked = |_| anyhow!("the work concurrent with the tests in the labs has panicked");
    tally.add(on_cluster.map_err(panicked)?);
    if let Some(behind) = behind {
        tally.add(behind.map_err(panicked)??);
    }
    match &args.filter {
        Some(filter) if tally.is_empty() => bail!("no test's name contains {filter}"),
        _ => Ok(()),
    }
}

/// Builds the test binaries and concurrently, if tests on Kubernetes are certain to run, the programs of a cluster. This comes before the
/// tests, because compilers keep all processors busy, while tests mostly wait.
fn compile(args: &Args) -> (Result<Vec<Binary>>, Option<Result<Programs>>) {
    let on_cluster = args.is_whole() || args.kubernetes.is_some();
    thread::scope(|scope| {
        let programs = on_cluster.then(|| scope.spawn(|| cluster_programs(args)));
        let binaries = binaries::build();
        let panicked = |_| Err(anyhow!("the build of the cluster's programs has panicked"));
        (binaries, programs.map(|thread| thread.join().unwrap_or_else(panicked)))
    })
}

/// Runs the checks and tests that nothing waits for, at idle priority. None of them depends on real time.
fn behind_the_tests(schedule: Schedule, binaries: &[Binary]) -> Result<Tally> {
    process::idle()?;
    let mut tally = Tally::default();
    checks::slow(&mut tally);
    doc_tests(&mut tally)?;
    // A guest rarely uses all processors.
    let simulated = thread::scope(|scope| {
        let simulated = scope.spawn(|| simulated_cluster(schedule, binaries));
        guests(&Kernel::USUAL, false, schedule, binaries, false, &mut tally)?;
        simulated.join().map_err(|_| anyhow!("the run of the simulated cluster has panicked"))?
    })?;
    tally.add(simulated);
    Ok(tally)
}

fn doc_tests(tally: &mut Tally) -> Result<()> {
    let mut command = workspace::cargo("test");
    command.args(workspace::PACKAGES).args(["--quiet", "--doc", "--no-fail-fast"]);
    let how = Run { filters: &[], timeout: UNIT_TIMEOUT, second_try: false };
    libtest::run("doc tests", command, &how, tally)
}

/// The environment variables with the paths of the build's results.
type Environment = Vec<(&'static str, OsString)>;

/// Runs the tests that use the programs of a cluster, concurrently with those in the labs. Both mostly wait, and tests that depend on real
/// time take exclusive use of the machine.
fn tests_with_cluster(jobs: &[Job<'_>], schedule: Schedule, environment: Result<Environment>) -> Tally {
    let mut tally = Tally::default();
    match environment {
        Ok(environment) => run_jobs(jobs, schedule, &environment, &mut tally),
        Err(error) => jobs.iter().for_each(|job| tally.fail(&job.title(), &format!("{error:#}"))),
    }
    tally
}

/// Runs the jobs sequentially.
fn run_jobs(jobs: &[Job<'_>], schedule: Schedule, environment: &Environment, tally: &mut Tally) {
    for job in jobs {
        if job.mode.is_some() && !schedule.allows(&job.title(), tally) {
            continue;
        }
        if let Err(error) = run_job(job, environment, tally) {
            tally.fail(&job.title(), &format!("{error:#}"));
        }
    }
}

fn run_job(job: &Job<'_>, environment: &Environment, tally: &mut Tally) -> Result<()> {
    let mut command = job.binary.command();
    command.env("SPILLWAY_BIN", build::folder(false)).envs(environment.iter().map(|(name, value)| (name, value)));
    command.args(&job.tests);
    let lab = job.binary.kind == Kind::EndToEnd;
    command.args(["--test-threads", if lab { plan::THREADS } else { plan::UNIT_THREADS }]);
    if job.tests == [plan::PAGE] {
        command.env("SPILLWAY_PAGE", workspace::root().join("docs/page.png"));
    }
    command.envs(job.mode.into_iter().flat_map(plan::TestMode::variables));
    let how = Run { filters: &job.tests, timeout: if lab { LAB_TIMEOUT } else { UNIT_TIMEOUT }, second_try: lab };
    libtest::run(&job.title(), command, &how, tally)
}

/// Runs all seeds of the simulated cluster.
fn simulated_cluster(schedule: Schedule, binaries: &[Binary]) -> Result<Tally> {
    let mut tally = Tally::default();
    if !schedule.allows("the simulated cluster", &mut tally) {
        return Ok(tally);
    }
    let mut command = find(binaries, "egress-sim")?.command();
    command.arg("--quiet").env("SPILLWAY_SIM_SEEDS", SEEDS);
    let how = Run { filters: &[], timeout: SIMULATION_TIMEOUT, second_try: false };
    libtest::run("the simulated cluster", command, &how, &mut tally)?;
    Ok(tally)
}

fn find<'a>(binaries: &'a [Binary], name: &str) -> Result<&'a Binary> {
    binaries.iter().find(|binary| binary.name == name).with_context(|| format!("cargo builds no test binary {name}"))
}

/// Runs tests under other kernels. Runs more of them if the user `asked` for a kernel.
fn guests(
    kernels: &[Kernel],
    asked: bool,
    schedule: Schedule,
    binaries: &[Binary],
    bless: bool,
    tally: &mut Tally,
) -> Result<()> {
    let (unit, end_to_end) = (find(binaries, "egress-node")?.path(), find(binaries, "tests/spillway")?.path());
    let binaries = guest::Binaries { unit, end_to_end, bin_dir: &build::folder(false) };
    for kernel in kernels {
        let title = guest::title(*kernel);
        let extent = match kernel {
            _ if asked => Extent::EndToEnd,
            Kernel::V6_1 if schedule.allows(&format!("the datapath's tests in the {title}"), tally) => Extent::Datapath,
            // The oldest kernel has the tightest limits. Every run shows that it accepts the programs, however late it is.
            Kernel::V6_1 => Extent::Loading,
            _ if schedule.allows(&title, tally) => Extent::Loading,
            _ => continue,
        };
        guest::run(*kernel, &binaries, extent, bless, tally)?;
    }
    Ok(())
}

/// The programs of a cluster.
enum Programs {
    /// The folder of the built programs.
    Built(PathBuf),
    /// The reasons why they cannot be built here.
    Lacking(String),
}

/// Builds the programs of a cluster unless a prerequisite is missing that setup does not install. In CI, that is an error.
fn cluster_programs(args: &Args) -> Result<Programs> {
    if workspace::in_ci() {
        setup::ensure(setup::Scope::Cluster)?;
    }
    let missing = lab::cluster::missing();
    if missing.is_empty() {
        return cluster::build(args.kubernetes.unwrap_or_default()).map(Programs::Built);
    }
    if workspace::in_ci() {
        bail!("the tests on Kubernetes need:\n- {}", missing.join("\n- "));
    }
    Ok(Programs::Lacking(missing.join("; ")))
}

/// Returns the variables that tell the tests on Kubernetes where their programs are, or why they are skipped.
fn environment(programs: Programs) -> Result<Environment> {
    let folder = match programs {
        Programs::Built(folder) => folder,
        Programs::Lacking(what) => return Ok(vec![("SPILLWAY_CLUSTER_LACKS", what.into())]),
    };
    let bin_dir = build::folder(false);
    Ok(vec![
        ("SPILLWAY_CLUSTER_BIN", folder.into()),
        ("SPILLWAY_IMAGE", image::of_binaries(&bin_dir, image::version())?.into()),
        ("SPILLWAY_NEXT_IMAGE", image::of_binaries(&bin_dir, image::NEXT)?.into()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_run_counts_omitted_work_as_skipped() {
        let (now, mut tally) = (Instant::now(), Tally::default());
        assert!(Schedule { late: None }.allows("a guest", &mut tally));
        assert!(Schedule { late: Some(now + LATE) }.allows("a guest", &mut tally));
        assert!(tally.is_empty());
        assert!(!Schedule { late: Some(now) }.allows("a guest", &mut tally));
        assert!(!tally.is_empty() && !tally.has_failed());
    }
}
