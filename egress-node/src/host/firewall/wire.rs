//! Builds, sends and reads nftables messages through netlink. Attributes are in network byte order.

use std::{io, os::fd::AsRawFd, time::Duration};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt, socket,
    sockopt,
};

/// `NFPROTO_INET`: IPv4 and IPv6 in one table.
const INET: u8 = 1;
/// The netfilter subsystem number of nftables, in the upper byte of a message's type.
pub const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NESTED: u16 = 1 << 15;
/// `NFNL_MSG_BATCH_BEGIN` and messages begin with this many bytes of netlink and netfilter headers.
const HEADERS: usize = 16 + 4;
/// The longest time that the kernel may take to answer; it waits for other programs' changes.
const PATIENCE: Duration = Duration::from_secs(5);
/// Larger than any message of a dump.
const BUFFER: usize = 64 * 1024;

/// A message under construction.
pub struct Message(Vec<u8>);

impl Message {
    /// Begins a message. `resource` is the netfilter subsystem of a batch.
    pub fn new(kind: u16, flags: i32, resource: u16) -> Self {
        let mut bytes = vec![0; HEADERS];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(flags as u16).to_ne_bytes());
        bytes[16] = INET;
        bytes[18..20].copy_from_slice(&resource.to_be_bytes());
        Self(bytes)
    }

    /// Adds an attribute.
    pub fn bytes(&mut self, kind: u16, value: &[u8]) {
        self.0.extend((value.len() as u16 + 4).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    /// Adds a text attribute.
    pub fn text(&mut self, kind: u16, value: &str) {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat());
    }

    /// Adds a 32-bit number attribute.
    pub fn number(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// Adds an attribute that consists of others.
    pub fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let start = self.0.len();
        self.bytes(kind | NESTED, &[]);
        fill(self);
        let length = (self.0.len() - start) as u16;
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    }

    /// Adds an element to a rule's list of expressions.
    pub fn expression(&mut self, name: &str, fill: impl FnOnce(&mut Self)) {
        self.nest(1, |element| {
            element.text(1, name);
            element.nest(2, fill);
        });
    }

    /// Returns its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}

/// Messages that the kernel carries out together or not at all.
pub struct Batch {
    bytes: Vec<u8>,
    messages: usize,
}

impl Batch {
    /// Returns an empty batch.
    pub fn new() -> Self {
        Self { bytes: Message::new(BATCH_BEGIN, libc::NLM_F_REQUEST, SUBSYSTEM).finish(), messages: 0 }
    }

    /// Adds a message.
    pub fn message(&mut self, kind: u16, flags: i32, fill: impl FnOnce(&mut Message)) {
        let mut message = Message::new(SUBSYSTEM << 8 | kind, flags | libc::NLM_F_REQUEST | libc::NLM_F_ACK, 0);
        fill(&mut message);
        self.bytes.extend(message.finish());
        self.messages += 1;
    }

    /// Sends the messages and waits for the answers.
    pub fn run(mut self) -> io::Result<()> {
        self.bytes.extend(Message::new(BATCH_END, libc::NLM_F_REQUEST, SUBSYSTEM).finish());
        let mut answers = 0;
        exchange(&self.bytes, |kind, _| {
            answers += usize::from(kind == libc::NLMSG_ERROR as u16);
            answers == self.messages
        })
    }
}

/// Sends messages and reads answers until `last` returns true. Returns the first error that the kernel reports.
pub fn exchange(bytes: &[u8], mut last: impl FnMut(u16, &[u8]) -> bool) -> io::Result<()> {
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkNetFilter)?;
    let fd = socket.as_raw_fd();
    bind(fd, &NetlinkAddr::new(0, 0))?;
    setsockopt(&socket, sockopt::ReceiveTimeout, &nix::sys::time::TimeVal::new(PATIENCE.as_secs() as i64, 0))?;
    if bytes.len() > BUFFER {
        setsockopt(&socket, sockopt::SndBufForce, &(2 * bytes.len()))?;
    }
    send(fd, bytes, MsgFlags::empty())?;
    let mut buffer = vec![0; BUFFER];
    loop {
        let length = recv(fd, &mut buffer, MsgFlags::empty())?;
        let mut rest = &buffer[..length];
        while let Some((kind, body, next)) = message(rest) {
            if kind == libc::NLMSG_ERROR as u16 || kind == libc::NLMSG_DONE as u16 {
                let code = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                if code != 0 {
                    return Err(io::Error::from_raw_os_error(-code));
                }
            }
            if last(kind, body) {
                return Ok(());
            }
            rest = next;
        }
    }
}

/// Splits off the first netlink message: its type, its body, and the bytes after it.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    let body = bytes.get(16..length)?;
    Some((kind, body, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// Returns the part of a message's body after the netfilter header.
pub fn of(body: &[u8]) -> &[u8] {
    body.get(4..).unwrap_or_default()
}

/// Iterates over the attributes in some bytes.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?) & !NESTED;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Returns the value of the first attribute of a kind.
pub fn attribute(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}
