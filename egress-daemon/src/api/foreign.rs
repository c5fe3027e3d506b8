//! Objects of other systems that are read as they are: Cilium's egress policies, Antrea's Egress and ExternalIPPool, and what CNIs
//! say of the networks of pods. Their
//! shapes are theirs; what Spillway adds is the status of Cilium's, and further fields in the status of Antrea's.
//!
//! Nothing is refused here but a wrong type: what the other system would refuse, and how, is for `translate` to say.

mod antrea;
mod cilium;
pub mod networks;

pub use antrea::{
    AppliedTo, Egress, EgressSpec, EgressStatus, ExternalIPPool, ExternalIPPoolSpec, ExternalIPPoolStatus,
};
pub use cilium::{CiliumEgressGateway, CiliumEgressGatewayPolicy, CiliumEgressGatewayPolicySpec, CiliumSelector};
