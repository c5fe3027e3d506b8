//! The agent: follows objects, links and probes, and makes the node's datapath do what they say.
//!
//! [`view`] decides and is pure, and so do `blocks` and `transports`; `node` joins the store, the kernel and the host's network; `status`
//! says what the agent reports. The loop is level-triggered: whatever happened, the whole view is made again and the difference is written.

mod able;
mod aside;
mod count;
mod facts;
mod hooks;
mod networks;
mod node;
mod owned;
mod reconcile;
mod routes;
pub mod settings;
#[cfg(test)]
mod sim;
mod status;
mod tell;

pub use able::while_waiting;
pub use node::{Agent, Options};
pub use settings::Settings;
