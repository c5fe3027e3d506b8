//! What a run consists of, as data: jobs that follow each other.
//!
//! Unit tests use every processor. The labs' tests mostly wait, so several of a binary run at once, after those that make load or are strict
//! about time, which take the machine for themselves (`lab::machine`). Jobs that use Kubernetes, or its programs, run beside the labs'. Other
//! binaries do not run side by side.

use super::Args;
use super::binaries::{Binary, Kind};

/// The tests on a Kubernetes.
const CLUSTER: &str = "tests/cluster";
/// The tests of the chart, some of which use Helm and kubectl as they are built for a cluster.
pub const CHART: &str = "tests/chart";
/// The end-to-end tests.
const SPILLWAY: &str = "tests/spillway";
/// How many end-to-end tests may begin at once: all, so that `lab::machine` decides which of them run.
pub const THREADS: &str = "256";
/// The modes in which they run once more. In the lab the transport `Auto` resolves to `direct`, and `xdp: Auto` to TC.
///
/// How source nodes send and where gateways forward are independent of each other. So every module meets `direct`, `vxlan` and both places, but
/// only those where most kinds of packets pass meet the pair of `direct` and XDP, too. The device has the outer headers of `vxlan`, which covers
/// gateways that die, policies that change and ports that are used up, so these modules are not run with it.
const OTHER_MODES: [(TestMode, &[&str]); 3] = [
    (TestMode { transport: Some("vxlan"), xdp: true }, &DEPENDING_ON_TRANSPORT),
    (TestMode { transport: Some("device"), xdp: false }, &["exits::", "host_rules::", "protocols::", "restart::"]),
    (TestMode { transport: None, xdp: true }, &["exits::", "protocols::"]),
];
/// Their modules in which the transport matters.
const DEPENDING_ON_TRANSPORT: [&str; 9] = [
    "exits::",
    "failover::",
    "host_rules::",
    "policies::",
    "ports::",
    "protocols::",
    "restart::",
    "slots::",
    "trace::",
];
/// Those of `--quick`: a pod's packets leave as they should, and come back; policies and slots change.
const QUICK: [&str; 3] = ["exits::", "protocols::", "slots::"];

/// The tests that open a page in a browser, which only `--page` asks for.
pub const PAGE: &str = "page::";

/// How packets travel, where it is not the default.
#[derive(Clone, Copy, Debug)]
pub struct TestMode {
    /// This transport.
    transport: Option<&'static str>,
    /// Gateways send them on at their drivers, and links are like those between cards.
    xdp: bool,
}

impl TestMode {
    fn name(self) -> String {
        let parts: Vec<&str> = self.transport.into_iter().chain(self.xdp.then_some("xdp")).collect();
        parts.join(" and ")
    }

    /// The variables of the environment that set it, with their values.
    pub fn variables(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let transport = self.transport.map(|name| ("SPILLWAY_TEST_TRANSPORT", name));
        transport.into_iter().chain(self.xdp.then_some(("SPILLWAY_TEST_XDP", "Native")))
    }
}

/// One run of a test binary.
#[derive(Debug)]
pub struct Job<'a> {
    /// What is run.
    pub binary: &'a Binary,
    /// How all nodes are set unless a test says otherwise.
    pub mode: Option<TestMode>,
    /// Only tests whose name contains one of these, if there are any.
    pub tests: Vec<&'a str>,
}

impl<'a> Job<'a> {
    fn of(binary: &'a Binary) -> Self {
        Self { binary, mode: None, tests: Vec::new() }
    }

    /// What the run's output calls it.
    pub fn title(&self) -> String {
        let name = &self.binary.name;
        self.mode.map_or_else(|| name.clone(), |mode| format!("{name} by {}", mode.name()))
    }

    /// Whether it needs a Kubernetes.
    pub fn is_on_cluster(&self) -> bool {
        self.binary.name == CLUSTER
    }

    /// Whether it uses programs that are built for one.
    pub fn uses_cluster_programs(&self) -> bool {
        self.is_on_cluster() || self.binary.name == CHART
    }

    fn by((mode, tests): (TestMode, &[&'static str]), binary: &'a Binary) -> Self {
        Self { mode: Some(mode), tests: tests.to_vec(), ..Self::of(binary) }
    }
}

/// The jobs of the run that `args` ask for, in their order.
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
