//! The maps, and what lookups in them decide without a flow: policies, pods, the gate, datagrams, counters.

pub mod classify;
pub mod datagram;
pub mod deadline;
pub mod egress;
pub mod family;
pub mod gate;
pub mod maps;
pub mod share;
pub mod stats;
pub mod trace;
pub mod traffic;
