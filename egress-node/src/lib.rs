//! A node as Spillway finds and changes it: the kernel's programs and maps ([`datapath`]), and the host's network ([`host`]).
//!
//! `egress-core` makes the decisions, and the agent calls these modules to carry them out.

pub mod datapath;
pub mod host;
mod netlink;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
