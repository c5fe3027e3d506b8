//! Describes what the drivers of interfaces can do with XDP, and what they do to frames before it. Only reads, and decides nothing.

use super::strangers;
use crate::netlink::{DONE, ERROR, Message, attribute, exchange};
use egress_core::network::{links::Link, xdp::Driver};
use rtnetlink::sys::protocols::NETLINK_GENERIC;
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::AsRawFd as _,
};

/// The generic netlink family that resolves family names to numbers, its command and its attributes (linux/genetlink.h).
const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
/// The family that describes devices (linux/netdev.h).
const NETDEV: &[u8] = b"netdev\0";
const DEV_GET: u8 = 1;
const DEV_IFINDEX: u16 = 1;
const DEV_XDP_FEATURES: u16 = 3;
/// Length of `struct genlmsghdr` (linux/genetlink.h).
const GENERIC_HEADER: usize = 4;

/// `ETHTOOL_GFLAGS`, and its flag for VLAN tags that are stripped when a frame is received (linux/ethtool.h).
const GET_FLAGS: u32 = 0x25;
const RX_VLAN: u32 = 1 << 8;
const SIOCETHTOOL: libc::c_ulong = 0x8946;

/// Examines the drivers of interfaces, by index. Programs that are not among `ours` are somebody else's.
pub fn look<'a>(links: impl Iterator<Item = &'a Link>, ours: &BTreeSet<u32>) -> io::Result<BTreeMap<u32, Driver>> {
    let acts = acts()?;
    let driver = |link: &Link| {
        let stranger = strangers::xdp_at(link.index, &link.name, ours)?.map(|stranger| stranger.program());
        let acts = acts.as_ref().map(|acts| acts.get(&link.index).copied().unwrap_or_default());
        let hides_tags = hides_tags(&link.name).unwrap_or(true);
        Ok((link.index, Driver { kind: link.kind.clone(), acts, hides_tags, stranger }))
    };
    links.map(driver).collect()
}

/// Returns the XDP features (`enum netdev_xdp_act`) of the driver of each interface of this namespace, by index. `None` if the kernel does
/// not report them (before Linux 6.3).
fn acts() -> io::Result<Option<BTreeMap<u32, u64>>> {
    let families = match ask(CONTROL, 0, GET_FAMILY, Some((FAMILY_NAME, NETDEV))) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        families => families?,
    };
    let number = |message: &Vec<u8>, kind: u16| attribute(message, kind).and_then(word);
    let Some(id) = families.first().and_then(|family| number(family, FAMILY_ID)) else { return Ok(None) };
    let devices = ask(id as u16, libc::NLM_F_DUMP, DEV_GET, None)?;
    let device = |device| Some((number(device, DEV_IFINDEX)? as u32, number(device, DEV_XDP_FEATURES)?));
    Ok(Some(devices.iter().filter_map(device).collect()))
}

/// Returns whether the interface strips VLAN tags before a program sees the frame.
fn hides_tags(interface: &str) -> io::Result<bool> {
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    let mut value = Value { command: GET_FLAGS, data: 0 };
    // SAFETY: all zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let last = request.ifr_name.len() - 1;
    request.ifr_name[..last].iter_mut().zip(interface.bytes()).for_each(|(to, from)| *to = from.cast_signed());
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the request names the interface and points to the command's own structure; both live on.
    if unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value.data & RX_VLAN != 0)
}

/// Parses a number of two, four or eight bytes.
fn word(bytes: &[u8]) -> Option<u64> {
    match *bytes {
        [a, b] => Some(u16::from_ne_bytes([a, b]).into()),
        [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d]).into()),
        _ => bytes.try_into().ok().map(u64::from_ne_bytes),
    }
}

/// Sends a request of generic netlink. Returns the attributes of each message of the reply.
fn ask(family: u16, flags: i32, command: u8, attribute: Option<(u16, &[u8])>) -> io::Result<Vec<Vec<u8>>> {
    let mut request = Message::new(family, flags, &[command, 1, 0, 0]);
    attribute.into_iter().for_each(|(kind, value)| request.bytes(kind, value));
    let mut found = Vec::new();
    exchange(NETLINK_GENERIC, &request.finish(), |kind, body| {
        let last = matches!(kind, DONE | ERROR);
        if !last {
            found.push(body.get(GENERIC_HEADER..).unwrap_or_default().to_vec());
        }
        last || flags & libc::NLM_F_DUMP == 0
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{Net, in_netns};
    use egress_core::network::xdp::act;

    #[test]
    fn veth_supports_xdp_redirect_and_loopback_does_not() {
        in_netns("drivers", || async {
            let net = Net::here();
            net.veth("here", "there").await;
            let (loopback, veth) = (net.index("lo").await, net.index("here").await);
            // Kernels before Linux 6.3 do not report the features.
            let Some(acts) = acts().unwrap() else { return };
            assert_eq!(acts[&veth] & (act::BASIC | act::REDIRECT), act::BASIC | act::REDIRECT);
            assert_eq!(acts.get(&loopback).copied().unwrap_or_default(), 0);
            // The peer neither merges packets (GRO) nor has a program.
            assert_eq!(acts[&veth] & act::NDO_XMIT, 0);
            assert!(hides_tags("here").unwrap());
            assert!(hides_tags("nothing").is_err());
        });
    }
}
