//! Describes what the drivers of interfaces can do with XDP, and what they do to frames before it. Only reads, and decides nothing.

use super::strangers;
use egress_core::network::{links::Link, xdp::Driver};
use rtnetlink::{
    packet_core::{NLM_F_DUMP, NLM_F_REQUEST},
    sys::{Socket, SocketAddr, protocols::NETLINK_GENERIC},
};
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
/// Message types and header lengths (linux/netlink.h).
const ERROR: u16 = 2;
const DONE: u16 = 3;
const HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;
const ATTRIBUTE_HEADER: usize = 4;

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
    let mut socket = Socket::new(NETLINK_GENERIC)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let families = match ask(&socket, CONTROL, NLM_F_REQUEST, GET_FAMILY, &attribute(FAMILY_NAME, NETDEV)) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        families => families?,
    };
    let id = families.first().and_then(|family| family.get(&FAMILY_ID)).and_then(|id| word(id));
    let Some(id) = id else { return Ok(None) };
    let devices = ask(&socket, id as u16, NLM_F_REQUEST | NLM_F_DUMP, DEV_GET, &[])?;
    let device =
        |device: &Attributes| Some((word(device.get(&DEV_IFINDEX)?)? as u32, word(device.get(&DEV_XDP_FEATURES)?)?));
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

/// The attributes of a message.
type Attributes = BTreeMap<u16, Vec<u8>>;

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = (ATTRIBUTE_HEADER + value.len()) as u16;
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Parses a number of two, four or eight bytes.
fn word(bytes: &[u8]) -> Option<u64> {
    match *bytes {
        [a, b] => Some(u16::from_ne_bytes([a, b]).into()),
        [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d]).into()),
        _ => bytes.try_into().ok().map(u64::from_ne_bytes),
    }
}

/// Sends a request. Returns the attributes of each message of the reply.
fn ask(socket: &Socket, family: u16, flags: u16, command: u8, attributes: &[u8]) -> io::Result<Vec<Attributes>> {
    let length = (HEADER + GENERIC_HEADER + attributes.len()) as u32;
    let mut request = length.to_ne_bytes().to_vec();
    request.extend([family.to_ne_bytes(), flags.to_ne_bytes()].concat());
    // Sequence number and port id are 0. Then follow the command and the version.
    request.extend([0; 8]);
    request.extend([command, 1, 0, 0]);
    request.extend(attributes);
    socket.send(&request, 0)?;
    let mut found = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while let Some((kind, body, behind)) = message(rest) {
            match kind {
                DONE => return Ok(found),
                ERROR => return refusal(body).map(|()| found),
                _ => found.push(attributes_of(body.get(GENERIC_HEADER..).unwrap_or_default())),
            }
            rest = behind;
        }
        if flags & NLM_F_DUMP != NLM_F_DUMP {
            return Ok(found);
        }
    }
}

/// Splits off the first message. Returns its type, its content, and the bytes after it.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    Some((kind, bytes.get(HEADER..length)?, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

fn refusal(body: &[u8]) -> io::Result<()> {
    match body.get(..4).and_then(|code| code.try_into().ok()).map(i32::from_ne_bytes) {
        None | Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(-code)),
    }
}

fn attributes_of(mut bytes: &[u8]) -> Attributes {
    let mut all = Attributes::new();
    while let [a, b, c, d, ..] = *bytes {
        let length = usize::from(u16::from_ne_bytes([a, b]));
        let Some(value) = bytes.get(ATTRIBUTE_HEADER..length) else { break };
        all.insert(u16::from_ne_bytes([c, d]), value.to_vec());
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    all
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

    #[test]
    fn parsing_of_attributes_ends_at_a_truncated_one() {
        let bytes = [attribute(1, &7u32.to_ne_bytes()), attribute(3, b"abc"), vec![9, 0, 4, 0, 1]].concat();
        let all = attributes_of(&bytes);
        assert_eq!((all.len(), word(&all[&1]), &all[&3][..]), (2, Some(7), &b"abc"[..]));
    }
}
