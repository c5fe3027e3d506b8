//! The code that Spillway's developer commands share with the demo, the benchmark and the soak, which are targets of the package `tests`.

pub mod build;
pub mod cluster;
pub mod image;
pub mod process;
pub mod progress;
pub mod setup;
pub mod toolchain;
pub mod workspace;

use std::process::ExitCode;

/// Returns the exit code for a result. `Ok(false)` means that the program ran to its end but a check failed.
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
