//! Ctrl-C: every lab is removed before the program ends, and the terminal is told so.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// The signals, and the exit status that a shell expects after each.
const SIGNALS: [(Signal, i32); 3] = [(Signal::SIGINT, 130), (Signal::SIGTERM, 143), (Signal::SIGHUP, 129)];

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static LABS: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// The end of the pipe that the handler writes to.
static PIPE: OnceLock<OwnedFd> = OnceLock::new();

/// Watches for Ctrl-C and its like from now on. A handler is used and no mask, because programs that are started inherit
/// the mask.
pub fn watch() -> Result<()> {
    let (read, write) = nix::unistd::pipe().context("cannot make a pipe")?;
    // Called once in a run.
    PIPE.set(write).ok();
    let action = SigAction::new(SigHandler::Handler(on_signal), SaFlags::SA_RESTART, SigSet::empty());
    for (signal, _) in SIGNALS {
        // SAFETY: the handler only makes a system call that is safe in handlers.
        unsafe { sigaction(signal, &action) }.with_context(|| format!("cannot handle {signal}"))?;
    }
    thread::Builder::new().name("interrupt".to_owned()).spawn(move || {
        let mut signal = [0];
        if File::from(read).read_exact(&mut signal).is_ok() {
            end(i32::from(signal[0]));
        }
    })?;
    Ok(())
}

extern "C" fn on_signal(signal: i32) {
    if let (Some(pipe), Ok(signal)) = (PIPE.get(), u8::try_from(signal)) {
        // SAFETY: the pipe is never closed.
        let pipe = unsafe { BorrowedFd::borrow_raw(pipe.as_raw_fd()) };
        nix::unistd::write(pipe, &[signal]).ok();
    }
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
    let status = SIGNALS.iter().find(|(one, _)| *one as i32 == signal).map_or(130, |(_, status)| *status);
    std::process::exit(status);
}

/// Names a lab that an interruption removes. One that is gone by then does no harm.
pub fn guard(lab: &str) {
    LABS.lock().unwrap_or_else(PoisonError::into_inner).push(lab.to_owned());
}

/// Does not return when the program is being interrupted: what fails now fails because the lab is going.
pub fn wait_if_interrupted() {
    while INTERRUPTED.load(Ordering::SeqCst) {
        thread::park();
    }
}
