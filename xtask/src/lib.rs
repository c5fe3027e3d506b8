//! What Spillway's developer commands share with the programs that they start: the demo, the benchmark and the soak, which are targets of the package
//! `tests`.

pub mod build;
pub mod cluster;
pub mod image;
pub mod process;
pub mod progress;
pub mod setup;
pub mod toolchain;
pub mod workspace;

use std::process::ExitCode;

/// The exit status of a program that ran to its end, possibly with the result that something does not hold.
pub fn ended(result: anyhow::Result<bool>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
