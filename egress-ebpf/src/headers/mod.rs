//! Packet bytes: reading and writing them, their headers, and the notes of the programs. Uses no tables.

pub mod context;
pub mod fields;
pub mod frame;
pub mod hidden;
pub mod ip;
pub mod note;
pub mod outer;
pub mod packet;
pub mod parse;
