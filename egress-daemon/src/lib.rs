//! The agent, the controller and what egressctl needs.

pub mod api;
pub mod config;
pub mod datapath;
pub mod health;
pub mod host;
pub mod model;
pub mod plan;
pub mod store;
