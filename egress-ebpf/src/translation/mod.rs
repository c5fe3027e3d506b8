//! Rewriting addresses and ports, with every checksum that covers them.

pub mod quote;
pub mod rewrite;
