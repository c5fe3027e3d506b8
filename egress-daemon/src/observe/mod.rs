//! What others see of a running agent or controller: logs, metrics, and the agent's local socket.
//!
//! It only shows what it is given: it decides nothing and changes nothing.

pub mod admin;
mod family;
mod http;
pub mod logs;
pub mod metrics;
pub mod state;
mod traffic;
