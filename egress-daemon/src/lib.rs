//! The agent, the controller and what egressctl needs.

pub mod health;
pub mod model;
pub mod plan;
