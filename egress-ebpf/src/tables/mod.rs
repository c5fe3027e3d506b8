//! The maps, and lookups in them that need no flow: policies, pods, datagrams, counters.

pub mod classify;
pub mod datagram;
pub mod deadline;
pub mod egress;
pub mod family;
pub mod maps;
pub mod share;
pub mod stats;
pub mod trace;
pub mod traffic;
