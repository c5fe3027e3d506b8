//! The node's network as the agent finds and prepares it: links, addresses and default routes, the tunnel device,
//! probes, announcements of egress IPs, sysctls and the ports that the node itself uses.
//!
//! Everything here works in the network namespace of the process (in tests: of the thread) and speaks netlink,
//! AF_PACKET and /proc. It knows nothing of eBPF, of objects or of the plan; `agent` joins them. The modules that
//! decide (`classify`, `table`, `schedule`, `frames`, `ports::NodePorts`) are pure and do no I/O.

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

/// Something on the node that is not as it should be, that does not stop the agent, and that an administrator can
/// change.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Warning {
    /// What it is about, for example `net.ipv4.ip_forward` or `spillway0`.
    pub object: String,
    /// What was found.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.object, self.message, self.remedy)
    }
}
