//! `cargo xtask demo`: Spillway in a small cluster of network namespaces, and claims that are measured while a newcomer
//! watches. Like any user, the demo knows Spillway only as programs to start, manifests to write and files to read.

mod claims;
mod cluster;
mod flows;
mod keep;
mod on_kubernetes;
mod scenes;
mod screen;
mod sightings;
mod streams;
mod table;

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Parser;

use self::claims::Claims;
use self::cluster::Show;
use self::screen::Screen;
use xtask::{build, ended, setup};

/// Watch Spillway work, and fail, in a small cluster of network namespaces
#[derive(Parser)]
#[command(name = "cargo xtask demo", bin_name = "cargo xtask demo")]
pub struct Args {
    /// Print only the claims, as JSON: {"claims": [{"name", "holds", "expected", "measured"}]}
    #[arg(long)]
    json: bool,
    /// Run on a real Kubernetes on this machine (`cargo xtask cluster`), and show the output of kubectl
    #[arg(long)]
    cluster: bool,
    /// Leave the lab up at the end, and print commands to look around in it
    #[arg(long)]
    keep: bool,
    /// Only the spread, the pods with an address of their own, and the death of a gateway
    #[arg(long)]
    quick: bool,
    /// Remove labs that were left up, and do nothing else
    #[arg(long, exclusive = true)]
    remove: bool,
}

fn main() -> ExitCode {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("SPILLWAY_BIN", build::folder(false)) };
    ended(run(&Args::parse()))
}

/// Runs the demo. Returns whether all claims hold.
fn run(args: &Args) -> Result<bool> {
    match args {
        Args { remove: true, .. } => remove().map(|()| true),
        Args { cluster: true, .. } => on_kubernetes::demo(args),
        _ => demo(args),
    }
}

fn remove() -> Result<()> {
    match lab::scope::remove_kept()?.as_slice() {
        [] => println!("No lab was left up."),
        labs => println!("Removed {}.", labs.join(", ")),
    }
    Ok(())
}

/// Runs the demo on network namespaces. Returns whether all claims hold.
fn demo(args: &Args) -> Result<bool> {
    setup::ensure(if args.quick { setup::Scope::Lab } else { setup::Scope::Demo })?;
    if let Some(obstacle) = lab::skip::obstacle() {
        bail!("the demo needs network namespaces and eBPF programs: {obstacle}");
    }
    let binaries = build::binaries(false)?;
    let started = Instant::now();
    let screen = Screen::new(args.json);
    screen.lines(&introduction());
    let mut show = Show::open(screen, &binaries)?;

    let played = play(&mut show, args.quick);
    if let Err(error) = played {
        let mut measured = format!("{error:#}");
        for obituary in show.logs_of_ended_processes() {
            measured.push_str(&format!("\n{obituary}"));
        }
        show.claim("the demo runs to its end", false, "no error", measured);
    }
    conclude(show, args, &binaries, started)
}

fn play(show: &mut Show, quick: bool) -> Result<()> {
    show.screen.wait("start an agent on each node", || show.wait_agents())?;
    show.screen.wait("apply manifests/examples and wait until they are in force", || show.apply())?;
    for scene in scenes::QUICK {
        scene(show)?;
        show.near.forget_closed();
    }
    for scene in scenes::REST.iter().filter(|_| !quick) {
        scene(show)?;
        show.near.forget_closed();
    }
    let seen = show.sightings.clone();
    show.screen.scene(
        "Throughout",
        "A capture on the server's interface has seen every packet of all scenes. Each had to come from an egress IP of a \
         policy.",
    );
    show.claim("no packet ever has a wrong address", seen.are_clean(), "0 packets", seen.sentence());
    Ok(())
}

/// Shows the summary, and ends or keeps the lab.
fn conclude(show: Show, args: &Args, binaries: &Path, started: Instant) -> Result<bool> {
    let Show { screen, claims, lab, streams, near, far, .. } = show;
    // The servers' ports must be free for the server that a kept lab gets.
    drop((streams, near, far));
    summary(&screen, &claims, started);
    if args.keep {
        keep::keep(lab, &screen, binaries)?;
    } else {
        drop(lab);
        if !claims.all_hold() {
            screen.say("Run `cargo xtask demo --keep` to look around in the lab, and at its logs.");
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&claims)?);
    }
    Ok(claims.all_hold())
}

fn summary(screen: &Screen, claims: &Claims, started: Instant) {
    screen.lines(&[String::new(), "Summary".to_owned()]);
    screen.table(&claims.table());
    screen.lines(&[format!("{}, in {} s.", claims.line(), started.elapsed().as_secs())]);
}

fn introduction() -> Vec<String> {
    r#"
Spillway spreads the traffic that leaves a Kubernetes cluster over several gateways. Here is such a cluster,
made of network namespaces on this machine, with a real agent on each node and a real controller:

  web-1 web-2                                          ┌ gw1 ┐
  ledger-1..3 mail-1 ── worker1 ┐                      │     │
                                ├── nodes' network ────┼ gw2 ┼── outside ── server1
  web-3 web-4                   │                      │     │      │
  ledger-4..6 ───────── worker2 ┘                      └ gw3 ┘   router ── far1

Pods are connected in the two ways that CNIs use: veths with routes (worker1), a bridge (worker2).
The policies in force are those of manifests/examples/."#
        .lines()
        .map(str::to_owned)
        .collect()
}
