//! Switching the offloads of interfaces, as `ethtool -K` does.

use std::io;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::netns::NetNs;

/// ETHTOOL_S* of linux/ethtool.h.
const COMMANDS: [(u32, &str); 4] =
    [(0x17, "transmit checksums"), (0x1f, "TCP segmentation"), (0x24, "generic segmentation"), (0x2c, "GRO")];
const SIOCETHTOOL: libc::c_ulong = 0x8946;

#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

impl NetNs {
    /// Turns the offloads of an interface on or off: checksums of what it sends, segmentation, and merging of what it
    /// receives. Without them, captures see packets as they would be on a wire, with every checksum filled in.
    pub fn set_offload(&self, interface: &str, on: bool) -> Result<()> {
        self.run(|| {
            let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
            for (command, name) in COMMANDS {
                let mut value = EthtoolValue { command, data: u32::from(on) };
                // SAFETY: all zero bytes are a valid ifreq.
                let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
                if interface.len() >= request.ifr_name.len() {
                    bail!("{interface} is too long for the name of an interface");
                }
                for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
                    *to = from.cast_signed();
                }
                request.ifr_ifru.ifru_data = (&raw mut value).cast();
                // SAFETY: the request names the interface and points to the command's own structure; both live on.
                let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
                if result < 0 {
                    return Err(io::Error::last_os_error())
                        .with_context(|| format!("cannot switch {name} of {interface} in {}", self.name()));
                }
            }
            Ok(())
        })
    }
}
