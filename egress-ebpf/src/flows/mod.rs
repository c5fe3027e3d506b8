//! The flow table: keys, ports, beginning, checking, ending and collecting of flows, and what is left alone.

pub mod collect;
pub mod ended;
pub mod firewall;
pub mod inbound;
pub mod key;
pub mod log;
pub mod ports;
pub mod recheck;
pub mod table;
