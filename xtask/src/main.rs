//! Spillway's developer commands: `cargo xtask setup | build | demo | bench | cluster | image | codegen | tidy | soak | test`. Each
//! command has its own module, except demo, bench and soak, which share [`programs`].

mod codegen;
mod guest;
mod programs;
mod test;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::{build, cluster, ended, image, process, progress, setup, toolchain, workspace};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Spillway's developer commands")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Setup(setup::Args),
    Build(build::Args),
    /// Watch Spillway work and handle failures in a small cluster of network namespaces
    #[command(disable_help_flag = true)]
    Demo(programs::Args),
    /// Compare Spillway with plain routing and with a gateway of the stock kernel, on this machine
    #[command(disable_help_flag = true)]
    Bench(programs::Args),
    Cluster(cluster::Args),
    Image(image::Args),
    /// Write the generated files: the CRDs, the chart's templates and docs/reference/settings.md
    Codegen(codegen::Args),
    /// Check the rules that no compiler checks: module docs, file sizes, unreached files, links, formatting
    Tidy,
    /// Run connections and changes of every kind for as long as you like, and check the results at a server
    #[command(disable_help_flag = true)]
    Soak(programs::Args),
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
        Command::Bench(args) => programs::run("bench", &args),
        Command::Soak(args) => programs::run("soak", &args),
        Command::Demo(args) => programs::run("demo", &args),
        Command::Test(args) => return test::run(&args),
    };
    ended(result.map(|()| true))
}
