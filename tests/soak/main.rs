//! `cargo xtask soak`: connections, and changes of everything around them, for as long as one likes. Only what arrives
//! at a server counts. [`judge`] lists the assertions, [`churn`] the changes.

mod churn;
mod judge;
mod world;

use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use clap::Parser;

use self::churn::Churn;
use self::judge::Judge;
use self::world::SoakLab;
use xtask::{build, ended, setup};

/// The time between two changes: long enough for most of them to take effect, short enough for them to overlap at times.
const PAUSES: [Duration; 2] = [Duration::from_millis(200), Duration::from_millis(2_500)];
/// The interval between lines with the current state.
const REPORT: Duration = Duration::from_secs(60);

/// Run connections and changes of every kind for as long as you like, and judge what a server sees
#[derive(Parser)]
#[command(name = "cargo xtask soak", bin_name = "cargo xtask soak")]
struct Args {
    /// How many minutes to run
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// Repeat the changes of an earlier run in the same order
    #[arg(long)]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("SPILLWAY_BIN", build::folder(false)) };
    ended(run(&Args::parse()))
}

/// Runs the soak, and prints a summary of the figures. Returns whether no invariant was violated.
fn run(args: &Args) -> Result<bool> {
    setup::ensure(setup::Scope::Lab)?;
    if let Some(obstacle) = lab::skip::obstacle() {
        bail!("the soak creates network namespaces and loads eBPF programs: {obstacle}");
    }
    let binaries = build::binaries(false)?;
    let seed = args
        .seed
        .unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_nanos() as u64 | 1));
    let mut world = SoakLab::build(&binaries)?;
    let (mut judge, mut churn) = (Judge::new(&world), Churn::new(seed));
    world.start()?;
    let started = Instant::now();
    println!("soaking for {} min, --seed {seed}", args.minutes);

    let (end, mut report) = (started + Duration::from_secs(60 * args.minutes), started + REPORT);
    while Instant::now() < end {
        if let Err(error) = churn.step(&mut world) {
            judge.violation("a change could not be carried out", &format!("{error:#}"));
        }
        judge.look(&world);
        if Instant::now() > report {
            report += REPORT;
            println!("{:>4} s: {}", started.elapsed().as_secs(), judge.line());
        }
        std::thread::sleep(churn.between(PAUSES));
    }
    if let Err(error) = churn.calm_down(&mut world) {
        judge.violation("a fault could not be repaired", &format!("{error:#}"));
    }
    judge.conclude(&mut world, &churn)?;
    summary(&judge, started.elapsed());
    Ok(judge.violations().is_empty())
}

fn summary(judge: &Judge, elapsed: Duration) {
    println!("\nafter {} s:", elapsed.as_secs());
    let width = judge.figures().keys().map(|name| name.len()).max().unwrap_or(0);
    for (name, figure) in judge.figures() {
        println!("  {name:width$}  {figure}");
    }
    match judge.violations() {
        [] => println!("\nno invariant was violated"),
        all => {
            println!("\n{} violations:", all.len());
            all.iter().for_each(|violation| println!("  {violation}"));
        }
    }
}
