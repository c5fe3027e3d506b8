//! An AF_PACKET socket for whole Ethernet frames, on tokio.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use tokio::io::unix::AsyncFd;

/// Receives the frames of one EtherType, and sends frames of any.
#[derive(Debug)]
pub struct PacketSocket {
    fd: AsyncFd<OwnedFd>,
}

impl PacketSocket {
    /// Opens a socket for frames of that type that come in at that interface and pass the filter (classic BPF, which sees the frame from
    /// its Ethernet header on).
    pub fn receiving(ethertype: u16, interface: u32, filter: &[libc::sock_filter]) -> io::Result<PacketSocket> {
        let socket = PacketSocket::sending()?;
        // The filter is set before the first frame can come in.
        if !filter.is_empty() {
            let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
            // SAFETY: the program points to `filter.len()` instructions, which the kernel copies.
            unsafe { socket.set_option(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program) }?;
        }
        let address = link_address(ethertype, interface)?;
        // SAFETY: the address is a sockaddr_ll of the given length.
        check(unsafe { libc::bind(socket.fd.as_raw_fd(), (&raw const address).cast(), ADDRESS_LENGTH) })?;
        Ok(socket)
    }

    /// Opens a socket that receives nothing.
    pub fn sending() -> io::Result<PacketSocket> {
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0) };
        check(fd)?;
        // SAFETY: the descriptor was just opened and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: an OwnedFd keeps the same descriptor open for as long as it lives.
        let fd = unsafe { AsyncFd::register(fd) }?;
        Ok(PacketSocket { fd })
    }

    /// Opens a socket that receives nothing, and whose frames no program at an interface sees.
    pub fn into_pods() -> io::Result<PacketSocket> {
        let socket = PacketSocket::sending()?;
        // SAFETY: the option is an int.
        unsafe { socket.set_option(libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, &(1 as libc::c_int)) }?;
        Ok(socket)
    }

    /// # Safety
    /// The option's value must have this type, and any memory that it points to must be valid.
    unsafe fn set_option<T>(&self, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
        let (at, length) = ((&raw const *value).cast(), mem::size_of::<T>() as libc::socklen_t);
        // SAFETY: the value has the given length; the caller guarantees the rest.
        check(unsafe { libc::setsockopt(self.fd.as_raw_fd(), level, name, at, length) })
    }

    /// Sends a frame out of an interface without waiting: a full queue is an error.
    pub fn send(&self, interface: u32, frame: &[u8]) -> io::Result<()> {
        let ethertype = frame.get(12..14).map_or(0, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
        let address = link_address(ethertype, interface)?;
        let attempt = || {
            // SAFETY: the frame and the address are valid for the given lengths.
            let sent = unsafe {
                libc::sendto(
                    self.fd.as_raw_fd(),
                    frame.as_ptr().cast(),
                    frame.len(),
                    libc::MSG_DONTWAIT,
                    (&raw const address).cast(),
                    ADDRESS_LENGTH,
                )
            };
            if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        };
        // The first call after the interface went down fails with that error, even if the interface is up again.
        attempt().or_else(|error| if error.raw_os_error() == Some(libc::ENETDOWN) { attempt() } else { Err(error) })
    }

    /// Receives one frame, truncated to the buffer. Ignores that the interface goes down: frames arrive again when it comes up. After the
    /// interface is deleted, no frame ever arrives.
    pub async fn receive<'b>(&self, buffer: &'b mut [u8]) -> io::Result<&'b [u8]> {
        loop {
            let mut ready = self.fd.readable().await?;
            let received = ready.try_io(|fd| {
                // SAFETY: the buffer is valid for its length.
                let length = unsafe { libc::recv(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
                if length < 0 { Err(io::Error::last_os_error()) } else { Ok(length as usize) }
            });
            match received {
                Ok(Ok(length)) => return Ok(&buffer[..length]),
                Ok(Err(error)) if error.raw_os_error() == Some(libc::ENETDOWN) => {}
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }
}

const ADDRESS_LENGTH: libc::socklen_t = mem::size_of::<libc::sockaddr_ll>() as libc::socklen_t;

fn link_address(ethertype: u16, interface: u32) -> io::Result<libc::sockaddr_ll> {
    Ok(libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: ethertype.to_be(),
        sll_ifindex: interface.try_into().map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
