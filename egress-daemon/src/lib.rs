//! The agent, the controller and what egressctl needs.

pub mod api;
pub mod datapath;
pub mod host;
