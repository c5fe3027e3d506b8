//! The question: a pod, a destination, and optionally a source port.

use crate::ctl::dump::Dump;
use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

/// An IP protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// TCP; the packet is a SYN.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP echo, of the destination's address family.
    Icmp,
    /// Any other protocol, by its number.
    Other(u8),
}

impl Protocol {
    /// Returns the protocol's number.
    pub fn number(self, ipv6: bool) -> u32 {
        match self {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
            Protocol::Icmp => {
                if ipv6 {
                    58
                } else {
                    1
                }
            }
            Protocol::Other(number) => number.into(),
        }
    }

    /// Returns whether the datapath can translate the protocol.
    pub fn translatable(self) -> bool {
        !matches!(self, Protocol::Other(_))
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Protocol::Tcp => f.write_str("tcp"),
            Protocol::Udp => f.write_str("udp"),
            Protocol::Icmp => f.write_str("icmp"),
            Protocol::Other(number) => write!(f, "{number}"),
        }
    }
}

/// A destination: `203.0.113.7:443/tcp`, `[2001:db8::7]:53/udp`, `203.0.113.7/icmp`, `2001:db8::7/47`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The address.
    pub address: IpAddr,
    /// The port; 0 for a protocol without ports.
    pub port: u16,
    /// The protocol.
    pub protocol: Protocol,
}

/// The error for a text that is not a destination.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a destination: write 203.0.113.7:443/tcp, [2001:db8::7]:53/udp, 203.0.113.7/icmp or 203.0.113.7/47"
)]
pub struct TargetError {
    text: String,
}

impl FromStr for Destination {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let error = || TargetError { text: text.to_owned() };
        let (end, protocol) = text.rsplit_once('/').ok_or_else(error)?;
        let protocol = match protocol.to_ascii_lowercase().as_str() {
            "tcp" | "6" => Protocol::Tcp,
            "udp" | "17" => Protocol::Udp,
            "icmp" | "icmpv6" | "1" | "58" => Protocol::Icmp,
            number => Protocol::Other(number.parse().map_err(|_| error())?),
        };
        let (address, port) = match protocol {
            Protocol::Tcp | Protocol::Udp => {
                let end: SocketAddr = end.parse().map_err(|_| error())?;
                (end.ip(), end.port())
            }
            _ => (end.trim_start_matches('[').trim_end_matches(']').parse().map_err(|_| error())?, 0),
        };
        Ok(Self { address, port, protocol })
    }
}

/// The question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// `namespace/name`, or an address.
    pub pod: String,
    /// The destination.
    pub to: IpAddr,
    /// Its port; 0 for a protocol without ports.
    pub port: u16,
    /// The protocol.
    pub protocol: Protocol,
    /// The pod's port, or the identifier of an ICMP query.
    pub from_port: Option<u16>,
}

/// The reason why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuestionError {
    /// No such pod.
    #[error("no pod {pod} of this node is in the maps{}: ask on the pod's own node, or give its address",
        known.as_ref().map(|names| format!(" (there are {names})")).unwrap_or_default())]
    NoPod {
        /// The pod in the question.
        pod: String,
        /// A few pods that exist.
        known: Option<String>,
    },
    /// The pod has no address of the destination's family.
    #[error("pod {pod} has no address of the family of {to}, so it can send nothing there")]
    NoAddress {
        /// The pod.
        pod: String,
        /// The destination.
        to: IpAddr,
    },
    /// Both are addresses, of different families.
    #[error("{pod} and {to} are addresses of different families")]
    Families {
        /// The source.
        pod: String,
        /// The destination.
        to: IpAddr,
    },
}

/// The maximum number of pods that the error for an unknown pod names.
const NAMED: usize = 5;

impl Question {
    /// Makes a question about a pod (`namespace/name` or an address) and a destination.
    pub fn new(pod: &str, target: Destination, from_port: Option<u16>) -> Self {
        Self { pod: pod.to_owned(), to: target.address, port: target.port, protocol: target.protocol, from_port }
    }

    /// Returns the source address.
    pub(super) fn source(&self, dump: &Dump) -> Result<IpAddr, QuestionError> {
        let same_family = |ip: &IpAddr| ip.is_ipv6() == self.to.is_ipv6();
        if let Ok(ip) = self.pod.parse::<IpAddr>() {
            let families = || QuestionError::Families { pod: self.pod.clone(), to: self.to };
            return Some(ip).filter(same_family).ok_or_else(families);
        }
        let ip = addresses(dump, &self.pod)?.into_iter().find(same_family);
        ip.ok_or_else(|| QuestionError::NoAddress { pod: self.pod.clone(), to: self.to })
    }
}

/// Returns the addresses of a pod of this node, given its `namespace/name`.
pub(in crate::ctl) fn addresses(dump: &Dump, pod: &str) -> Result<Vec<IpAddr>, QuestionError> {
    let pods = dump.endpoints();
    let named = pods.iter().filter(|(id, _)| dump.endpoint_name(**id) == pod);
    let found: Vec<IpAddr> = named.flat_map(|(_, (_, ips))| ips).copied().collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let names: BTreeSet<String> = pods.keys().map(|id| dump.endpoint_name(*id)).collect();
    let mut known = names.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > NAMED {
        known += ", ...";
    }
    Err(QuestionError::NoPod { pod: pod.to_owned(), known: Some(known).filter(|k| !k.is_empty()) })
}
