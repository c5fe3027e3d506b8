//! Records as IPFIX messages (RFC 7011) with the NAT events of RFC 8158. All numbers are in network byte order. Pure.
//!
//! Information elements and the values of `natEvent` are from IANA's registries "IPFIX Information Elements" and "NAT Event Type". For
//! the translation of IPv6 to IPv6, only the two values that RFC 8158 calls historic exist.

use super::{Change, Fate, Flow, Ports, Record};
use crate::flowlog::Instant;
use std::net::{IpAddr, SocketAddr};

/// The packet size that is not fragmented on any IPv6 path (RFC 8200, section 5), minus the IPv6 and UDP headers.
pub(super) const MAX_MESSAGE: usize = 1280 - 40 - 8;
/// RFC 7011, section 3.1.
const VERSION: u16 = 10;
const HEADER: usize = 16;
const SET_HEADER: usize = 4;
/// RFC 7011, section 3.3.2.
const TEMPLATE_SET: u16 = 2;
/// A field with its own length (RFC 7011, section 7), in one byte for lengths up to 254.
const VARIABLE: u16 = u16::MAX;
const MAX_TEXT: usize = 254;
/// One agent has one translator.
const DOMAIN: u32 = 1;

/// Information elements, with their lengths in bytes.
mod element {
    pub(super) type Element = (u16, u16);
    pub(super) const PROTOCOL: Element = (4, 1);
    pub(super) const SOURCE_PORT: Element = (7, 2);
    pub(super) const SOURCE_V4: Element = (8, 4);
    pub(super) const DESTINATION_PORT: Element = (11, 2);
    pub(super) const DESTINATION_V4: Element = (12, 4);
    pub(super) const SOURCE_V6: Element = (27, 16);
    pub(super) const DESTINATION_V6: Element = (28, 16);
    pub(super) const FLOW_START_MS: Element = (152, 8);
    pub(super) const FLOW_END_MS: Element = (153, 8);
    pub(super) const POST_NAT_SOURCE_V4: Element = (225, 4);
    pub(super) const POST_NAPT_SOURCE_PORT: Element = (227, 2);
    pub(super) const NAT_EVENT: Element = (230, 1);
    pub(super) const POST_NAT_SOURCE_V6: Element = (281, 16);
    pub(super) const OBSERVATION_TIME_MS: Element = (323, 8);
    pub(super) const PORT_RANGE_START: Element = (361, 2);
    pub(super) const PORT_RANGE_END: Element = (362, 2);
    pub(super) const USER_NAME: Element = (371, super::VARIABLE);
}

/// Values of `natEvent`.
mod event {
    pub(super) const TRANSLATION: [u8; 2] = [1, 2];
    pub(super) const NAT44_SESSION: [u8; 2] = [4, 5];
    pub(super) const NAT44_BINDING: [u8; 2] = [8, 9];
    pub(super) const PORT_BLOCK: [u8; 2] = [16, 17];
}

/// Returns the templates. A template's number is its index here plus [`FIRST_TEMPLATE`].
fn templates() -> [Vec<element::Element>; 6] {
    use element::*;
    let translation = |source, seen, more: &[Element]| {
        let times = [OBSERVATION_TIME_MS, FLOW_START_MS, FLOW_END_MS, NAT_EVENT];
        [&times[..], &[PROTOCOL, source, SOURCE_PORT, seen, POST_NAPT_SOURCE_PORT], more, &[USER_NAME]].concat()
    };
    let session = |source, seen, destination| translation(source, seen, &[destination, DESTINATION_PORT]);
    let binding = |source, seen| translation(source, seen, &[]);
    let ports =
        |source, seen| vec![OBSERVATION_TIME_MS, NAT_EVENT, source, seen, PORT_RANGE_START, PORT_RANGE_END, USER_NAME];
    [
        session(SOURCE_V4, POST_NAT_SOURCE_V4, DESTINATION_V4),
        binding(SOURCE_V4, POST_NAT_SOURCE_V4),
        ports(SOURCE_V4, POST_NAT_SOURCE_V4),
        session(SOURCE_V6, POST_NAT_SOURCE_V6, DESTINATION_V6),
        binding(SOURCE_V6, POST_NAT_SOURCE_V6),
        ports(SOURCE_V6, POST_NAT_SOURCE_V6),
    ]
}
/// RFC 7011, section 3.4.1: smaller numbers are reserved for other sets.
const FIRST_TEMPLATE: u16 = 256;
/// The indices of templates within one family. IPv6 has the second half of the templates.
const SESSION: u16 = 0;
const BINDING: u16 = 1;
const PORTS: u16 = 2;
const FAMILY: u16 = 3;

/// The state that continues from message to message.
#[derive(Debug, Default)]
pub(super) struct Encoder {
    /// The number of records before the next message, from which a collector detects losses.
    pub(super) sequence: u32,
}

impl Encoder {
    /// Encodes a message with all templates, at a time in seconds since 1970.
    pub(super) fn templates(&self, seconds: u32) -> Vec<u8> {
        let mut set = Vec::new();
        for (template, number) in templates().iter().zip(FIRST_TEMPLATE..) {
            set.extend(number.to_be_bytes());
            set.extend((template.len() as u16).to_be_bytes());
            for (element, length) in template {
                set.extend(element.to_be_bytes());
                set.extend(length.to_be_bytes());
            }
        }
        self.message(seconds, &[(TEMPLATE_SET, set)])
    }

    /// Encodes a message with as many of the first records as fit. Returns it with their number, which is at least one.
    pub(super) fn records(&mut self, records: &[Record], node: &str, seconds: u32) -> (Vec<u8>, usize) {
        let mut sets: Vec<(u16, Vec<u8>)> = Vec::new();
        let (mut length, mut count) = (HEADER, 0);
        for record in records {
            let (template, bytes) = encode(record, node);
            let is_same = sets.last().is_some_and(|(last, _)| *last == template);
            length += bytes.len() + if is_same { 0 } else { SET_HEADER };
            if length > MAX_MESSAGE && count > 0 {
                break;
            }
            match sets.last_mut() {
                Some((last, set)) if *last == template => set.extend(bytes),
                _ => sets.push((template, bytes)),
            }
            count += 1;
        }
        let message = self.message(seconds, &sets);
        self.sequence = self.sequence.wrapping_add(count as u32);
        (message, count)
    }

    fn message(&self, seconds: u32, sets: &[(u16, Vec<u8>)]) -> Vec<u8> {
        let length = HEADER + sets.iter().map(|(_, set)| SET_HEADER + set.len()).sum::<usize>();
        let mut message = Vec::with_capacity(length);
        message.extend(VERSION.to_be_bytes());
        message.extend((length as u16).to_be_bytes());
        message.extend(seconds.to_be_bytes());
        message.extend(self.sequence.to_be_bytes());
        message.extend(DOMAIN.to_be_bytes());
        for (number, set) in sets {
            message.extend(number.to_be_bytes());
            message.extend(((SET_HEADER + set.len()) as u16).to_be_bytes());
            message.extend(set);
        }
        message
    }
}

/// Returns a record's template and its bytes.
fn encode(record: &Record, node: &str) -> (u16, Vec<u8>) {
    match record {
        Record::Flow(flow) => of_flow(flow),
        Record::Ports(ports) => of_ports(ports, node),
    }
}

fn of_flow(flow: &Flow) -> (u16, Vec<u8>) {
    let ended = usize::from(!matches!(flow.fate, Fate::Began));
    let (kind, events) = match (flow.source.ip(), flow.destination) {
        (IpAddr::V4(_), Some(_)) => (SESSION, event::NAT44_SESSION),
        (IpAddr::V4(_), None) => (BINDING, event::NAT44_BINDING),
        (IpAddr::V6(_), Some(_)) => (SESSION + FAMILY, event::TRANSLATION),
        (IpAddr::V6(_), None) => (BINDING + FAMILY, event::TRANSLATION),
    };
    let mut bytes = Vec::with_capacity(128);
    for at in [flow.at(), flow.began, flow.at()] {
        push_time(&mut bytes, at);
    }
    bytes.push(events[ended]);
    bytes.push(flow.protocol);
    let seen = SocketAddr::new(flow.egress_ip, flow.port);
    for socket in [Some(flow.source), Some(seen), flow.destination].into_iter().flatten() {
        push_address(&mut bytes, socket.ip());
        bytes.extend(socket.port().to_be_bytes());
    }
    push_text(&mut bytes, &flow.pod);
    (FIRST_TEMPLATE + kind, bytes)
}

fn of_ports(ports: &Ports, node: &str) -> (u16, Vec<u8>) {
    let Ports { at, change, lease, holder } = ports;
    let mut bytes = Vec::with_capacity(96);
    push_time(&mut bytes, *at);
    bytes.push(event::PORT_BLOCK[usize::from(*change == Change::Returned)]);
    let (family, nobody) = match lease.egress_ip {
        IpAddr::V4(_) => (0, IpAddr::from([0; 4])),
        IpAddr::V6(_) => (FAMILY, IpAddr::from([0; 16])),
    };
    push_address(&mut bytes, holder.unwrap_or(nobody));
    push_address(&mut bytes, lease.egress_ip);
    bytes.extend(lease.first_port.to_be_bytes());
    bytes.extend(lease.last_port.to_be_bytes());
    push_text(&mut bytes, node);
    (FIRST_TEMPLATE + PORTS + family, bytes)
}

/// Appends a time in milliseconds since 1970.
fn push_time(bytes: &mut Vec<u8>, at: Instant) {
    bytes.extend((at / 1000).to_be_bytes());
}

fn push_address(bytes: &mut Vec<u8>, address: IpAddr) {
    match address {
        IpAddr::V4(address) => bytes.extend(address.octets()),
        IpAddr::V6(address) => bytes.extend(address.octets()),
    }
}

/// Appends a text after its length, truncated if too long.
fn push_text(bytes: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(MAX_TEXT)];
    bytes.push(text.len() as u8);
    bytes.extend(text.as_bytes());
}
