//! The events for collectors.

use crate::flowlog::Instant;
use egress_core::leaselog::{LeaseEvent, PortLease};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// A flow of a pod of this node began or was removed.
    Flow(Flow),
    /// This node got ports of an egress IP, or returned them.
    Ports(Ports),
}

/// A flow with all known information.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The event in its life.
    pub fate: Fate,
    /// The egress IP.
    pub egress_ip: IpAddr,
    /// The translated port, or the identifier of an ICMP query.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Distinguishes it from another flow that began at the same time.
    pub ticket: u32,
    /// The time of its start.
    pub began: Instant,
    /// `namespace/name` of the pod, or its address if its name is no longer known.
    pub pod: Arc<str>,
    /// The policy, if known.
    pub policy: Option<Arc<str>>,
    /// The pod's address, and the port or identifier that it uses.
    pub source: SocketAddr,
    /// The remote address and port, if destinations are logged.
    pub destination: Option<SocketAddr>,
}

/// An event in the life of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It began.
    Began,
    /// It was removed; its last packet came at this time.
    Ended(Instant),
    /// It was removed without a packet that passed the host's firewall, so the outside has not seen it.
    Refused(Instant),
}

impl Flow {
    /// Returns the time of the event.
    pub fn at(&self) -> Instant {
        match self.fate {
            Fate::Began => self.began,
            Fate::Ended(last) | Fate::Refused(last) => last,
        }
    }
}

/// Consecutive ports of an egress IP, and the change to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ports {
    /// The time of the change.
    pub at: Instant,
    /// The kind of change.
    pub change: Change,
    /// The ports, and the node that has or had them.
    pub lease: PortLease,
    /// An address of that node, of the egress IP's family, if it has one.
    pub holder: Option<IpAddr>,
}

/// A change to the lease of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The node had them when its agent started.
    Held,
    /// The node got them.
    Granted,
    /// The node returned them.
    Returned,
}

impl Ports {
    /// Makes the record of an event, if the event is about ports. `addresses` are the node's addresses.
    pub fn of(at: Instant, event: LeaseEvent, addresses: &[IpAddr]) -> Option<Self> {
        let (change, lease) = match event {
            LeaseEvent::Held(lease) => (Change::Held, lease),
            LeaseEvent::Granted(lease) => (Change::Granted, lease),
            LeaseEvent::Returned(lease) => (Change::Returned, lease),
            LeaseEvent::Started
            | LeaseEvent::Continued
            | LeaseEvent::Alive
            | LeaseEvent::Stopped
            | LeaseEvent::Lost(_) => {
                return None;
            }
        };
        let holder = addresses.iter().find(|address| address.is_ipv4() == lease.egress_ip.is_ipv4()).copied();
        Some(Self { at, change, lease, holder })
    }
}
