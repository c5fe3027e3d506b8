//! The observability of a running agent or controller: logs, metrics, and the agent's local socket.
//!
//! These modules only show the state that they are given. They decide and change nothing.

pub mod admin;
mod family;
mod http;
pub mod logs;
pub mod metrics;
pub mod state;
mod traffic;
