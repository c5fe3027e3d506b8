//! Switches the offloads of interfaces, like `ethtool -K`.

use std::io;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::netns::NetNs;

/// Commands ETHTOOL_S* of linux/ethtool.h, with names for messages.
const GRO: (u32, &str) = (0x2c, "GRO");
const COMMANDS: [(u32, &str); 4] =
    [(0x17, "transmit checksums"), (0x1f, "TCP segmentation"), (0x24, "generic segmentation"), GRO];
/// ETHTOOL_GFLAGS and ETHTOOL_SFLAGS, and the flags for the insertion of VLAN tags into sent frames and their removal
/// from received frames by the card.
const GET_FLAGS: (u32, &str) = (0x25, "flags");
const SET_FLAGS: (u32, &str) = (0x26, "flags");
const TX_VLAN: u32 = 1 << 7;
const RX_VLAN: u32 = 1 << 8;
const SIOCETHTOOL: libc::c_ulong = 0x8946;

#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

impl NetNs {
    /// Turns the offloads of an interface on or off: checksums and segmentation of sent packets, and merging of
    /// received packets. Without them, captures see packets as they would be on a wire, with every checksum filled in.
    pub fn set_offload(&self, interface: &str, on: bool) -> Result<()> {
        COMMANDS.iter().try_for_each(|command| self.ethtool(interface, *command, u32::from(on)).map(drop))
    }

    /// Makes a veth accept frames that an XDP program redirects to it, which requires GRO at its other end.
    pub fn accept_xdp_frames(&self, other_end: &str) -> Result<()> {
        self.ethtool(other_end, GRO, 1).map(drop)
    }

    /// Keeps VLAN tags in sent and received frames. A veth with VLAN offload passes the tag outside the frame.
    pub fn keep_tags_in_frames(&self, interface: &str) -> Result<()> {
        let flags = self.ethtool(interface, GET_FLAGS, 0)?;
        self.ethtool(interface, SET_FLAGS, flags & !(TX_VLAN | RX_VLAN)).map(drop)
    }

    /// Runs one command on an interface. Returns the value that the command reads, or `data`.
    fn ethtool(&self, interface: &str, (command, name): (u32, &str), data: u32) -> Result<u32> {
        self.run(|| {
            let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
            let mut value = EthtoolValue { command, data };
            // SAFETY: all zero bytes are a valid ifreq.
            let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
            if interface.len() >= request.ifr_name.len() {
                bail!("{interface} is too long for the name of an interface");
            }
            for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
                *to = from.cast_signed();
            }
            request.ifr_ifru.ifru_data = (&raw mut value).cast();
            // SAFETY: the request names the interface and points to the command's own structure; both are alive.
            let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
            if result < 0 {
                return Err(io::Error::last_os_error())
                    .with_context(|| format!("cannot switch {name} of {interface} in {}", self.name()));
            }
            Ok(value.data)
        })
    }
}
