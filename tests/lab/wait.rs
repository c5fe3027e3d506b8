//! Waits for conditions: the only place where the lab lets time pass.

use std::fmt::Debug;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};

/// The pause between two looks. It grows with the last look's duration, so that looks (such as by kubectl) take a fifth of a CPU at most.
const PAUSE: Duration = Duration::from_millis(5);
const PAUSE_PER_LOOK: u32 = 4;

/// Returns the factor by which all timeouts grow, for example in an emulated machine.
fn slowness() -> u32 {
    std::env::var("SPILLWAY_SLOWNESS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Waits until `condition` returns `Ok(true)`. An error of the condition counts as "not yet", and is part of the message after the timeout.
pub fn wait_for(what: &str, timeout: Duration, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    wait_until(what, timeout, &mut condition, |met| *met).map(drop)
}

/// Waits until the value that `look` returns is `good`, and returns it. After the timeout, the error shows the last value.
///
/// ```
/// let mut answers = ["no", "no", "yes"].into_iter();
/// let seen = lab::wait_until("yes", std::time::Duration::from_secs(1), || Ok(answers.next()), |one| *one == Some("yes"))?;
/// assert_eq!(seen, Some("yes"));
/// # anyhow::Ok(())
/// ```
pub fn wait_until<T: Debug>(
    what: &str,
    timeout: Duration,
    mut look: impl FnMut() -> Result<T>,
    mut good: impl FnMut(&T) -> bool,
) -> Result<T> {
    let (start, timeout) = (Instant::now(), timeout * slowness());
    loop {
        let begun = Instant::now();
        let seen = look();
        let took = begun.elapsed();
        match seen {
            Ok(value) if good(&value) => return Ok(value),
            seen if start.elapsed() >= timeout => {
                let last = match seen {
                    Ok(value) => format!("{value:?}"),
                    Err(error) => format!("{error:#}"),
                };
                return Err(anyhow!("waited {timeout:?} for: {what}; the last state was: {last}"));
            }
            _ => thread::sleep(PAUSE.max(PAUSE_PER_LOOK * took)),
        }
    }
}

/// Checks that `condition` holds for all of `duration`, to test that something does not happen. Fails as soon as it
/// returns anything but `Ok(true)`.
///
/// ```
/// use std::time::Duration;
///
/// let mut looks = 0;
/// lab::stays("few looks", Duration::from_millis(20), || Ok(looks < 1_000))?;
/// let ended = lab::stays("no third look", Duration::from_secs(60), || {
///     looks += 1;
///     Ok(looks < 3)
/// });
/// assert!(ended.is_err() && looks == 3);
/// # anyhow::Ok(())
/// ```
pub fn stays(what: &str, duration: Duration, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    loop {
        let begun = Instant::now();
        let met = condition();
        let (took, so_far) = (begun.elapsed(), start.elapsed());
        let changed = || format!("after {so_far:?} of {duration:?}, this no longer held: {what}");
        ensure!(met.with_context(changed)?, "{}", changed());
        let Some(left) = duration.checked_sub(so_far).filter(|left| !left.is_zero()) else { return Ok(()) };
        thread::sleep(PAUSE.max(PAUSE_PER_LOOK * took).min(left));
    }
}
