//! The reference NAT's part for fragments, and fragments as frames. Later fragments have no ports: they go where the first fragment of
//! their datagram goes, and wait if it has not arrived yet. No waiting fragment is lost, changed or sent elsewhere.

use super::{
    frames::{TCP, UDP, fragment, ip, read},
    nat::Tuple,
};
use egress_common::limits::{HELD_PER_DATAGRAM, HELD_TICKS};
use std::{collections::BTreeMap, net::IpAddr, ops::Range};

/// The next-header value of the IPv6 fragment header.
const FRAGMENT: u8 = 44;

/// A part of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The whole transport header and some data.
    First,
    /// Eight bytes: less than a TCP header.
    Tiny,
    /// Overlaps all but the first eight bytes of the first fragment.
    Over,
    Middle,
    Last,
}

impl Part {
    pub const ALL: [Part; 5] = [Part::First, Part::Tiny, Part::Over, Part::Middle, Part::Last];
    /// The parts as they leave the stack, which has reassembled the datagram.
    pub const ORDERED: [Part; 3] = [Part::First, Part::Middle, Part::Last];

    /// Returns its range of bytes in a datagram of this length, without the IP header.
    fn bytes(self, len: usize) -> Range<usize> {
        match self {
            Part::First => 0..48,
            Part::Tiny => 0..8,
            Part::Over => 8..56,
            Part::Middle => 48..96,
            Part::Last => 96..len,
        }
    }

    pub fn is_later(self) -> bool {
        !matches!(self, Part::First | Part::Tiny)
    }

    /// Returns whether it has the complete header of this protocol.
    pub fn has_header(self, proto: u8) -> bool {
        self == Part::First || self == Part::Tiny && proto != TCP
    }

    /// Cuts this part out of a frame, as a fragment of the datagram `id`.
    pub fn of(self, frame: &[u8], id: u16) -> Vec<u8> {
        let r = read(frame).unwrap();
        let body = &frame[r.l4..];
        let bytes = self.bytes(body.len());
        let (place, more) = (bytes.start as u16, u16::from(bytes.end != body.len()));
        let mut cut = if r.src.is_ipv4() {
            let mut whole = ip(r.src, r.dst, r.proto, &[], &body[bytes]);
            whole[18..20].copy_from_slice(&id.to_be_bytes());
            fragment(whole, ((place / 8) | (more << 13)).to_be_bytes())
        } else {
            let header = [&[r.proto, 0][..], &(place | more).to_be_bytes(), &u32::from(id).to_be_bytes()].concat();
            ip(r.src, r.dst, FRAGMENT, &header, &body[bytes])
        };
        cut[..12].copy_from_slice(&frame[..12]);
        cut
    }
}

/// Returns whether translation has left the payload of a fragment unchanged.
pub fn is_untouched(before: &[u8], after: &[u8]) -> bool {
    let (Some(b), Some(a)) = (read(before), read(after)) else { return false };
    let same = |range: Range<usize>| before[b.l4..].get(range.clone()) == after[a.l4..].get(range);
    let len = before.len() - b.l4;
    before.len() == after.len()
        && match b.proto {
            _ if b.later_fragment => same(0..len),
            TCP => same(4..16) && same(18..len),
            UDP => same(4..6) && same(8..len),
            _ => same(0..2) && same(6..len),
        }
}

/// The fields that identify the fragments of one datagram (RFC 791; RFC 8200, section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Datagram {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub id: u16,
    pub proto: u8,
}

impl Datagram {
    /// Returns the tuple of its first fragment, as sent with these ports.
    pub fn with(&self, (pod_port, server_port): (u16, u16)) -> Tuple {
        Tuple { pod: self.src, pod_port, server: self.dst, server_port, proto: self.proto }
    }
}

/// A fragment that waits for the first one of its datagram, and the tick of its arrival.
type Waiting = (Vec<u8>, u32);

#[derive(Debug, Default)]
pub struct Datagrams {
    /// Source and destination port of the latest first fragment.
    firsts: BTreeMap<Datagram, (u16, u16)>,
    waiting: BTreeMap<Datagram, Vec<Waiting>>,
}

impl Datagrams {
    /// Records the ports of a first fragment.
    pub fn know(&mut self, of: Datagram, ports: (u16, u16)) {
        self.firsts.insert(of, ports);
    }

    /// Returns the ports of a datagram whose first fragment is known.
    pub fn ports(&self, of: &Datagram) -> Option<(u16, u16)> {
        self.firsts.get(of).copied()
    }

    /// Records that a fragment of an unknown datagram arrived, in this tick or the one before.
    pub fn wait(&mut self, of: Datagram, frame: &[u8], now: u32) {
        let waiting = self.waiting.entry(of).or_default();
        if waiting.len() < HELD_PER_DATAGRAM as usize {
            waiting.push((frame.to_vec(), now));
        }
    }

    pub fn are_waiting(&self, of: &Datagram) -> bool {
        self.waiting.contains_key(of)
    }

    /// Checks the frames that were sent on behind a first fragment.
    pub fn released(&mut self, of: &Datagram, behind: &[Vec<u8>], now: u32) -> Result<(), String> {
        let mut behind = behind.iter().peekable();
        for (frame, since) in self.waiting.remove(of).unwrap_or_default() {
            let there = behind.next_if(|next| **next == frame).is_some();
            if !there && now.wrapping_sub(since) < HELD_TICKS {
                return Err(format!("a fragment of {of:?} has waited, and is missing in its turn"));
            }
        }
        match behind.next() {
            Some(frame) => Err(format!("after {of:?} comes a frame that has not waited: {frame:02x?}")),
            None => Ok(()),
        }
    }
}
