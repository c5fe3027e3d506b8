//! The agent: follows objects, links and probes, and makes the node's datapath do what they say.
//!
//! What is decided, and in which order it is carried out, is `egress_core::agent::machine`. `node` is the loop, `actions` carries out;
//! `status` and `tell` say what the agent reports.

mod able;
mod actions;
mod aside;
mod count;
mod facts;
mod hooks;
mod native;
mod node;
mod owned;
mod reopen;
mod routes;
pub mod settings;
#[cfg(test)]
mod sim;
mod status;
mod tell;
pub mod trace;

pub use able::while_waiting;
pub use node::{Agent, Options};
pub use settings::AgentSettings;
