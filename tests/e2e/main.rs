//! Spillway end to end: the real programs in network namespaces, judged by what arrives at a server.
//!
//! One module for each subject. Every test builds its own lab, so tests run in any order and in parallel; [`support`]
//! has what they share. `tests/README.md` lists the test for each row of the list of failures.

mod abuse;
mod antrea;
mod bandwidth;
mod bgp;
mod carriers;
mod cilium;
mod clouds;
mod examples;
mod exit;
mod exits;
mod export;
mod failover;
mod firewall;
mod forged;
mod hooks;
mod host_rules;
mod monitoring;
mod overflow;
mod owners;
mod page;
mod per_endpoint;
mod pod_end;
mod pod_start;
mod policies;
mod pools;
mod ports;
mod protocols;
mod restart;
mod security;
mod services;
mod sizes;
mod slots;
mod spread;
mod store;
mod subnets;
mod support;
mod trace;
mod transport;
mod untouched;
mod whois;
mod xdp;
mod zones;
