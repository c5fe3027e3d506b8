//! nftables through netlink: just enough to replace one of our tables as a whole, and to check whether it still exists.
//!
//! The image does not contain `nft`, and the existing libraries need it or have another licence. Numbers are those of
//! `linux/netfilter/nf_tables.h`. Attributes are in network byte order, registers in the machine's.

use std::{collections::BTreeMap, io};

use crate::netlink::{DONE, ERROR, Message, attribute, exchange};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

/// `NFPROTO_INET`: IPv4 and IPv6 in one table.
const INET: u8 = 1;
/// The netfilter subsystem number of nftables, in the upper byte of a message's type.
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NEW_TABLE: u16 = 0;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const NEW_RULE: u16 = 6;
const NEW_SET: u16 = 9;
const NEW_ELEMENTS: u16 = 12;
const GET_RULE: u16 = 7;
const NEW_OBJECT: u16 = 18;
const GET_OBJECT: u16 = 19;
/// The kind of a named object: a counter.
const COUNTER: u32 = 1;
/// The flag of a set whose elements are intervals, and the flag of an element that ends an interval.
const INTERVALS: u32 = 4;
const INTERVAL_END: u32 = 1;
/// Elements per message, which may have 64 KiB.
const ELEMENTS: usize = 1_000;
/// The kind of user data that holds a set's byte order, as in `nft`, and the value for the machine's own order.
const BYTE_ORDER: u8 = 0;
const HOST_ORDER: u32 = 1;
/// The kind of user data that holds a rule's comment, as in `nft`.
const COMMENT: u8 = 0;

/// The hook of a chain on a packet's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Packets that come in, before they are routed.
    Prerouting = 0,
    /// Packets for this host.
    Input = 1,
    /// Packets that are routed from one interface to another.
    Forward = 2,
    /// Packets that this host sends.
    Output = 3,
}

/// A field of a packet, or of the kernel's metadata about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// `skb->priority`.
    Priority,
    /// `skb->mark`.
    Mark,
    /// Name of the interface at which the packet came in, 16 bytes.
    InputName,
    /// Name of the interface through which the packet leaves, 16 bytes.
    OutputName,
    /// `NFPROTO_IPV4` (2) or `NFPROTO_IPV6` (10), one byte.
    Family,
    /// The number of the transport protocol, one byte.
    Protocol,
    /// Bits of the connection's state.
    ConnectionState,
    /// Bytes of the network header: offset and length.
    Network(u32, u32),
    /// Bytes of the transport header: offset and length.
    Transport(u32, u32),
}

/// A part of a rule. Evaluation of a rule ends at the first part that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The field has this value.
    Is(Field, Vec<u8>),
    /// The field has another value.
    IsNot(Field, Vec<u8>),
    /// The field's value is not in the set of this name.
    NotIn(Field, &'static str),
    /// The field has any of these bits.
    HasBits(Field, u32),
    /// Sets bits of the mark.
    SetMark(u32),
    /// Exempts the packet from conntrack.
    NoTrack,
    /// Counts in the counter of this name.
    Count(&'static str),
    /// Drops the packet.
    Drop,
}

/// A rule. Rules with equal comments are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// For display, at most 127 bytes.
    pub comment: String,
    /// Its parts.
    pub parts: Vec<Part>,
}

/// The type of a set's values, as `nft` numbers them for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// IPv4 addresses.
    V4 = 7,
    /// IPv6 addresses.
    V6 = 8,
    /// Names of interfaces, 16 bytes.
    Names = 41,
}

/// A set in which rules of its table look up values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// Its name.
    pub name: &'static str,
    /// The type of its values.
    pub values: Values,
    /// The single values, or the start of each interval, each followed by the first value after the interval, if there is one.
    pub elements: Vec<Vec<u8>>,
}

impl Set {
    fn length(&self) -> u32 {
        match self.values {
            Values::V4 => 4,
            Values::V6 | Values::Names => 16,
        }
    }

    fn has_intervals(&self) -> bool {
        self.values != Values::Names
    }
}

/// A base chain that accepts packets that its rules do not drop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its name.
    pub name: &'static str,
    /// Its hook.
    pub hook: Hook,
    /// Its place among the chains of the hook.
    pub priority: i32,
    /// Its rules.
    pub rules: Vec<Rule>,
}

/// The values of a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Packets.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Replaces the table in one transaction. Counters begin at the given values.
pub fn replace(table: &str, counters: &[(&str, Counted)], sets: &[Set], chains: &[Chain]) -> io::Result<()> {
    let mut batch = Batch::new();
    // Only an existing table can be deleted.
    batch.message(NEW_TABLE, libc::NLM_F_CREATE, |m| m.text(1, table));
    batch.message(DELETE_TABLE, 0, |m| m.text(1, table));
    batch.message(NEW_TABLE, libc::NLM_F_CREATE, |m| m.text(1, table));
    for (name, counted) in counters {
        batch.message(NEW_OBJECT, libc::NLM_F_CREATE, |m| {
            m.text(1, table);
            m.text(2, name);
            m.number(3, COUNTER);
            m.nest(4, |data| {
                data.bytes(1, &counted.bytes.to_be_bytes());
                data.bytes(2, &counted.packets.to_be_bytes());
            });
        });
    }
    for (id, set) in sets.iter().enumerate() {
        add_set(&mut batch, table, id as u32, set);
    }
    for chain in chains {
        batch.message(NEW_CHAIN, libc::NLM_F_CREATE, |m| {
            m.text(1, table);
            m.text(3, chain.name);
            m.nest(4, |hook| {
                hook.number(1, chain.hook as u32);
                hook.number(2, chain.priority.cast_unsigned());
            });
            m.text(7, "filter");
        });
    }
    for chain in chains {
        for rule in &chain.rules {
            batch.message(NEW_RULE, libc::NLM_F_CREATE | libc::NLM_F_APPEND, |m| {
                m.text(1, table);
                m.text(2, chain.name);
                m.nest(4, |list| rule.parts.iter().for_each(|part| expressions(list, part)));
                m.bytes(7, &comment(&rule.comment));
            });
        }
    }
    batch.run()
}

/// Messages that the kernel carries out together or not at all.
struct Batch {
    bytes: Vec<u8>,
    messages: usize,
}

impl Batch {
    /// Returns an empty batch.
    fn new() -> Self {
        Self { bytes: Message::new(BATCH_BEGIN, 0, &header(SUBSYSTEM)).finish(), messages: 0 }
    }

    /// Adds a message.
    fn message(&mut self, kind: u16, flags: i32, fill: impl FnOnce(&mut Message)) {
        let mut message = Message::new(SUBSYSTEM << 8 | kind, flags | libc::NLM_F_ACK, &header(0));
        fill(&mut message);
        self.bytes.extend(message.finish());
        self.messages += 1;
    }

    /// Sends the messages and waits for the answers.
    fn run(mut self) -> io::Result<()> {
        self.bytes.extend(Message::new(BATCH_END, 0, &header(SUBSYSTEM)).finish());
        let mut answers = 0;
        exchange(NETLINK_NETFILTER, &self.bytes, |kind, _| {
            answers += usize::from(kind == ERROR);
            answers == self.messages
        })
    }
}

/// `struct nfgenmsg`. `resource` is the netfilter subsystem of a batch.
fn header(resource: u16) -> [u8; 4] {
    let [high, low] = resource.to_be_bytes();
    [INET, 0, high, low]
}

impl Message {
    /// Adds an element to a rule's list of expressions.
    fn expression(&mut self, name: &str, fill: impl FnOnce(&mut Self)) {
        self.nest(1, |element| {
            element.text(1, name);
            element.nest(2, fill);
        });
    }
}

fn add_set(batch: &mut Batch, table: &str, id: u32, set: &Set) {
    batch.message(NEW_SET, libc::NLM_F_CREATE, |m| {
        m.text(1, table);
        m.text(2, set.name);
        m.number(3, if set.has_intervals() { INTERVALS } else { 0 });
        m.number(4, set.values as u32);
        m.number(5, set.length());
        m.number(10, id);
        if set.values == Values::Names {
            // Only for `nft`, which would otherwise show the names backwards.
            m.bytes(13, &[&[BYTE_ORDER, 4], &HOST_ORDER.to_ne_bytes()[..]].concat());
        }
    });
    for (first, elements) in (0..).step_by(ELEMENTS).zip(set.elements.chunks(ELEMENTS)) {
        batch.message(NEW_ELEMENTS, libc::NLM_F_CREATE, |m| {
            m.text(1, table);
            m.text(2, set.name);
            m.nest(3, |list| {
                for (at, value) in (first..).zip(elements) {
                    list.nest(1, |element| {
                        element.nest(1, |key| key.bytes(1, value));
                        if set.has_intervals() && at % 2 == 1 {
                            element.number(3, INTERVAL_END);
                        }
                    });
                }
            });
            m.number(4, id);
        });
    }
}

/// Removes the table. Returns false if there was none.
pub fn delete(table: &str) -> io::Result<bool> {
    let mut batch = Batch::new();
    batch.message(DELETE_TABLE, 0, |m| m.text(1, table));
    match batch.run() {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the rules of a table, as (chain, comment), in their order; empty if there is no such table.
pub fn rules(table: &str) -> io::Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    dump(table, GET_RULE, NEW_RULE, |chain, rule| {
        let comment = attribute(rule, 7).and_then(read_comment);
        found.push((chain, comment.unwrap_or_default()));
    })?;
    Ok(found)
}

/// Returns the counters of a table by name; empty if there is no such table.
pub fn counters(table: &str) -> io::Result<BTreeMap<String, Counted>> {
    let mut found = BTreeMap::new();
    dump(table, GET_OBJECT, NEW_OBJECT, |name, object| {
        let number = |wanted: u16| {
            let value = attribute(attribute(object, 4)?, wanted)?.first_chunk()?;
            Some(u64::from_be_bytes(*value))
        };
        if attribute(object, 3) == Some(&COUNTER.to_be_bytes()[..]) {
            let counted = Counted { packets: number(2).unwrap_or(0), bytes: number(1).unwrap_or(0) };
            found.insert(name, counted);
        }
    })?;
    Ok(found)
}

/// Calls `each` for every object of a kind in the table, with the second attribute, a name, and all attributes.
fn dump(table: &str, get: u16, new: u16, mut each: impl FnMut(String, &[u8])) -> io::Result<()> {
    let mut request = Message::new(SUBSYSTEM << 8 | get, libc::NLM_F_DUMP, &header(0));
    request.text(1, table);
    let result = exchange(NETLINK_NETFILTER, &request.finish(), |kind, body| {
        let object = body.get(header(0).len()..).unwrap_or_default();
        let text = |wanted: u16| {
            let text = String::from_utf8_lossy(attribute(object, wanted)?);
            Some(text.trim_end_matches('\0').to_owned())
        };
        if kind == SUBSYSTEM << 8 | new && text(1).as_deref() == Some(table) {
            each(text(2).unwrap_or_default(), object);
        }
        kind == DONE
    });
    match result {
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
        _ => Ok(()),
    }
}

fn comment(text: &str) -> Vec<u8> {
    let text = &text.as_bytes()[..text.len().min(127)];
    [&[COMMENT, text.len() as u8 + 1], text, &[0]].concat()
}

fn read_comment(data: &[u8]) -> Option<String> {
    match data {
        [COMMENT, len, rest @ ..] => {
            let text = rest.get(..usize::from(*len))?;
            Some(String::from_utf8_lossy(text).trim_end_matches('\0').to_owned())
        }
        _ => None,
    }
}

/// The register that all expressions here use: 16 bytes.
const REGISTER: u32 = 1;

/// Adds the kernel's expressions for one part.
fn expressions(list: &mut Message, part: &Part) {
    match part {
        Part::Is(field, value) => {
            load(list, *field);
            compare(list, 0, value);
        }
        Part::IsNot(field, value) => {
            load(list, *field);
            compare(list, 1, value);
        }
        Part::NotIn(field, set) => {
            load(list, *field);
            list.expression("lookup", |data| {
                data.text(1, set);
                data.number(2, REGISTER);
                data.number(5, 1);
            });
        }
        Part::HasBits(field, bits) => {
            load(list, *field);
            mask(list, *bits, 0);
            compare(list, 1, &0u32.to_ne_bytes());
        }
        Part::SetMark(bits) => {
            load(list, Field::Mark);
            mask(list, !bits, *bits);
            list.expression("meta", |data| {
                data.number(2, 3);
                data.number(3, REGISTER);
            });
        }
        Part::NoTrack => list.expression("notrack", |_| {}),
        Part::Count(name) => list.expression("objref", |data| {
            data.number(1, COUNTER);
            data.text(2, name);
        }),
        Part::Drop => list.expression("immediate", |data| {
            data.number(1, 0);
            data.nest(2, |value| value.nest(2, |verdict| verdict.number(1, 0)));
        }),
    }
}

fn load(list: &mut Message, field: Field) {
    let meta = |list: &mut Message, key: u32| {
        list.expression("meta", |data| {
            data.number(1, REGISTER);
            data.number(2, key);
        });
    };
    let payload = |list: &mut Message, base: u32, offset: u32, len: u32| {
        list.expression("payload", |data| {
            data.number(1, REGISTER);
            data.number(2, base);
            data.number(3, offset);
            data.number(4, len);
        });
    };
    match field {
        Field::Priority => meta(list, 2),
        Field::Mark => meta(list, 3),
        Field::InputName => meta(list, 6),
        Field::OutputName => meta(list, 7),
        Field::Family => meta(list, 15),
        Field::Protocol => meta(list, 16),
        Field::ConnectionState => list.expression("ct", |data| {
            data.number(1, REGISTER);
            data.number(2, 0);
        }),
        Field::Network(offset, len) => payload(list, 1, offset, len),
        Field::Transport(offset, len) => payload(list, 2, offset, len),
    }
}

/// Sets the register to `(register & mask) ^ xor`.
fn mask(list: &mut Message, mask: u32, xor: u32) {
    list.expression("bitwise", |data| {
        data.number(1, REGISTER);
        data.number(2, REGISTER);
        data.number(3, 4);
        data.nest(4, |value| value.bytes(1, &mask.to_ne_bytes()));
        data.nest(5, |value| value.bytes(1, &xor.to_ne_bytes()));
    });
}

/// Compares the register. `operation` 0: it equals `value`; 1: it does not.
fn compare(list: &mut Message, operation: u32, value: &[u8]) {
    list.expression("cmp", |data| {
        data.number(1, REGISTER);
        data.number(2, operation);
        data.nest(3, |data| data.bytes(1, value));
    });
}
