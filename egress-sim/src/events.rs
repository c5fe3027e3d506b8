//! The effects that processes request, and the events that they receive.

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

/// An effect that a process requests.
pub enum Effect {
    Probe(NodeName, Request),
    Write(Purpose, Object),
    /// Reads all current objects.
    Refresh,
}

/// The purpose of a write.
#[derive(Clone)]
pub enum Purpose {
    Status,
    Lease,
    Release,
    /// A plan's object, with the EgressIP whose status is to be written next.
    Plan(Option<Box<EgressIP>>),
}

/// An event. Processes are numbered: first the agents of all nodes, then the controllers.
pub enum SimEvent {
    /// The timer of a process fires, if the process still is this incarnation.
    Wake(usize, u32),
    /// A process starts as soon as it can read the objects.
    Start(usize, u32),
    /// A process's watch of a kind delivers its pending versions.
    Watch(usize, u32, usize),
    /// A request arrives at the API server: a write, or without one a read of everything.
    Request(usize, u32, Option<(Purpose, Object)>),
    Response(usize, u32, Option<Purpose>, Response),
    /// A probe of the first machine arrives at the second.
    Probe(usize, usize, Request),
    Answer(usize, Answered),
    Fault(usize, bool),
    /// Pods of a node begin and end connections.
    Traffic(usize),
}

/// An event with its time. The greatest value is processed first: the earliest event, and of simultaneous events the one
/// that was scheduled first.
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
