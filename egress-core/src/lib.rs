//! Spillway's decisions: which gateway carries which egress IP, which pod uses it, and what a node's maps contain.
//!
//! Nothing here does I/O, reads a clock or starts a task: inputs and the time are arguments, decisions are results.
//! `Cargo.toml` names no library that could.

#[macro_use]
mod named;

pub mod agent;
pub mod encode;
pub mod health;
pub mod leaselog;
pub mod model;
pub mod network;
pub mod plan;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
