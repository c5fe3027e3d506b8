//! Which gateways are alive: what the planner is told about them, and the sans-I/O state machines that find out.
//!
//! Time is an argument: a monotonic `Duration` since an arbitrary start, the same for all calls to one machine. Nothing here
//! reads a clock, sends or receives.

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
        /// for how long already
        since: Duration,
        /// whether it had lapsed before, so that it has to prove itself again
        returned: bool,
        /// whether a renewal was seen: until then the lease may be left over from a gateway that is dead
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
    /// The node has been absent for so long that port blocks leased to it may go to others.
    pub gone: bool,
}

impl NodeHealth {
    /// Whether the node keeps the egress IPs that it has.
    pub fn is_fresh(&self) -> bool {
        matches!(self.lease, LeaseState::Fresh { .. })
    }

    /// Whether it was not asked for a lease: it may be alive.
    pub fn is_unasked(&self) -> bool {
        self.lease == LeaseState::Never
    }

    /// Whether the node may be given an egress IP.
    pub fn is_proven(&self) -> bool {
        matches!(self.lease, LeaseState::Fresh { proven: true, .. })
    }

    /// Whether it may be given egress IPs, and has been fresh for at least this long.
    pub fn fresh_for(&self, delay: Duration) -> bool {
        matches!(self.lease, LeaseState::Fresh { since, proven: true, .. } if since >= delay)
    }

    /// Whether it may be given egress IPs that others could keep: it never lapsed, or not for this long.
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
    /// What is known of a node.
    pub fn of(&self, node: &NodeName) -> NodeHealth {
        self.nodes.get(node).copied().unwrap_or_default()
    }
}
