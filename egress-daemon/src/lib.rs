//! The agent, the controller and what egressctl needs.

pub mod host;
