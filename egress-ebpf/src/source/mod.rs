//! The source node: what pods send and get, and what may leave the node.

pub mod deliver;
pub mod fragment;
pub mod gate;
pub mod guard;
pub mod icmp;
pub mod masquerade;
pub mod own;
pub mod service;
pub mod steer;
pub mod translated;
