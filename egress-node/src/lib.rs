//! A node as Spillway finds and changes it: the kernel's programs and maps ([`datapath`]), and the host's network ([`host`]).
//!
//! Both do what they are told. What is to be done, `egress-core` decides; who tells them, is the agent.

pub mod datapath;
pub mod host;
