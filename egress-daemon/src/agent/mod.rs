//! The agent: follows objects, links and probes, and programs the node's datapath accordingly.
//!
//! `egress_core::agent::machine` decides what to do and in which order. `node` is the loop, and `actions` carries out the decisions.
//! `status` and `tell` produce the agent's reports.

pub mod able;
mod actions;
mod aside;
mod count;
pub mod facts;
mod failing;
mod hooks;
mod native;
mod node;
mod owned;
mod reopen;
mod routes;
pub mod settings;
pub mod status;
mod tell;
pub mod trace;

pub use able::while_waiting;
pub use node::{Agent, Options};
pub use settings::AgentSettings;
