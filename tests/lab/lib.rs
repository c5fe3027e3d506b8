//! Topologies, captures and traffic, shared by demo, tests and benchmark.
//!
//! A [`topology::Lab`] is a small cluster made of network namespaces; [`process`] runs Spillway's programs in it,
//! [`traffic`] makes pods exchange traffic with the outside, [`capture`] records packets, and [`wait`] waits for
//! conditions. The lab starts Spillway's programs but depends on none of its crates. It needs root, `ip` and `nft`;
//! without them, [`Builder::run`] skips the test. Tests that need them outside of it begin with [`require_root!`].
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
//! use lab::{Capture, Cni, Family, Lab, PodSpec, StartOptions, wait_until};
//!
//! Lab::builder().workers(2).gateways(3).cni(Cni::Bridge).run(|lab| {
//!     let web = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
//!     lab.manifests().write("policy", "kind: EgressGatewayPolicy ...")?;
//!     lab.start_controller("controller", &StartOptions::new())?;
//!     lab.start_agents(&StartOptions::new())?;
//!     wait_until(
//!         "the policy is in force",
//!         Duration::from_secs(10),
//!         || lab.egressctl("worker1", &["policies"]),
//!         |policies| policies[0]["ready"] == true,
//!     )?;
//!     let server = lab.server("server1");
//!     let (echo, capture) =
//!         (TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?, Capture::start(&server.ns, "eth0")?);
//!     let target = server.ips.at(Family::V4, 80);
//!     let clients = TcpClients::establish(&web.ns, target, 300, TcpOptions::once())?;
//!     clients.wait("all echoes", Duration::from_secs(10), |all| all.iter().all(|one| one.received == 1))?;
//!     let spread: Vec<u64> = echo.sources().values().map(|&count| count as u64).collect();
//!     assert!(lab::stats::is_even(&spread), "{spread:?}");
//!     let allowed = [10, 11, 12].map(|host| lab::address::external(host).v4.into());
//!     assert!(capture.finish()?.unexpected_sources_towards(target.ip(), &allowed).is_empty());
//!     Ok(())
//! });
//! ```

#[cfg(not(target_os = "linux"))]
compile_error!("the lab is made of Linux network namespaces");

mod background;
pub mod bgp;
pub mod bpf;
pub mod browser;
pub mod capture;
pub mod cluster;
pub mod command;
pub mod frames;
pub mod hook;
pub mod machine;
pub mod manifests;
pub mod netns;
pub mod nfdump;
pub mod oci;
mod offload;
pub mod process;
pub mod prometheus;
pub mod scope;
mod seccomp;
pub mod skip;
pub mod stats;
pub mod topology;
pub mod traffic;
pub mod vlan;
pub mod vrrp;
pub mod wait;

pub use capture::{Capture, Packet, Trace};
pub use manifests::Manifests;
pub use netns::NetNs;
pub use process::{Process, StartOptions};
pub use topology::{Builder, Cni, Dual, Family, Lab, LabNode, Pod, PodSpec, Role, Segment, Server, address};
pub use vlan::Vlans;
pub use wait::{stays, wait_for, wait_until};
