//! The plan of a run, as data: jobs that run sequentially.
//!
//! Unit tests use every processor, one binary at a time. The labs' tests mostly wait, so several of a binary run concurrently, after those
//! that make load or depend on real time, which take exclusive use of the machine (`lab::machine`). Jobs that use Kubernetes or its programs
//! run concurrently with the labs' jobs. Other binaries do not run concurrently.

use super::Args;
use super::binaries::{Binary, Kind};

/// The tests on Kubernetes.
const CLUSTER: &str = "tests/cluster";
/// The tests of the chart, some of which use the Helm and kubectl that are built for a cluster.
pub const CHART: &str = "tests/chart";
/// The end-to-end tests.
const SPILLWAY: &str = "tests/spillway";
/// The number of end-to-end tests that may begin concurrently: all of them, so that `lab::machine` decides which run.
pub const THREADS: &str = "256";
/// The number of a binary's unit tests that run concurrently on two processors. Those of the shell and of the datapath wait for kernels,
/// leases and timers half of the time.
pub const UNIT_THREADS: &str = "6";
/// The modes in which they run once more. In the lab the transport `Auto` resolves to `direct`, and `xdp: Auto` to TC.
///
/// The transport of source nodes and the place where gateways forward are independent. So every module runs with `direct` and `vxlan` and
/// in both places, but only the modules with most kinds of packets also run with `direct` and XDP. The device uses the same outer headers
/// as `vxlan`, which covers dying gateways, changing policies and exhausted ports, so these modules are not run with the device. `sizes::`
/// sets its transports itself: only the place where gateways forward is left to vary.
const OTHER_MODES: [(TestMode, &[&str]); 3] = [
    (TestMode { transport: Some("vxlan"), xdp: true }, &DEPENDING_ON_TRANSPORT),
    (TestMode { transport: Some("device"), xdp: false }, &["exits::", "host_rules::", "protocols::", "restart::"]),
    (TestMode { transport: None, xdp: true }, &["exits::", "protocols::"]),
];
/// The modules of end-to-end tests that depend on the transport.
const DEPENDING_ON_TRANSPORT: [&str; 10] = [
    "exits::",
    "failover::",
    "host_rules::",
    "policies::",
    "ports::",
    "protocols::",
    "restart::",
    "sizes::",
    "slots::",
    "trace::",
];
/// The modules of `--quick`: a pod's packets leave correctly and return; policies and slots change.
const QUICK: [&str; 3] = ["exits::", "protocols::", "slots::"];

/// The tests that open a page in a browser, which only `--page` runs.
pub const PAGE: &str = "page::";

/// A mode in which packets take another path than the default one.
#[derive(Clone, Copy, Debug)]
pub struct TestMode {
    /// The transport, if it is not the default.
    transport: Option<&'static str>,
    /// Whether gateways forward packets at their drivers, and links behave like those between physical cards.
    xdp: bool,
}

impl TestMode {
    fn name(self) -> String {
        let parts: Vec<&str> = self.transport.into_iter().chain(self.xdp.then_some("xdp")).collect();
        parts.join(" and ")
    }

    /// Returns the environment variables that select the mode, with their values.
    pub fn variables(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let transport = self.transport.map(|name| ("SPILLWAY_TEST_TRANSPORT", name));
        transport.into_iter().chain(self.xdp.then_some(("SPILLWAY_TEST_XDP", "Native")))
    }
}

/// One run of a test binary.
#[derive(Debug)]
pub struct Job<'a> {
    /// The test binary.
    pub binary: &'a Binary,
    /// The mode of all nodes unless a test sets another one.
    pub mode: Option<TestMode>,
    /// If not empty, only tests whose name contains one of these run.
    pub tests: Vec<&'a str>,
}

impl<'a> Job<'a> {
    fn of(binary: &'a Binary) -> Self {
        Self { binary, mode: None, tests: Vec::new() }
    }

    /// Returns the title of the job in the run's output.
    pub fn title(&self) -> String {
        let name = &self.binary.name;
        self.mode.map_or_else(|| name.clone(), |mode| format!("{name} by {}", mode.name()))
    }

    /// Returns whether it needs Kubernetes.
    pub fn is_on_cluster(&self) -> bool {
        self.binary.name == CLUSTER
    }

    /// Returns whether it uses programs that are built for a cluster.
    pub fn uses_cluster_programs(&self) -> bool {
        self.is_on_cluster() || self.binary.name == CHART
    }

    fn by((mode, tests): (TestMode, &[&'static str]), binary: &'a Binary) -> Self {
        Self { mode: Some(mode), tests: tests.to_vec(), ..Self::of(binary) }
    }
}

/// Returns the jobs of a run with `args`, in their order.
pub fn jobs<'a>(args: &'a Args, binaries: &'a [Binary]) -> Vec<Job<'a>> {
    let mut jobs = chosen(args, binaries);
    jobs.sort_by_key(Job::is_on_cluster);
    jobs
}

fn chosen<'a>(args: &'a Args, binaries: &'a [Binary]) -> Vec<Job<'a>> {
    let of_kind = |kind: Kind| binaries.iter().filter(move |binary| binary.kind == kind).map(Job::of);
    let units = of_kind(Kind::Unit).filter(|_| !args.e2e);
    if args.kubernetes.is_some() {
        let tests: Vec<_> = args.filter.iter().map(String::as_str).collect();
        let of_cluster = binaries.iter().filter(|binary| binary.name == CLUSTER);
        return of_cluster.map(|binary| Job { tests: tests.clone(), ..Job::of(binary) }).collect();
    }
    if let Some(filter) = &args.filter {
        // A filter that a binary's own name contains selects all of its tests.
        let tests = |job: &Job| if job.binary.name.contains(filter) { Vec::new() } else { vec![filter.as_str()] };
        let labs = of_kind(Kind::EndToEnd).filter(|_| !args.unit);
        return units.chain(labs).map(|job| Job { tests: tests(&job), ..job }).collect();
    }
    let end_to_end = || binaries.iter().filter(|binary| binary.name == SPILLWAY);
    if args.page {
        return end_to_end().map(|binary| Job { tests: vec![PAGE], ..Job::of(binary) }).collect();
    }
    let labs: Vec<Job> = if args.quick {
        end_to_end().map(|binary| Job { tests: QUICK.to_vec(), ..Job::of(binary) }).collect()
    } else {
        let once_more = end_to_end().flat_map(|binary| OTHER_MODES.map(|mode| Job::by(mode, binary)));
        of_kind(Kind::EndToEnd).chain(once_more).filter(|_| !args.unit).collect()
    };
    units.chain(labs).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn plan(words: &[&str]) -> Vec<String> {
        let binaries = [
            Binary::named(Kind::Unit, "egress-core"),
            Binary::named(Kind::Unit, "tests"),
            Binary::named(Kind::EndToEnd, CLUSTER),
            Binary::named(Kind::EndToEnd, SPILLWAY),
        ];
        let Line { args } = Line::parse_from(std::iter::once(&"test").chain(words));
        let said = |job: &Job| match &job.tests[..] {
            [] => job.title(),
            [test] => format!("{} {test}", job.title()),
            tests => format!("{} {}", job.title(), tests.len()),
        };
        jobs(&args, &binaries).iter().map(said).collect()
    }

    #[test]
    fn unit_tests_come_first_and_end_to_end_tests_run_with_every_transport() {
        let once_more = [("vxlan and xdp", DEPENDING_ON_TRANSPORT.len()), ("device", 4), ("xdp", 2)]
            .map(|(mode, modules)| format!("tests/spillway by {mode} {modules}"));
        let labs = [&["tests/spillway".to_owned()][..], &once_more, &["tests/cluster".to_owned()]].concat();
        assert_eq!(plan(&[]), [&["egress-core".to_owned(), "tests".to_owned()][..], &labs].concat());
        assert_eq!(plan(&["--e2e"]), labs);
        assert_eq!(plan(&["--unit"]), ["egress-core", "tests"]);
        assert_eq!(plan(&["--quick"]), ["egress-core", "tests", "tests/spillway 3"]);
    }

    #[test]
    fn a_filter_selects_tests_or_a_whole_binary() {
        let direct = ["egress-core exits::", "tests exits::", "tests/spillway exits::", "tests/cluster exits::"];
        assert_eq!(plan(&["exits::"]), direct);
        assert_eq!(plan(&["--e2e", "cluster"]), ["tests/spillway cluster", "tests/cluster"]);
        assert_eq!(plan(&["--kubernetes", "1.32"]), ["tests/cluster"]);
        assert_eq!(plan(&["--kubernetes", "1.37", "objects::"]), ["tests/cluster objects::"]);
    }
}
