//! Which gateways are alive: the health that the planner gets, and the sans-I/O state machines that determine it.
//!
//! The time is an argument: a monotonic `Duration` since an arbitrary start, the same for all calls to one machine. Nothing here reads a
//! clock, sends or receives.

mod lease;
mod probe;
pub mod terms;
mod transports;

use std::collections::BTreeMap;
use std::time::Duration;

pub use lease::{LeaseTimes, LeaseTracker, Renewal};
pub use probe::{ProbeState, ProbeTimes, ProbeTracker, ProbeTransition};
pub use transports::{Form, TransportChooser};

use crate::model::NodeName;

/// What is known of a gateway's lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseState {
    /// It has none.
    #[default]
    Never,
    /// It is renewed in time.
    Fresh {
        /// how long it has been fresh
        since: Duration,
        /// whether it had lapsed before, so that it must prove itself again
        returned: bool,
        /// whether a renewal was seen: until then the lease may be left over from a dead gateway
        proven: bool,
    },
    /// It is no longer renewed.
    Lapsed,
}

/// What is known of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeHealth {
    /// Its lease as a gateway.
    pub lease: LeaseState,
    /// Whether the node has been absent for so long that port blocks leased to it may go to others.
    pub gone: bool,
}

impl NodeHealth {
    /// Returns whether the node keeps the egress IPs that it has.
    pub fn is_fresh(&self) -> bool {
        matches!(self.lease, LeaseState::Fresh { .. })
    }

    /// Returns whether the node was not asked to hold a lease: it may be alive.
    pub fn is_unasked(&self) -> bool {
        self.lease == LeaseState::Never
    }

    /// Returns whether the node may be given an egress IP.
    pub fn is_proven(&self) -> bool {
        matches!(self.lease, LeaseState::Fresh { proven: true, .. })
    }

    /// Returns whether the node may be given egress IPs and has been fresh for at least this long.
    pub fn fresh_for(&self, delay: Duration) -> bool {
        matches!(self.lease, LeaseState::Fresh { since, proven: true, .. } if since >= delay)
    }

    /// Returns whether the node may be given egress IPs that others could keep: it never lapsed, or has been fresh for this long since.
    pub fn settled(&self, delay: Duration) -> bool {
        matches!(self.lease, LeaseState::Fresh { since, returned, proven: true } if !returned || since >= delay)
    }
}

/// What is known of all nodes. A node that is missing here has no lease and is not gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// By node.
    pub nodes: BTreeMap<NodeName, NodeHealth>,
}

impl Health {
    /// Returns what is known of a node.
    pub fn of(&self, node: &NodeName) -> NodeHealth {
        self.nodes.get(node).copied().unwrap_or_default()
    }
}
