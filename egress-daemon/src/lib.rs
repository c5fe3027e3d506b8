//! The agent, the controller and what egressctl needs.

pub mod agent;
pub mod api;
pub mod check;
pub mod cleanup;
pub mod config;
pub mod controller;
pub mod ctl;
pub mod datapath;
pub mod health;
pub mod host;
pub mod lock;
pub mod model;
pub mod observe;
pub mod plan;
pub mod snapshot;
pub mod store;
pub mod translate;
