//! The gateway: out for the egress IPs that it carries, and back to the source node. It keeps nothing of a flow.

pub mod forward;
pub mod native;
pub mod neighbor;
pub mod shaped;
pub mod tunnelled;
pub mod underlay;
