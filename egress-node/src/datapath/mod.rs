//! The kernel's side of a node: the programs, where they are attached, and the maps that they read.
//!
//! May know aya and the records of `egress-common`; knows neither objects nor the store. [`tables`], [`transports`] and
//! [`encode`] are pure.

pub mod answers;
pub mod attach;
mod batch;
pub mod drivers;
mod filters;
mod grown;
pub mod load;
pub mod maps;
pub mod native;
mod rtnetlink;
pub mod strangers;
mod syscall;
mod tcx;
pub mod trace;
pub mod write;

#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

use nix::time::{ClockId, clock_gettime};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where the pins of one agent are: `DIR/v1/maps/NAME` and `DIR/v1/links/PROGRAM-IFINDEX`.
#[derive(Clone, Debug)]
pub struct Pins {
    root: PathBuf,
}

impl Pins {
    /// The pins below `dir` (`--bpffs`).
    pub fn new(dir: &Path) -> Self {
        Self { root: dir.to_path_buf() }
    }
    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }
    /// The directory of this layout version.
    pub fn version(&self) -> PathBuf {
        self.root.join(format!("v{}", egress_common::abi::LAYOUT_VERSION))
    }
    /// The directory of the maps.
    pub fn maps(&self) -> PathBuf {
        self.version().join("maps")
    }
    /// The directory of the links.
    pub fn links(&self) -> PathBuf {
        self.version().join("links")
    }
    /// The pin of one map.
    pub fn map(&self, name: &str) -> PathBuf {
        self.maps().join(name)
    }
}

/// `CLOCK_MONOTONIC` in ns, the programs' clock. Every kernel has it.
pub fn monotonic_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |now| Duration::from(now).as_nanos() as u64)
}
