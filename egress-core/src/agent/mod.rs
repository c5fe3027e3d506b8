//! An agent's decisions: from the objects, the links and the probes to the intended contents of the node's datapath.

pub mod blocks;
pub mod carriers;
#[cfg(test)]
mod carriers_tests;
pub mod demand;
pub mod effective;
pub mod facts;
pub mod gateways;
pub mod heartbeat;
pub mod history;
pub mod kept;
pub mod late;
pub mod machine;
pub mod ports;
pub mod programmed;
pub mod reach;
pub mod takeovers;
pub mod transports;
pub mod troubles;
pub mod unnamed;
pub mod view;
#[cfg(test)]
mod view_tests;
