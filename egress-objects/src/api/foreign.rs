//! Objects of other systems, read as they are: Cilium's egress policies, Antrea's Egress and ExternalIPPool, and the objects in
//! which CNIs name the networks of pods. The other systems define their schemas. Spillway adds the status of Cilium's, and fields
//! to the status of Antrea's.
//!
//! Only wrong types are rejected here: `translate` decides what the other system would reject, and how.

mod antrea;
mod cilium;
pub mod networks;

pub use antrea::{
    AppliedTo, Egress, EgressSpec, EgressStatus, ExternalIPPool, ExternalIPPoolSpec, ExternalIPPoolStatus,
};
pub use cilium::{CiliumEgressGateway, CiliumEgressGatewayPolicy, CiliumEgressGatewayPolicySpec, CiliumSelector};
