//! Ctrl-C: every lab is removed before the program ends, and a message says so.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static LABS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Watches for Ctrl-C and similar signals from now on.
pub fn watch() -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot handle signals")?;
    thread::Builder::new().name("interrupt".to_owned()).spawn(move || signals.forever().next().map(|one| end(one)))?;
    Ok(())
}

fn end(signal: i32) -> ! {
    INTERRUPTED.store(true, Ordering::SeqCst);
    let labs = LABS.lock().unwrap_or_else(PoisonError::into_inner);
    if !labs.is_empty() {
        eprintln!("\ninterrupted: removing the lab ...");
    }
    for id in labs.iter() {
        if let Err(error) = lab::scope::remove(id) {
            eprintln!("error: {error:#}");
        }
    }
    // What a shell expects.
    std::process::exit(128 + signal);
}

/// Registers a lab that an interruption removes. One that is gone by then does no harm.
pub fn guard(lab: &str) {
    LABS.lock().unwrap_or_else(PoisonError::into_inner).push(lab.to_owned());
}

/// Does not return when the program is being interrupted: what fails now fails because the lab is going.
pub fn wait_if_interrupted() {
    while INTERRUPTED.load(Ordering::SeqCst) {
        thread::park();
    }
}
