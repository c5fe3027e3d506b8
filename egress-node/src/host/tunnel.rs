//! The tunnel device: a VXLAN device in collect-metadata mode, in which each packet carries its own remote address and VNI (the programs
//! set and check them). One socket receives packets of IPv4 and IPv6 underlays, including those without a UDP checksum.
//!
//! The device itself has VNI 0, because the kernel looks up packets of every VNI under 0 in this mode.

use std::pin::pin;

use egress_common::abi;
use futures::TryStreamExt;
use rtnetlink::packet_route::link::{
    InfoData, InfoGeneve, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
};
use rtnetlink::{Error, Handle, LinkMessageBuilder, LinkUnspec, LinkVxlan};

use super::netlink::errno;
use super::sysctl::{self, tunnel_settings};
use super::{Warning, decode};
use egress_core::network::MacAddress;

/// The device's name, unless configured otherwise.
pub const DEFAULT_NAME: &str = "spillway0";
/// The device's MTU: pods keep their MTU, and the programs answer packets that are too large for the underlay.
pub const MTU: u32 = 1500;
/// The inner source MAC address of our frames. VXLAN drops frames whose source is the receiving device's own address.
pub const INNER_SOURCE: MacAddress = MacAddress(abi::INNER_SRC_MAC);
/// The inner destination MAC address of our frames.
pub const INNER_DESTINATION: MacAddress = MacAddress(abi::INNER_DST_MAC);

/// The alias that identifies a device that we made.
const ALIAS: &str = "spillway egress tunnel";

/// The wanted state of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelSpec {
    /// Its name, at most 15 bytes.
    pub name: String,
    /// The UDP port that it receives on and sends to.
    pub port: u16,
}

impl Default for TunnelSpec {
    fn default() -> Self {
        TunnelSpec { name: DEFAULT_NAME.to_owned(), port: abi::TUNNEL_PORT }
    }
}

/// The action that was needed to get the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The device was created.
    Created,
    /// A device existed and is in use now; small deviations (MTU, flags) were corrected.
    Adopted,
    /// A device of ours existed with other attributes, and was replaced: its ifindex changed.
    Recreated,
}

/// The device, up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Its ifindex.
    pub index: u32,
    /// Its own MAC address, different from [`INNER_SOURCE`].
    pub mac: MacAddress,
    /// The action that was needed.
    pub origin: Origin,
    /// Settings of the device that could not be set.
    pub warnings: Vec<Warning>,
}

/// Why there is no device.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TunnelError {
    /// A foreign device has the name.
    #[error(
        "the name {name} of the tunnel device is taken by a {kind} device that Spillway did not make: \
         remove it (`ip link del {name}`) or set another `tunnelName`"
    )]
    NameTaken {
        /// The name.
        name: String,
        /// The kind of device that has it.
        kind: String,
    },
    /// Another tunnel device has the port.
    #[error(
        "UDP port {port} of the tunnel is taken by the {kind} device {device}: remove that device or set another \
         `tunnelPort`, the same on all nodes"
    )]
    PortTaken {
        /// The port.
        port: u16,
        /// The device that has it.
        device: String,
        /// The kind of device.
        kind: &'static str,
    },
    /// A socket has the port: of a process, or of a tunnel device that was moved to another network namespace.
    #[error(
        "UDP port {port} of the tunnel is taken by a socket that belongs to no device of this network namespace: find \
         its owner with `ss -ulpn 'sport = :{port}'` (none shown: a tunnel device moved to another namespace), \
         or set another `tunnelPort`, the same on all nodes"
    )]
    PortTakenBySocket {
        /// The port.
        port: u16,
    },
    /// The kernel has no VXLAN.
    #[error("the kernel cannot create the vxlan device {name}: load its module with `modprobe vxlan` on the node")]
    Unsupported {
        /// The device's name.
        name: String,
    },
    /// The agent lacks the permission.
    #[error("not allowed to {action} the tunnel device {name}: the agent needs CAP_NET_ADMIN")]
    NotAllowed {
        /// The attempted action.
        action: &'static str,
        /// The device's name.
        name: String,
    },
    /// Any other failure.
    #[error("cannot {action} the tunnel device {name}: {message}")]
    Netlink {
        /// The attempted action.
        action: &'static str,
        /// The device's name.
        name: String,
        /// The kernel's answer.
        message: String,
    },
}

/// Ensures that the device exists with exactly these attributes and is up. The error names the obstacle.
pub async fn ensure(handle: &Handle, spec: &TunnelSpec) -> Result<Tunnel, TunnelError> {
    let links = all_links(handle, &spec.name).await?;
    let named = links.iter().map(Found::new).find(|found| found.name == spec.name);
    let fits = |found: &Found| found.port == Some(spec.port) && found.right_kind && found.mac != Some(INNER_SOURCE);
    let origin = match named {
        Some(found) if fits(&found) => {
            if !found.up {
                refuse_taken_port(&links, spec)?;
            }
            Origin::Adopted
        }
        Some(found) if found.ours => {
            refuse_taken_port(&links, spec)?;
            delete(handle, &spec.name).await?;
            create(handle, spec).await?;
            Origin::Recreated
        }
        Some(found) => return Err(TunnelError::NameTaken { name: found.name, kind: found.kind }),
        None => {
            refuse_taken_port(&links, spec)?;
            create(handle, spec).await?;
            Origin::Created
        }
    };
    // Before it is up, so that it never makes a link-local address.
    let warnings = sysctl::apply_to_own_device(&tunnel_settings(&spec.name));
    if let Err(error) = bring_up(handle, spec).await {
        if origin != Origin::Adopted {
            delete(handle, &spec.name).await?;
        }
        return Err(error);
    }
    let found = Found::new(&get(handle, &spec.name).await?.ok_or_else(|| gone(&spec.name))?);
    Ok(Tunnel { index: found.index, mac: found.mac.unwrap_or_default(), origin, warnings })
}

/// Returns the devices that Spillway made, as (ifindex, name), regardless of their names.
pub async fn ours(handle: &Handle) -> Result<Vec<(u32, String)>, TunnelError> {
    let links = all_links(handle, "of ours").await?;
    Ok(links.iter().map(Found::new).filter(|found| found.ours).map(|found| (found.index, found.name)).collect())
}

/// Removes the device. Returns false if there was none. A device that Spillway did not make is left alone, as if it did not exist.
pub async fn delete(handle: &Handle, name: &str) -> Result<bool, TunnelError> {
    let Some(found) = get(handle, name).await?.map(|message| Found::new(&message)).filter(|found| found.ours) else {
        return Ok(false);
    };
    match handle.link().del(found.index).execute().await {
        Ok(()) => Ok(true),
        Err(error) if errno(&error) == libc::ENODEV => Ok(false),
        Err(error) => Err(failed("remove", name, &error)),
    }
}

async fn create(handle: &Handle, spec: &TunnelSpec) -> Result<(), TunnelError> {
    let message = LinkVxlan::new(&spec.name, 0)
        .collect_metadata(true)
        .port(spec.port)
        .learning(false)
        .udp_zero_csum6_tx(true)
        .udp_zero_csum6_rx(true)
        .mtu(MTU)
        .build();
    handle.link().add(message).execute().await.map_err(|error| match errno(&error) {
        libc::EOPNOTSUPP => TunnelError::Unsupported { name: spec.name.clone() },
        // The kernel compares the port with the devices in its list, even those that have been moved to other namespaces.
        libc::EEXIST | libc::EADDRINUSE => TunnelError::PortTakenBySocket { port: spec.port },
        _ => failed("make", &spec.name, &error),
    })
}

async fn bring_up(handle: &Handle, spec: &TunnelSpec) -> Result<(), TunnelError> {
    let change = async |message: LinkMessageBuilder<LinkUnspec>| handle.link().change(message.build()).execute().await;
    let own = LinkUnspec::new_with_name(&spec.name).mtu(MTU).arp(false).alias(ALIAS);
    change(own).await.map_err(|error| failed("set up", &spec.name, &error))?;
    change(LinkUnspec::new_with_name(&spec.name).up()).await.map_err(|error| match errno(&error) {
        libc::EADDRINUSE => TunnelError::PortTakenBySocket { port: spec.port },
        _ => failed("set up", &spec.name, &error),
    })
}

fn refuse_taken_port(links: &[LinkMessage], spec: &TunnelSpec) -> Result<(), TunnelError> {
    let holder = links.iter().map(Found::new).find(|found| found.port == Some(spec.port) && found.name != spec.name);
    match holder {
        Some(Found { name, kind, .. }) => Err(TunnelError::PortTaken {
            port: spec.port,
            device: name,
            kind: if kind == "vxlan" { "vxlan" } else { "geneve" },
        }),
        None => Ok(()),
    }
}

async fn all_links(handle: &Handle, name: &str) -> Result<Vec<LinkMessage>, TunnelError> {
    handle.link().get().execute().try_collect().await.map_err(|error| failed("look for", name, &error))
}

async fn get(handle: &Handle, name: &str) -> Result<Option<LinkMessage>, TunnelError> {
    match pin!(handle.link().get().match_name(name).execute()).try_next().await {
        Ok(message) => Ok(message),
        Err(error) if errno(&error) == libc::ENODEV => Ok(None),
        Err(error) => Err(failed("look for", name, &error)),
    }
}

fn failed(action: &'static str, name: &str, error: &Error) -> TunnelError {
    let name = name.to_owned();
    match errno(error) {
        libc::EPERM => TunnelError::NotAllowed { action, name },
        _ => TunnelError::Netlink { action, name, message: error.to_string() },
    }
}

fn gone(name: &str) -> TunnelError {
    TunnelError::Netlink { action: "keep", name: name.to_owned(), message: "somebody removed it".to_owned() }
}

/// The relevant properties of an existing device.
struct Found {
    name: String,
    index: u32,
    kind: String,
    mac: Option<MacAddress>,
    up: bool,
    /// The UDP port that it receives on.
    port: Option<u16>,
    /// Whether the attributes that cannot be changed later are as wanted.
    right_kind: bool,
    /// Whether it has our alias.
    ours: bool,
}

impl Found {
    fn new(message: &LinkMessage) -> Found {
        let link = decode::link(message);
        let mut found = Found {
            name: link.as_ref().map(|link| link.name.clone()).unwrap_or_default(),
            index: message.header.index,
            kind: link.as_ref().map(|link| link.kind.to_string()).unwrap_or_default(),
            mac: link.and_then(|link| link.mac),
            up: message.header.flags.contains(LinkFlags::Up),
            port: None,
            right_kind: false,
            ours: false,
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfAlias(alias) => found.ours = alias == ALIAS,
                LinkAttribute::LinkInfo(infos) => {
                    for info in infos {
                        match info {
                            LinkInfo::Data(InfoData::Vxlan(data)) => {
                                found.right_kind =
                                    message.header.link_layer_type == LinkLayerType::Ether && right_kind(data);
                                found.port = data.iter().find_map(|info| match info {
                                    InfoVxlan::Port(port) => Some(*port),
                                    _ => None,
                                });
                            }
                            LinkInfo::Data(InfoData::Geneve(data)) => {
                                found.port = data.iter().find_map(|info| match info {
                                    InfoGeneve::Port(port) => Some(*port),
                                    _ => None,
                                });
                            }
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        found
    }
}

fn right_kind(data: &[InfoVxlan]) -> bool {
    let needed = [
        InfoVxlan::Id(0),
        InfoVxlan::CollectMetadata(true),
        InfoVxlan::Learning(false),
        InfoVxlan::UDPZeroCsumTX(true),
        InfoVxlan::UDPZeroCsumRX(true),
    ];
    let foreign = |info: &InfoVxlan| {
        matches!(info, InfoVxlan::Gbp | InfoVxlan::Gpe | InfoVxlan::Link(_) | InfoVxlan::Vnifilter(true))
    };
    needed.iter().all(|info| data.contains(info)) && !data.iter().any(foreign)
}

#[cfg(test)]
#[path = "tunnel_tests.rs"]
mod tests;
