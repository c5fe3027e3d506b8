//! Transports to another node and out of this one, and packets that do not fit them.

pub mod carrier;
pub mod device;
pub mod exit;
pub mod large;
pub mod mss;
pub mod nodes;
pub mod probe;
pub mod send;
pub mod shaper;
pub mod vxlan;
