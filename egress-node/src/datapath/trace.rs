//! The output of a trace's programs: lines of `aya-log`, and the number of packets to report.

use super::load::{LoadError, Programs, TRACE_SEEN};
use aya::maps::{MapData, MapError, PerCpuArray};
use aya_log::EbpfLogger;
use log::{Log, Metadata, Record};
use std::{
    os::fd::{AsRawFd, RawFd},
    sync::{Arc, Mutex, PoisonError},
};

/// The lines of a trace. The descriptor is readable when there are lines.
pub struct Lines {
    logger: EbpfLogger<Buffer>,
    buffer: Buffer,
    seen: PerCpuArray<MapData, u64>,
}

#[derive(Clone, Default)]
struct Buffer(Arc<Mutex<Vec<String>>>);

impl Log for Buffer {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(record.args().to_string());
    }

    fn flush(&self) {}
}

impl Lines {
    /// Opens the lines of programs that [`Programs::load_trace`] has loaded.
    pub fn of(programs: &mut Programs) -> Result<Self, LoadError> {
        let object = |error: &dyn ToString| LoadError::Object(error.to_string());
        let seen = programs.ebpf().take_map(TRACE_SEEN).ok_or_else(|| object(&TRACE_SEEN))?;
        let seen = PerCpuArray::try_from(seen).map_err(|error| object(&error))?;
        let buffer = Buffer::default();
        let logger = EbpfLogger::init_with_logger(programs.ebpf(), buffer.clone()).map_err(|error| object(&error))?;
        Ok(Self { logger, buffer, seen })
    }

    /// Returns the lines since the last call.
    pub fn take(&mut self) -> Vec<String> {
        self.logger.flush();
        std::mem::take(&mut *self.buffer.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the number of packets that were to be reported until now, whether they were or not.
    pub fn seen(&self) -> Result<u64, MapError> {
        Ok(self.seen.get(&0, 0)?.iter().sum())
    }
}

impl AsRawFd for Lines {
    fn as_raw_fd(&self) -> RawFd {
        self.logger.as_raw_fd()
    }
}
