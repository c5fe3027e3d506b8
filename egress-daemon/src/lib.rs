//! The agent, the controller and the implementation of egressctl.

pub mod agent;
pub mod check;
pub mod cleanup;
pub mod config;
pub mod connectivity;
pub mod controller;
pub mod ctl;
pub mod flowlog;
pub mod lock;
pub mod observe;
pub mod plugin;
pub mod serve;
pub mod store;
pub mod uninstall;
