//! The agent: follows objects, links and probes, and makes the node's datapath do what they say.
//!
//! [`view`] decides and is pure; `node` joins the store, the kernel and the host's network; `status` says what the agent
//! reports. The loop is level-triggered: whatever happened, the whole view is made again and the difference is written.

mod demand;
mod facts;
mod gateways;
mod node;
mod owned;
pub mod settings;
mod status;
pub mod view;
#[cfg(test)]
mod view_tests;

pub use node::{Agent, Options};
pub use settings::Settings;
