//! Topologies, captures and traffic that demo, tests and benchmark share.
//!
//! A [`topology::Lab`] is a small cluster made of network namespaces; [`process`] runs Spillway's programs in it,
//! [`traffic`] makes pods talk to the outside, [`capture`] sees what passes, [`wait`] waits for conditions. The lab knows
//! Spillway only as programs to start: it depends on none of its crates. Needs root, `ip` and `nft`; programs that may run
//! elsewhere begin with [`require_root!`].

#[cfg(not(target_os = "linux"))]
compile_error!("the lab is made of Linux network namespaces");

pub mod capture;
mod command;
pub mod manifests;
pub mod netns;
pub mod process;
pub mod scope;
pub mod skip;
pub mod stats;
pub mod topology;
pub mod traffic;
pub mod wait;

pub use capture::{Capture, Packet, Trace};
pub use manifests::Manifests;
pub use netns::NetNs;
pub use process::{Process, StartOptions};
pub use topology::{Builder, Cni, Dual, Family, Lab, Node, Pod, PodSpec, Role, Segment, Server, address};
pub use wait::{wait_for, wait_until};
