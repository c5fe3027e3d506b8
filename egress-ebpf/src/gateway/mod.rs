//! The gateway: sends packets of its egress IPs out and replies back to the source node, without flow state.

pub mod forward;
pub mod native;
pub mod neighbor;
pub mod shaped;
pub mod tunnelled;
pub mod underlay;
