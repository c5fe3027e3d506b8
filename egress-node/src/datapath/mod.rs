//! The kernel's side of a node: the programs, their hooks, and the maps that they read.
//!
//! May know aya and the records of `egress-common`, but neither Kubernetes objects nor the store.

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

/// The directories of one agent's pins: `DIR/v1/maps/NAME` and `DIR/v1/links/PROGRAM-IFINDEX`.
#[derive(Clone, Debug)]
pub struct Pins {
    root: PathBuf,
}

impl Pins {
    /// Returns the pins below `dir` (`--bpffs`).
    pub fn new(dir: &Path) -> Self {
        Self { root: dir.to_path_buf() }
    }
    /// Returns the directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }
    /// Returns the directory of this layout version.
    pub fn version(&self) -> PathBuf {
        self.root.join(format!("v{}", egress_common::abi::LAYOUT_VERSION))
    }
    /// Returns the directory of the maps.
    pub fn maps(&self) -> PathBuf {
        self.version().join("maps")
    }
    /// Returns the directory of the links.
    pub fn links(&self) -> PathBuf {
        self.version().join("links")
    }
    /// Returns the pin of one map.
    pub fn map(&self, name: &str) -> PathBuf {
        self.maps().join(name)
    }
}

/// Returns `CLOCK_MONOTONIC` in ns, the programs' clock. Every kernel has it.
pub fn monotonic_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |now| Duration::from(now).as_nanos() as u64)
}
