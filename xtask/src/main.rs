//! Spillway's developer commands: `cargo xtask setup | build | demo | bench | cluster | image | codegen | tidy | soak | test`. Each
//! command is a module of its own.

mod bench;
mod build;
mod cluster;
mod codegen;
mod demo;
mod guest;
mod image;
mod process;
mod progress;
mod setup;
mod soak;
mod test;
mod tidy;
mod toolchain;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Spillway's developer commands")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what building and testing need on this machine, or say what to install
    Setup(setup::Args),
    /// Build egress-daemon and egressctl, with the eBPF programs embedded
    Build(build::Args),
    /// Watch Spillway work, and fail, in a small cluster of network namespaces
    Demo(demo::Args),
    /// Compare Spillway with plain routing and with a gateway of the stock kernel, on this machine
    Bench(bench::Args),
    /// A real Kubernetes on this machine with Spillway in it: up, down, status
    Cluster(cluster::Args),
    /// Build the container image as an OCI archive, and the list of its contents
    Image(image::Args),
    /// Write what is generated: the CRDs, the chart's templates and docs/reference/settings.md
    Codegen(codegen::Args),
    /// Check the rules that no compiler checks: module docs, file sizes, unreached files, links, formatting
    Tidy,
    /// Run connections and changes of every kind for as long as you like, and judge what a server sees
    Soak(soak::Args),
    /// Run checks, unit tests and end-to-end tests, and count them
    Test(test::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Setup(args) => setup::run(&args),
        Command::Build(args) => build::run(&args),
        Command::Cluster(args) => cluster::run(&args),
        Command::Image(args) => image::run(&args),
        Command::Codegen(args) => codegen::run(&args),
        Command::Tidy => tidy::run(),
        Command::Bench(args) => bench::run(&args),
        Command::Demo(args) => return ended(demo::run(&args)),
        Command::Soak(args) => return ended(soak::run(&args)),
        Command::Test(args) => return test::run(&args),
    };
    ended(result.map(|()| true))
}

/// The exit status of a command that ran to its end, possibly with the result that something does not hold.
fn ended(result: anyhow::Result<bool>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
