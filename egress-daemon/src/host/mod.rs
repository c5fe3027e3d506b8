//! The node's network as the agent finds and prepares it: links, addresses and default routes, the tunnel device,
//! probes, announcements of egress IPs, sysctls and the ports that the node itself uses.
//!
//! Everything here works in the network namespace of the process (in tests: of the thread) and speaks netlink,
//! AF_PACKET and /proc. It knows nothing of eBPF, of objects or of the plan; `agent` joins them. What decides
//! (`classify`, `table`, `schedule`, `frames`, `ports::NodePorts`) is pure and does no I/O.

pub mod advertise;
pub mod announce;
pub mod classify;
pub mod cleanup;
mod decode;
pub mod far;
pub mod firewall;
pub mod frames;
pub mod groups;
pub mod links;
pub mod netlink;
mod packet;
pub mod ports;
pub mod probe;
pub mod route;
pub mod schedule;
pub mod shaper;
pub mod sysctl;
pub mod table;
pub mod tunnel;

#[cfg(test)]
pub(crate) mod testing;

use std::fmt;

/// An Ethernet address, in the order of the wire.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// All hosts of the segment.
    pub const BROADCAST: MacAddress = MacAddress([0xff; 6]);
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

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
