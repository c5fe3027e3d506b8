//! Settings of a lab before it is built.

use super::pod::Cni;

/// The environment variable that sets `xdp` for all agents whose configuration does not, and implies [`super::Builder::cards`].
pub(crate) const XDP: &str = "SPILLWAY_TEST_XDP";

/// A lab's settings, chosen by [`super::Builder`].
#[derive(Clone, Debug)]
pub struct LabSettings {
    pub(super) workers: u8,
    pub(super) gateways: u8,
    pub(super) servers: u8,
    pub(super) far_servers: u8,
    pub(super) cni: Cni,
    pub(super) underlay_mtu: u32,
    pub(super) external_mtu: u32,
    pub(super) far_mtu: u32,
    pub(super) pod_mtu: u32,
    pub(super) rp_filter: u8,
    pub(super) masquerade: bool,
    pub(super) masquerade_underlay: bool,
    pub(super) alone: bool,
    pub(super) zones: Vec<String>,
    pub(super) cards: bool,
    pub(super) vlan_devices: bool,
}

impl Default for LabSettings {
    fn default() -> LabSettings {
        LabSettings {
            workers: 2,
            gateways: 3,
            servers: 1,
            far_servers: 1,
            cni: Cni::PointToPoint,
            underlay_mtu: 1500,
            external_mtu: 1500,
            far_mtu: 1500,
            pod_mtu: 1500,
            rp_filter: 0,
            masquerade: true,
            masquerade_underlay: false,
            alone: false,
            zones: Vec::new(),
            cards: std::env::var_os(XDP).is_some(),
            vlan_devices: false,
        }
    }
}
