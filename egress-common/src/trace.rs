//! The interface between `egressctl trace` and its build of the programs.

use crate::{V4, V6, layout::map_type};

/// Separates a packet's number from the verdict in the packet's last line. The first line has [`FRAME`] instead.
pub const VERDICT: &str = "= ";
/// See [`VERDICT`].
pub const FRAME: &str = "> ";

map_type! {
    /// The packets to trace, in `TRACE_FILTER`. All zeroes: none.
    pub struct TraceFilter {
        /// The interface that only this pod is behind; 0: unknown.
        pub ifindex: u32,
        /// The pod's IPv4 address; zero for none.
        pub v4: V4,
        /// The pod's IPv6 address; zeroes for none.
        pub v6: V6,
        /// The other end's address, IPv4 in its mapped form; zeroes for any.
        pub to: V6,
        /// The other end's port, network byte order; 0 for any.
        pub to_port: u32,
    } size 44
}

impl TraceFilter {
    /// A filter that no packet passes.
    pub const NONE: Self = Self { ifindex: 0, v4: [0], v6: [0; 4], to: [0; 4], to_port: 0 };

    /// Returns whether to trace a packet between the pod and this remote address and port.
    #[inline(always)]
    pub const fn is_of(&self, address: &V6, port: u16) -> bool {
        let to = &self.to;
        let any = to[0] | to[1] | to[2] | to[3] == 0;
        let same = to[0] == address[0] && to[1] == address[1] && to[2] == address[2] && to[3] == address[3];
        (any || same) && (self.to_port == 0 || self.to_port == port as u32)
    }
}

/// Where a packet is observed.
pub mod hook {
    /// `pod_egress`, of the pod's interface.
    pub const FROM_POD: u32 = 1;
    /// `pod_ingress`, of the pod's interface.
    pub const TO_POD: u32 = 2;
    /// `exit_egress`.
    pub const EXIT: u32 = 3;
    /// `tunnel_ingress`.
    pub const TUNNEL: u32 = 4;
    /// `underlay_ingress`.
    pub const UNDERLAY: u32 = 5;
    /// `uplink_ingress`.
    pub const UPLINK: u32 = 6;
    /// `shaper_ingress`.
    pub const SHAPER: u32 = 7;
}
