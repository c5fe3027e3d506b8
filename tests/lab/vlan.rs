//! Hosts in VLANs, for kernels without 8021q: one TAP device for each VLAN. A thread carries frames between the devices
//! and the interface, inserting and stripping the tag.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::background::{Background, Stop};
use crate::netns::NetNs;
use crate::traffic::set_int;

/// `TUNSETIFF`, and the flags of a TAP device whose frames have a header on checksums and segmentation.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TAP: libc::c_short = 0x0002 | 0x1000 | 0x4000;
/// `PACKET_VNET_HDR`, and the length of that header (`struct virtio_net_hdr`).
const PACKET_VNET_HDR: i32 = 15;
const VNET: usize = 10;
/// The length of the longest frame with its header.
const LONGEST: usize = VNET + 14 + (64 << 10);
/// The length of the tag (802.1Q).
const TAG: usize = 4;
/// `TP_STATUS_VLAN_VALID`
const TAGGED: u32 = 1 << 4;

/// VLANs of one interface. Dropping it ends the thread, and with it the devices.
#[derive(Debug)]
pub struct Vlans {
    _thread: Background,
}

impl Vlans {
    /// Creates the device `vlanN` for each VLAN N of `interface`, up, with these addresses (with prefix lengths).
    pub fn start(ns: &NetNs, interface: &str, vlans: &BTreeMap<u16, Vec<String>>) -> Result<Vlans> {
        let index = ns.ifindex(interface)?;
        let (socket, taps) = ns.run(|| {
            let taps = vlans.keys().map(|vlan| Ok((*vlan, tap(&format!("vlan{vlan}"))?)));
            Ok((packet_socket(index)?, taps.collect::<Result<BTreeMap<u16, File>>>()?))
        })?;
        let mut lines = Vec::new();
        for (vlan, addresses) in vlans {
            lines.push(format!("link set vlan{vlan} up"));
            lines.extend(addresses.iter().map(|address| format!("addr add {address} dev vlan{vlan}")));
        }
        ns.ip(&lines)?;
        let _thread = Background::start(ns, "vlans", move |stop| carry(&socket, index, taps, stop))?;
        Ok(Vlans { _thread })
    }
}

fn tap(name: &str) -> Result<File> {
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun").context("/dev/net/tun")?;
    // SAFETY: all zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = TAP;
    // SAFETY: the request is an ifreq that outlives the call.
    if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error()).with_context(|| format!("making {name}"));
    }
    Ok(file)
}

fn packet_socket(index: u32) -> Result<OwnedFd> {
    // SAFETY: plain system call; the result is checked before it is owned.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error()).context("a packet socket");
    }
    // SAFETY: fd is open, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    set_int(&fd, libc::SOL_PACKET, libc::PACKET_AUXDATA, 1)?;
    set_int(&fd, libc::SOL_PACKET, PACKET_VNET_HDR, 1)?;
    let address = link_address(index, libc::ETH_P_ALL as u16);
    // SAFETY: the pointer and the size describe `address`, which outlives the call.
    let bound = unsafe {
        libc::bind(fd.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_ll>() as libc::socklen_t)
    };
    if bound < 0 {
        return Err(io::Error::last_os_error()).context("binding a packet socket");
    }
    Ok(fd)
}

fn link_address(index: u32, protocol: u16) -> libc::sockaddr_ll {
    // SAFETY: all zero bytes are a valid sockaddr_ll.
    let mut address: libc::sockaddr_ll = unsafe { zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol.to_be();
    address.sll_ifindex = index.cast_signed();
    address
}

fn carry(socket: &OwnedFd, index: u32, mut taps: BTreeMap<u16, File>, stop: &Stop) -> Result<()> {
    let mut buffer = vec![0; LONGEST];
    while !stop.requested() {
        let ready: Vec<bool> = {
            let all = std::iter::once(socket.as_fd()).chain(taps.values().map(AsFd::as_fd));
            let mut fds: Vec<_> = all.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            poll(&mut fds, PollTimeout::from(20u8)).context("poll")?;
            fds.iter().map(|fd| fd.any().unwrap_or_default()).collect()
        };
        if ready[0]
            && let Some((vlan, length)) = receive(socket, &mut buffer)?
            && let Some(tap) = taps.get_mut(&vlan)
        {
            // A frame that the device does not accept is lost, as on a wire.
            tap.write_all(&buffer[..length]).ok();
        }
        for ((vlan, tap), ready) in taps.iter_mut().zip(&ready[1..]) {
            if *ready {
                let length = tap.read(&mut buffer[TAG..]).context("reading from a TAP device")?;
                send(socket, index, *vlan, &mut buffer[..TAG + length])?;
            }
        }
    }
    Ok(())
}

/// Receives the next tagged frame, preceded by its header. Returns its VLAN and the length of both.
fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Result<Option<(u16, usize)>> {
    // SAFETY: all zero bytes are a valid sockaddr_ll and msghdr.
    let (mut from, mut message): (libc::sockaddr_ll, libc::msghdr) = unsafe { (zeroed(), zeroed()) };
    let mut control = [0u64; 16];
    let mut io = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    message.msg_name = (&raw mut from).cast();
    message.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    message.msg_iov = &raw mut io;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: every pointer in `message` points to a live buffer of the given size.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    if received < 0 || from.sll_pkttype == libc::PACKET_OUTGOING {
        return Ok(None);
    }
    // SAFETY: `message` is unchanged since recvmsg; CMSG_FIRSTHDR returns null or a header inside `control`.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message).as_ref() };
    let Some(header) = header.filter(|one| (one.cmsg_level, one.cmsg_type) == (libc::SOL_PACKET, libc::PACKET_AUXDATA))
    else {
        return Ok(None);
    };
    // SAFETY: the kernel wrote that type's data after the header; it may be unaligned.
    let data = unsafe { libc::CMSG_DATA(header).cast::<libc::tpacket_auxdata>().read_unaligned() };
    let tagged = data.tp_status & TAGGED != 0;
    Ok(tagged.then_some((data.tp_vlan_tci & 0xfff, received.cast_unsigned())))
}

/// Sends a frame with the tag. The buffer begins with room for the tag, followed by the header and the frame.
fn send(socket: &OwnedFd, index: u32, vlan: u16, buffer: &mut [u8]) -> Result<()> {
    let macs = VNET + 12;
    buffer.copy_within(TAG..TAG + macs, 0);
    buffer[macs..macs + 2].copy_from_slice(&0x8100u16.to_be_bytes());
    buffer[macs + 2..macs + 4].copy_from_slice(&vlan.to_be_bytes());
    // The header's checksum offset counts from the start of the frame, which has moved away by the tag.
    if buffer[0] & 1 != 0 {
        let start = u16::from_ne_bytes([buffer[6], buffer[7]]) + TAG as u16;
        buffer[6..8].copy_from_slice(&start.to_ne_bytes());
    }
    let address = link_address(index, 0x8100);
    // SAFETY: the buffer and the address are valid for the given lengths.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            buffer.as_ptr().cast(),
            buffer.len(),
            0,
            (&raw const address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()).context("sending a tagged frame") } else { Ok(()) }
}
