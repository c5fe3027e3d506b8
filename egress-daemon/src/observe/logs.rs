//! Logging to stderr.

use clap::ValueEnum;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// The format of a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Human-readable text.
    #[default]
    Human,
    /// One JSON object per line.
    Json,
}

/// A filter that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error(
    "the log filter {filter:?} cannot be parsed: {message}; write a level (error, warn, info, debug, trace) or target=level,.."
)]
pub struct FilterError {
    filter: String,
    message: String,
}

fn filter(text: &str) -> Result<EnvFilter, FilterError> {
    let message = |error: tracing_subscriber::filter::ParseError| error.to_string();
    EnvFilter::builder().parse(text).map_err(|error| FilterError { filter: text.to_owned(), message: message(error) })
}

/// Starts logging for the whole process; a second call changes nothing.
pub fn start(text: &str, format: LogFormat) -> Result<(), FilterError> {
    let filter = filter(text)?;
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let started = match format {
        LogFormat::Human => logs.with_target(false).try_init(),
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
    };
    // This fails only if the process already has a logger.
    drop(started);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_checked() {
        for good in ["info", "warn,egress_daemon=debug", ""] {
            assert!(filter(good).is_ok(), "{good}");
        }
        let error = filter("egress_daemon=loud").unwrap_err().to_string();
        assert!(error.contains("egress_daemon=loud") && error.contains("debug"), "{error}");
    }
}
