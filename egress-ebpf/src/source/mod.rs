//! The source node: packets that pods send and receive, and the checks on packets that leave the node.

pub mod deliver;
pub mod fragment;
pub mod guard;
pub mod icmp;
pub mod masquerade;
pub mod own;
pub mod service;
pub mod steer;
pub mod translated;
