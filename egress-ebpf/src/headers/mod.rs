//! Bytes of packets: reading and writing them, their headers, what a program notes in them. Knows no table.

pub mod context;
pub mod fields;
pub mod frame;
pub mod hidden;
pub mod ip;
pub mod note;
pub mod outer;
pub mod packet;
pub mod parse;
