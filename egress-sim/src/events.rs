//! What processes want, and what happens to them.

use super::api::{Ends, Object, Stored};
use egress_core::{
    agent::gateways::{Answered, Request},
    model::NodeName,
};
use egress_objects::api::EgressIP;
use std::{
    cmp::{Ordering, Reverse},
    time::Duration,
};

/// What a process wants done.
pub enum Effect {
    Probe(NodeName, Request),
    Write(Purpose, Object),
    /// Read everything as it is now.
    Refresh,
}

/// What a write is for.
#[derive(Clone)]
pub enum Purpose {
    Status,
    Lease,
    Release,
    /// A plan's; with the EgressIP whose status is to follow.
    Plan(Option<Box<EgressIP>>),
}

/// What happens. Processes are the agents of all nodes by number, then the controllers.
pub enum SimEvent {
    /// A process wakes by its timer, if it still is this incarnation.
    Wake(usize, u32),
    /// It starts, as soon as it can read the objects.
    Start(usize, u32),
    /// Its watch of a kind delivers something.
    Watch(usize, u32, usize),
    /// A request arrives at the API server: a write, or else a read of everything.
    Request(usize, u32, Option<(Purpose, Object)>),
    Response(usize, u32, Option<Purpose>, Response),
    /// A probe arrives at a gateway, from a node with a number.
    Probe(usize, usize, Request),
    Answer(usize, Answered),
    Fault(usize, bool),
    /// Pods of a node begin and end connections.
    Traffic(usize),
}

/// An event with its time. The greatest one happens first: the earliest, and among those of the same time the one that was
/// scheduled first.
pub struct Scheduled {
    pub at: Duration,
    pub number: u64,
    pub event: SimEvent,
}

impl Scheduled {
    fn order(&self) -> Reverse<(Duration, u64)> {
        Reverse((self.at, self.number))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> Ordering {
        self.order().cmp(&other.order())
    }
}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.order() == other.order()
    }
}

impl Eq for Scheduled {}

pub enum Response {
    Done(Stored),
    Conflict,
    Lost,
    Read(Ends),
}
