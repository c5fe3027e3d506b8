//! `cargo xtask bench`: compares plain routing, a gateway of the stock kernel and Spillway with each transport, interleaved in
//! one run on this machine, and shows how Spillway's figures change as a cluster grows. docs/performance.md explains each figure.
//!
//! Like the demo, it knows Spillway only as programs to start, manifests to write and maps to inspect.

mod agents;
mod chart;
mod churn;
mod failover;
mod figures;
mod flows;
mod gateway;
mod large;
mod load;
mod programs;
mod report;
mod rounds;
mod routes;
mod scale;
mod scaling;
mod targets;
mod variant;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Parser;
use lab::Family;
use lab::traffic::on_cpu;
use serde_json::{Value, json};

use self::figures::{Column, Figure, family_name, median};
use self::load::{Load, Windows};
use self::report::Findings;
use self::variant::{BenchLab, CPU, Variant};
use xtask::progress::Step;
use xtask::{build, ended, setup, workspace};

/// Compare Spillway with plain routing and with a gateway of the stock kernel, on this machine
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Args {
    /// Print only the figures, as JSON: {"figures": [{"name", "unit", "plain", "stock", "device", "vxlan", "direct", "bypass"}], "failover": [{"name",
    /// "unit", "spillway", "keepalived", "keepalived-fast"}]}
    #[arg(long)]
    json: bool,
    /// A quick look in under two minutes: few and short rounds. Nothing is written to docs/
    #[arg(long)]
    quick: bool,
    /// Number of rounds [default: 9, or 3 with --quick]
    #[arg(long)]
    rounds: Option<usize>,
    /// Only these loads, to compare before and after a change. Nothing is written to docs/
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with_all = ["programs", "curves", "churn", "scale"])]
    loads: Vec<Load>,
    /// Only these variants, with --loads: to profile one
    #[arg(long, value_enum, value_delimiter = ',', requires = "loads")]
    variants: Vec<Variant>,
    /// Only the cost of each program, to compare before and after a change
    #[arg(long, conflicts_with_all = ["quick", "rounds"])]
    programs: bool,
    /// Only the curves: how rates change as flows, policies, CIDRs and gateways grow in number. Writes docs/scaling.md
    #[arg(long, conflicts_with_all = ["json", "rounds", "programs"])]
    curves: bool,
    /// Only new connections and queries to 25,000 servers, for minutes: refused packets, compared with the stock kernel
    #[arg(long, conflicts_with_all = ["quick", "rounds", "programs", "curves"])]
    churn: bool,
    /// With --churn: the duration of each of the two loads
    #[arg(long, value_name = "N", requires = "churn", default_value_t = 10)]
    minutes: u64,
    /// Only the death of a gateway, compared with keepalived and conntrackd
    #[arg(long, conflicts_with_all = ["loads", "programs", "curves", "churn"])]
    failover: bool,
    /// Only packets per second and core at a gateway: plain routing, TC, XDP, and an empty XDP program as the limit
    #[arg(long, conflicts_with_all = ["loads", "programs", "curves", "churn", "failover"])]
    gateway: bool,
    /// Only the planner on a large cluster, an agent with a full node, and a cluster of 5,000 nodes (KWOK): writes docs/scale.md
    #[arg(long, exclusive = true)]
    scale: bool,
}

impl Args {
    /// Returns whether everything is measured.
    fn is_full(&self) -> bool {
        let parts = [self.programs, self.curves, self.churn, self.failover, self.gateway, self.scale];
        self.loads.is_empty() && !parts.contains(&true)
    }
}

/// The duration of one measurement of a gateway's path.
const GATEWAY_WINDOW: Duration = Duration::from_millis(200);

/// The number of gateway deaths with each system.
const DEATHS: usize = 10;

fn main() -> ExitCode {
    let args = Args::parse();
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("SPILLWAY_BIN", build::folder(!args.quick)) };
    ended(run(&args).map(|()| true))
}

/// Measures, and prints and writes the results.
fn run(args: &Args) -> Result<()> {
    let others = args.failover || args.is_full();
    setup::ensure(if others { setup::Scope::Failover } else { setup::Scope::Lab })?;
    if let Some(obstacle) = lab::skip::obstacle() {
        bail!("the benchmark needs network namespaces and eBPF programs: {obstacle}");
    }
    if args.scale {
        return scale::run();
    }
    let binaries = build::binaries(!args.quick)?;
    if args.programs {
        return only_programs(args, &binaries);
    }
    if args.failover {
        let lines = failover::measure(&binaries, args.rounds.unwrap_or(if args.quick { 1 } else { DEATHS }))?;
        return print(args, &json!({ "failover": failover::json(&lines) }), &failover::table(&lines));
    }
    if args.gateway {
        let rounds = args.rounds.unwrap_or(if args.quick { 3 } else { 9 }).max(1);
        let lines = gateway::measure(&binaries, rounds, GATEWAY_WINDOW)?;
        return print(args, &json!({ "figures": gateway::json(&lines) }), &gateway::table(&lines));
    }
    if args.churn {
        let figures = churn::measure(&binaries, Duration::from_secs(60 * args.minutes))?;
        return print_figures(args, &Findings { figures, ..Findings::default() });
    }
    if args.curves {
        return curves(args, &binaries);
    }
    let windows = windows(args.quick);
    let count = args.rounds.unwrap_or(if args.quick { 3 } else { 9 }).max(1);
    if !args.loads.is_empty() {
        let variants = if args.variants.is_empty() { &Variant::ALL[..] } else { &args.variants };
        let places = open_all(&binaries, variants)?;
        let rounds = rounds::run(&places, &args.loads, count, &windows)?;
        drop(places);
        let figures = rounds.figures().cloned().collect();
        return print_figures(args, &Findings { rounds, figures, failover: Vec::new() });
    }
    let began = Instant::now();
    let programs = of_programs(&binaries)?;
    let places = open_all(&binaries, &Variant::ALL)?;
    let rounds = rounds::run(&places, &Load::ALL, count, &windows)?;
    let flows = of_flows(&places)?;
    drop(places);
    let figures = rounds.figures().cloned().chain(programs).chain(flows).collect();
    let failover = failover::measure(&binaries, if args.quick { 1 } else { DEATHS })?;
    show(args, &Findings { rounds, figures, failover })?;
    curves(args, &binaries)?;
    eprintln!("in {} s", began.elapsed().as_secs());
    Ok(())
}

/// Measures the curves with the fastest transport, and writes them.
fn curves(args: &Args, binaries: &Path) -> Result<()> {
    let mut points = Vec::new();
    let outcome = scaling::measure(Variant::Direct, binaries, &windows(args.quick).in_one(), args.quick, &mut points);
    // Points that were measured before an error are not lost.
    let docs = docs(args)?;
    report::write_curves(&docs, Variant::Direct, &points)?;
    eprintln!("written: {}", docs.join("scaling.md").display());
    outcome
}

/// Returns the folder for the pages.
fn docs(args: &Args) -> Result<PathBuf> {
    if args.quick { Ok(workspace::scratch_dir()?.join("bench")) } else { Ok(workspace::root().join("docs")) }
}

fn print_figures(args: &Args, findings: &Findings) -> Result<()> {
    let (columns, failover) = (findings.columns(), &findings.failover);
    let figures: Value = findings.figures.iter().map(|figure| figure.json(&columns, median)).collect();
    let deaths = if failover.is_empty() { String::new() } else { failover::table(failover) };
    let json = json!({ "figures": figures, "failover": failover::json(failover) });
    print(args, &json, &(report::terminal(findings) + &deaths))
}

fn print(args: &Args, json: &Value, text: &str) -> Result<()> {
    if args.json {
        println!("{}", serde_json::to_string_pretty(json)?);
    } else {
        print!("{text}");
    }
    Ok(())
}

/// Prints and writes the findings.
fn show(args: &Args, findings: &Findings) -> Result<()> {
    print_figures(args, findings)?;
    let reached = findings.targets();
    for missed in reached.iter().filter(|one| !one.holds) {
        eprintln!("missed: {}: {}", missed.target, missed.measured);
    }
    eprintln!("{} of {} targets reached", reached.iter().filter(|one| one.holds).count(), reached.len());
    let docs = docs(args)?;
    let readme = (!args.quick).then(|| workspace::root().join("README.md"));
    findings.write(&docs, readme.as_deref())?;
    eprintln!("written: {}", docs.join("bench.md").display());
    Ok(())
}

fn windows(quick: bool) -> Windows {
    let millis = Duration::from_millis;
    if quick {
        Windows { warm_up: millis(20), window: millis(150), bytes: 128 << 20, turns: 1 }
    } else {
        Windows { warm_up: millis(20), window: millis(100), bytes: 128 << 20, turns: 4 }
    }
}

/// Builds the labs of some variants.
fn open_all(binaries: &Path, variants: &[Variant]) -> Result<Vec<BenchLab>> {
    let open = |variant: &Variant| {
        let step = Step::start(&format!("build a lab: {}", variant.title()));
        let place = BenchLab::open(*variant, binaries, "", 1)?;
        step.end("✓", "");
        Ok(place)
    };
    variants.iter().map(open).collect()
}

/// Measures the cost of each program, one lab at a time: the agents of other labs would add to the cost.
fn of_programs(binaries: &Path) -> Result<Vec<Figure>> {
    let mut costs = BTreeMap::new();
    for variant in Variant::ALL.into_iter().filter(|one| one.is_spillway()) {
        let places = open_all(binaries, &[variant])?;
        let step = Step::start(&format!("cost of programs, {}", variant.title()));
        for place in &places {
            costs.insert(variant, on_cpu(CPU, || programs::measure(place))?);
        }
        step.end("✓", "");
    }
    Ok(figures::of_programs(&costs))
}

fn only_programs(args: &Args, binaries: &Path) -> Result<()> {
    let figures = of_programs(binaries)?;
    print_figures(args, &Findings { figures, ..Findings::default() })
}

/// Measures the one-time costs of a flow, which need no rounds.
fn of_flows(places: &[BenchLab]) -> Result<Vec<Figure>> {
    let mut all = Vec::new();
    let step = Step::start("cost of flows");
    for family in Family::BOTH {
        let (mut times, mut bytes) = (Vec::new(), Vec::new());
        for place in places {
            times.push((place.variant, on_cpu(CPU, || flows::set_up_time(place, family))?));
            bytes.extend(flows::memory(place, family)?.map(|bytes| (place.variant, bytes)));
        }
        let family = family_name(family);
        all.push(Figure::single(&format!("CPU time to set up a flow, {family}"), "µs", times));
        all.push(Figure::single(&format!("memory of a flow, {family}"), "bytes", bytes));
    }
    step.end("✓", "");
    Ok(all)
}
