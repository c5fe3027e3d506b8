//! Converts the lines of the programs to packets with names. Pure.

use crate::ctl::{dump::Dump, print::Printable};
use egress_common::{
    tcp,
    trace::{FRAME, VERDICT, hook},
    verdict::{Counter, purpose},
};
use egress_node::datapath::maps::MapsError;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use std::collections::BTreeMap;

/// The maximum number of incomplete packets: packets on different processors have interleaved lines. Beyond it, the oldest is dropped.
const OPEN: usize = 256;

/// A packet, and the decisions about it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Packet {
    /// Counted from 1.
    pub number: u64,
    /// When its last line was read.
    pub time: String,
    /// The hook that saw it, its addresses and ports, its protocol and its length.
    pub packet: String,
    /// Decisions, in order.
    pub decisions: Vec<String>,
    /// Its fate.
    pub verdict: String,
}

impl Printable for Packet {
    fn text(&self) -> String {
        let steps: String = self.decisions.iter().map(|step| format!("      {step}\n")).collect();
        // The date is omitted: it is today.
        let time = self.time.split_once('T').map_or(self.time.as_str(), |(_, time)| time);
        format!("{time} #{} {}\n{steps}    = {}\n", self.number, self.packet, self.verdict)
    }
}

/// Packets whose lines have not all arrived.
#[derive(Debug, Default)]
pub struct Packets {
    open: BTreeMap<u32, Packet>,
    begun: u64,
}

impl Packets {
    /// Returns the number of packets whose first line has arrived.
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Takes a line. Returns the packet if the line was its last.
    pub fn take(&mut self, line: &str, now: Timestamp, names: &mut Names) -> Option<Packet> {
        let (number, text) = line.split_once(' ')?;
        let number = number.parse().ok()?;
        if let Some(frame) = text.strip_prefix(FRAME) {
            self.begun += 1;
            if self.open.len() >= OPEN {
                self.open.pop_first();
            }
            let packet = Packet { number: self.begun, packet: names.put_into(frame), ..Packet::default() };
            self.open.insert(number, packet);
            return None;
        }
        match text.strip_prefix(VERDICT) {
            None => {
                self.open.get_mut(&number)?.decisions.push(names.put_into(text));
                None
            }
            Some(verdict) => {
                let mut packet = self.open.remove(&number)?;
                packet.verdict = names.put_into(verdict);
                packet.time = format!("{now:.6}");
                Some(packet)
            }
        }
    }
}

/// The names of objects that the programs know by number.
pub struct Names {
    dump: Dump,
    again: Box<dyn FnMut() -> Result<Dump, MapsError>>,
}

impl Names {
    /// Makes the names from `dump`. `again` rereads the maps if a number is unknown.
    pub fn new(dump: Dump, again: impl FnMut() -> Result<Dump, MapsError> + 'static) -> Self {
        Self { dump, again: Box::new(again) }
    }

    /// Replaces each `<what number>` in the text with a name.
    pub fn put_into(&mut self, text: &str) -> String {
        let mut done = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('<') {
            done.push_str(before);
            let (mark, after) = after.split_once('>').unwrap_or((after, ""));
            done.push_str(&self.named(mark));
            rest = after;
        }
        done + rest
    }

    fn named(&mut self, mark: &str) -> String {
        let Some((what, number)) = mark.split_once(' ').and_then(|(what, n)| Some((what, n.parse::<u32>().ok()?)))
        else {
            return mark.to_owned();
        };
        match what {
            "hook" => place(number).to_owned(),
            "proto" => protocol(number),
            "flags" => flags(number),
            "purpose" => purpose_of(number).to_owned(),
            "drop" => match Counter::ALL.get(number as usize) {
                Some(counter) => format!("{} ({})", counter.name(), counter.help()),
                None => format!("#{number}"),
            },
            _ => match self.look_up(what, number) {
                Some(name) => name,
                None => {
                    // The object may be new.
                    if let Ok(dump) = (self.again)() {
                        self.dump = dump;
                    }
                    self.look_up(what, number).unwrap_or_else(|| format!("#{number}"))
                }
            },
        }
    }

    fn look_up(&self, what: &str, number: u32) -> Option<String> {
        match what {
            "policy" => Some(self.dump.policy_name(number)).filter(|name| !name.starts_with('#')),
            "node" => self.dump.node_name(number).filter(|name| !name.starts_with('#')),
            "egress" => self.dump.egress_ip(number).map(|(ip, _)| ip.to_string()),
            _ => None,
        }
    }
}

fn place(number: u32) -> &'static str {
    match number {
        hook::FROM_POD => "from the pod:",
        hook::TO_POD => "to the pod:",
        hook::EXIT => "where it leaves:",
        hook::TUNNEL => "out of the tunnel:",
        hook::UNDERLAY => "from another node:",
        hook::UPLINK => "from outside:",
        _ => "after the shaper:",
    }
}

fn protocol(number: u32) -> String {
    match number {
        1 => "ICMP".to_owned(),
        6 => "TCP".to_owned(),
        17 => "UDP".to_owned(),
        58 => "ICMPv6".to_owned(),
        other => format!("protocol {other}"),
    }
}

/// Formats the flags of a TCP segment with a blank before each and a comma at the end. Without flags, the comma follows the protocol.
fn flags(number: u32) -> String {
    let named = [(tcp::flag::SYN, "SYN"), (tcp::flag::FIN, "FIN"), (tcp::flag::RST, "RST"), (tcp::flag::ACK, "ACK")];
    let set = named.iter().filter(|(flag, _)| number & u32::from(*flag) != 0);
    set.map(|(_, name)| format!(" {name}")).collect::<String>() + ","
}

fn purpose_of(number: u32) -> &'static str {
    match number {
        purpose::FORWARD => "to be sent out there",
        purpose::REPLY => "for its pod there",
        _ => "as a probe",
    }
}
