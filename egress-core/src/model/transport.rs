//! How packets travel between nodes.

use std::fmt;

/// The setting for the transport between source nodes and gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// For each gateway, the best transport that probes have shown to work in both directions.
    Auto,
    /// The tunnel device.
    Device,
    /// The same bytes as the tunnel device's, bypassing the device, if plain Ethernet leads to the other node.
    Vxlan,
    /// No tunnel, if the other node is on the same link and accepts it.
    Direct,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Auto => "Auto",
            Transport::Device => "device",
            Transport::Vxlan => "vxlan",
            Transport::Direct => "direct",
        })
    }
}
