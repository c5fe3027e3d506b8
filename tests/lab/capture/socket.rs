//! The packet socket: frames with their time, direction and the state of their checksum.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::traffic::set_int;

/// The largest frame that is captured in full.
pub(super) const LARGEST: usize = 65_536 + 256;
/// The receive buffer in bytes: enough for everything that two cores can send in a second.
const BUFFER: i32 = 256 << 20;

/// One received frame, whose bytes are in the caller's buffer.
pub(super) struct Frame {
    /// The number of bytes that the frame occupies in the buffer.
    pub captured: usize,
    /// The time at which the kernel saw it.
    pub at: Instant,
    /// The index of its interface.
    pub interface: u32,
    /// Whether this host sent it.
    pub outgoing: bool,
    /// Whether a network card has yet to fill in the transport's checksum.
    pub checksum_pending: bool,
}

/// An AF_PACKET socket of the namespace in which it was opened.
#[derive(Debug)]
pub(super) struct PacketSocket {
    fd: OwnedFd,
    /// The same moment on both clocks: the kernel's timestamps are wall-clock times.
    epoch: (SystemTime, Instant),
}

impl PacketSocket {
    /// Opens a socket on the interface with this index, or on all interfaces for 0.
    pub fn open(interface: u32) -> Result<PacketSocket> {
        // No protocol yet: nothing arrives before the socket is set up and bound.
        // SAFETY: plain system call; the result is checked before it is owned.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error()).context("cannot open a packet socket");
        }
        // SAFETY: fd is open, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        set_int(&fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER)?;
        set_int(&fd, libc::SOL_PACKET, libc::PACKET_AUXDATA, 1)?;
        set_int(&fd, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
        // SAFETY: all zero bytes are a valid sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = interface.cast_signed();
        // SAFETY: the pointer and the size describe `address`, which outlives the call.
        let bound = unsafe {
            libc::bind(fd.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_ll>() as libc::socklen_t)
        };
        if bound < 0 {
            return Err(io::Error::last_os_error()).context("cannot bind a packet socket");
        }
        Ok(PacketSocket { fd, epoch: (SystemTime::now(), Instant::now()) })
    }

    /// Waits until a frame has arrived, but not longer than `patience`.
    pub fn wait(&self, patience: Duration) -> Result<()> {
        let mut fds = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::try_from(patience)?) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error).context("poll"),
        }
    }

    /// Returns the next frame, or `None` if none is waiting.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<Option<Frame>> {
        // SAFETY: all zero bytes are a valid sockaddr_ll and msghdr.
        let (mut from, mut message): (libc::sockaddr_ll, libc::msghdr) = unsafe { (zeroed(), zeroed()) };
        let mut control = [0u64; 32];
        let mut io = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        message.msg_name = (&raw mut from).cast();
        message.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        message.msg_iov = &raw mut io;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: every pointer in `message` points to a live buffer of the given size.
        let received = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, 0) };
        if received < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                // The interface went down or disappeared. Packets are captured again after it comes up.
                _ if matches!(error.raw_os_error(), Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV)) => Ok(None),
                _ => Err(error).context("receiving from a packet socket"),
            };
        }
        let (mut at, mut checksum_pending) = (Instant::now(), false);
        // SAFETY: `message` is unchanged since recvmsg, and `control` is still alive.
        let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return null or a header inside `control`.
        while let Some(one) = unsafe { header.as_ref() } {
            // SAFETY: the kernel wrote the type's own data after a header of that type; it may be unaligned.
            unsafe {
                let data = libc::CMSG_DATA(header);
                match (one.cmsg_level, one.cmsg_type) {
                    (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) => {
                        at = self.instant(data.cast::<libc::timespec>().read_unaligned())
                    }
                    (libc::SOL_PACKET, libc::PACKET_AUXDATA) => {
                        let status = data.cast::<libc::tpacket_auxdata>().read_unaligned().tp_status;
                        checksum_pending = status & libc::TP_STATUS_CSUMNOTREADY != 0;
                    }
                    _ => {}
                }
                header = libc::CMSG_NXTHDR(&raw const message, header);
            }
        }
        Ok(Some(Frame {
            captured: received.cast_unsigned(),
            at,
            interface: from.sll_ifindex.cast_unsigned(),
            outgoing: from.sll_pkttype == libc::PACKET_OUTGOING,
            checksum_pending,
        }))
    }

    /// Returns the number of frames that did not fit into the buffer. Each query resets the kernel's counter.
    pub fn dropped(&self) -> Result<u64> {
        // SAFETY: all zero bytes are a valid tpacket_stats.
        let mut stats: libc::tpacket_stats = unsafe { zeroed() };
        let mut size = size_of::<libc::tpacket_stats>() as libc::socklen_t;
        // SAFETY: the pointers point to live variables, and `size` is the size of `stats`.
        let result = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut stats).cast(),
                &raw mut size,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error()).context("cannot read a packet socket's statistics");
        }
        Ok(u64::from(stats.tp_drops))
    }

    fn instant(&self, stamp: libc::timespec) -> Instant {
        let wall = UNIX_EPOCH + Duration::new(stamp.tv_sec.cast_unsigned(), stamp.tv_nsec as u32);
        let (wall_epoch, epoch) = self.epoch;
        match wall.duration_since(wall_epoch) {
            Ok(since) => epoch + since,
            Err(before) => epoch.checked_sub(before.duration()).unwrap_or(epoch),
        }
    }
}
