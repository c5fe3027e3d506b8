//! Finds and prepares the node's network for the agent: links, addresses and default routes, the tunnel device, probes, announcements of
//! egress IPs, sysctls and the ports that the node itself uses.
//!
//! Everything here works in the network namespace of the process (in tests: of the thread) and uses netlink, AF_PACKET and /proc. It knows
//! nothing of eBPF, Kubernetes objects or the plan; the agent joins them. `decode`, `frames` and the firewall's rules are pure.

pub mod advertise;
pub mod announce;
pub mod cleanup;
mod decode;
pub mod far;
pub mod firewall;
pub mod frames;
pub mod groups;
pub mod links;
pub mod netlink;
pub mod packet;
pub mod ports;
pub mod probe;
pub mod route;
pub mod shaper;
pub mod sysctl;
pub mod tunnel;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

use std::fmt;

/// A problem on the node that does not stop the agent, and that an administrator can solve.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Warning {
    /// The affected object, for example `net.ipv4.ip_forward` or `spillway0`.
    pub object: String,
    /// The finding.
    pub message: String,
    /// The remedy.
    pub remedy: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.object, self.message, self.remedy)
    }
}
