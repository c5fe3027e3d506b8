//! Netlink messages as bytes, and the exchange of them: for the families that `rtnetlink` does not encode, and without a runtime.

use rtnetlink::sys::{Socket, SocketAddr};
use std::{io, os::fd::AsFd as _, time::Duration};

use nix::sys::{
    socket::{setsockopt, sockopt},
    time::TimeVal,
};

/// Message types (linux/netlink.h).
pub(crate) const ERROR: u16 = libc::NLMSG_ERROR as u16;
pub(crate) const DONE: u16 = libc::NLMSG_DONE as u16;
/// Length of `struct nlmsghdr`.
const HEADER: usize = 16;
/// Marks an attribute that consists of others.
const NESTED: u16 = 1 << 15;
/// The longest time that the kernel may take to answer; it waits for other programs' changes.
const PATIENCE: Duration = Duration::from_secs(5);
/// The default size of a socket's send buffer is larger than this.
const SMALL: usize = 64 * 1024;

/// A message under construction.
pub(crate) struct Message(Vec<u8>);

impl Message {
    /// Begins a message of a type. `header` is the header of its family, which follows netlink's own.
    pub(crate) fn new(kind: u16, flags: i32, header: &[u8]) -> Self {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(flags as u16 | libc::NLM_F_REQUEST as u16).to_ne_bytes());
        bytes.extend(header);
        Self(bytes)
    }

    /// Adds an attribute.
    pub(crate) fn bytes(&mut self, kind: u16, value: &[u8]) {
        self.0.extend((value.len() as u16 + 4).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    /// Adds a text attribute.
    pub(crate) fn text(&mut self, kind: u16, value: &str) {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat());
    }

    /// Adds a 32-bit number attribute in network byte order.
    pub(crate) fn number(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// Adds an attribute that consists of others.
    pub(crate) fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let start = self.0.len();
        self.bytes(kind | NESTED, &[]);
        fill(self);
        let length = (self.0.len() - start) as u16;
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    }

    /// Returns its bytes.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}

/// Sends messages to a protocol of netlink, and passes the type and the body of each message of the answer to `last`, until it returns true.
/// Returns the first error that the kernel reports. An acknowledgement is a message of type [`ERROR`] without an error.
pub(crate) fn exchange(protocol: isize, bytes: &[u8], mut last: impl FnMut(u16, &[u8]) -> bool) -> io::Result<()> {
    let mut socket = Socket::new(protocol)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    setsockopt(&socket.as_fd(), sockopt::ReceiveTimeout, &TimeVal::new(PATIENCE.as_secs() as i64, 0))?;
    if bytes.len() > SMALL {
        setsockopt(&socket.as_fd(), sockopt::SndBufForce, &(2 * bytes.len()))?;
    }
    socket.send(bytes, 0)?;
    while !read(&socket.recv_from_full()?.0, &mut last)? {}
    Ok(())
}

/// Reads the messages of one datagram, as [`exchange`] does. Returns whether `last` has returned true.
pub(crate) fn read(mut bytes: &[u8], last: &mut impl FnMut(u16, &[u8]) -> bool) -> io::Result<bool> {
    while !bytes.is_empty() {
        let (kind, body, next) = message(bytes).ok_or(io::ErrorKind::InvalidData)?;
        // Both types begin with a negative error number, or zero.
        let code = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
        if matches!(kind, ERROR | DONE) && code != 0 {
            return Err(io::Error::from_raw_os_error(-code));
        }
        if last(kind, body) {
            return Ok(true);
        }
        bytes = next;
    }
    Ok(false)
}

/// Splits off the first message: its type, its body, and the bytes after it.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    Some((kind, bytes.get(HEADER..length)?, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// Iterates over the attributes in some bytes, up to one that is cut short.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?) & !NESTED;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Returns the value of the first attribute of a kind.
pub(crate) fn attribute(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsing_of_attributes_ends_at_a_truncated_one() {
        let mut message = Message::new(0, 0, &[]);
        message.bytes(1, &7u32.to_ne_bytes());
        message.bytes(3, b"abc");
        let bytes = [&message.finish()[HEADER..], &[9, 0, 4, 0, 1]].concat();
        let all: Vec<_> = attributes(&bytes).collect();
        assert_eq!(all, [(1, &7u32.to_ne_bytes()[..]), (3, b"abc")]);
        assert_eq!((attribute(&bytes, 3), attribute(&bytes, 4)), (Some(&b"abc"[..]), None));
    }

    #[test]
    fn an_error_is_not_taken_for_the_end_of_a_dump() {
        const OBJECT: u16 = 0x13;
        let message = |kind, body: &[u8]| Message::new(kind, 0, body).finish();
        let read = |messages: &[Vec<u8>]| {
            let mut found = 0;
            let mut last = |kind, _: &[u8]| {
                found += usize::from(kind == OBJECT);
                kind == DONE
            };
            let done = read(&messages.concat(), &mut last).map_err(|error| error.raw_os_error());
            done.map(|done| (done, found))
        };
        let (one, end) = (message(OBJECT, &[0; 8]), message(DONE, &0i32.to_ne_bytes()));
        assert_eq!(read(std::slice::from_ref(&one)), Ok((false, 1)));
        assert_eq!(read(&[one.clone(), end]), Ok((true, 1)));
        for kind in [ERROR, DONE] {
            let refused = message(kind, &(-libc::EPERM).to_ne_bytes());
            assert_eq!(read(&[one.clone(), refused]), Err(Some(libc::EPERM)));
        }
        assert_eq!(read(&[one[..HEADER + 4].to_vec()]), Err(None), "it is cut off");
    }
}
