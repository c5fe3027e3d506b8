//! The flow table: keys, ports, the life cycle of flows, and connections that are left alone.

pub mod collect;
pub mod ended;
pub mod firewall;
pub mod inbound;
pub mod key;
pub mod log;
pub mod ports;
pub mod recheck;
pub mod table;
