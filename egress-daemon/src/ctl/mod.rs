//! What `egressctl` does: reads the pinned maps and asks the agent, makes views of them, and prints those.
//!
//! Views are pure functions of what was read, so that they are tested without a kernel.

pub mod dump;
pub mod explain;
pub mod print;
pub mod views;

pub use print::Output;

/// Where an agent's pins are, unless it is told otherwise.
pub const DEFAULT_BPFFS: &str = "/sys/fs/bpf/spillway";
