//! `egressctl whois`: finds the user of a port of an egress IP at a given time. The node comes from the lease log; the pod comes from
//! the flow log, or from the live flows of this node.

mod logs;
mod server;
#[cfg(test)]
mod tests;
mod time;
mod view;

pub use server::Server;
pub use time::{Moment, moment};
pub use view::WhoisView;
use view::whois;

use super::dump::{Dump, FlowEntry};
use super::{NodeAccess, check_node};
use crate::flowlog::{self, Instant};
use anyhow::{Result, bail};
use egress_core::leaselog::{LeaseAnswer, LeaseEvent, LeaseQuestion, LeaseRecord, answer, together};
use egress_node::datapath::Pins;
use flowlog::flows::{self, Likely};
use logs::Logs;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// The tolerance for clock differences between nodes, and for the delay in logging a lease, in microseconds.
const SLACK: i64 = 2_000_000;

/// The question.
#[derive(Clone, Debug)]
pub struct WhoisOptions {
    /// The source address and port that were observed: an egress IP and its port.
    pub seen: SocketAddr,
    /// The time; `None` for now.
    pub at: Option<Moment>,
    /// The server that saw it.
    pub to: Option<Server>,
    /// The directory of both logs, of one log, or of several agents' directories; `None` for this node's logs.
    pub log: Option<PathBuf>,
    /// The agent's pins, and the name that this node must have.
    pub access: NodeAccess,
}

/// The live flows of a node, and the time when they were read.
pub(super) struct Living<'a> {
    pub(super) dump: &'a Dump,
    pub(super) now: Instant,
}

/// Answers a question.
pub fn ask(options: &WhoisOptions) -> Result<WhoisView> {
    let now = flowlog::now();
    let at = options.at.unwrap_or(Moment { from: now, until: now });
    if at.from > now + SLACK {
        bail!("{} is in the future: name a time in the past", time::text(at.from));
    }
    let logs = match &options.log {
        Some(directory) => Logs::below(directory)?,
        None => Logs::of(&options.access.bpffs),
    };
    let egress_ip = options.seen.ip().to_canonical();
    let port = options.seen.port();
    let question = LeaseQuestion { egress_ip, port, from: at.from, until: at.until, slack: SLACK };
    let dump = Dump::read(&Pins::new(&options.access.bpffs), true).ok();
    check_node(&options.access, dump.as_ref().and_then(Dump::own_name))?;
    let mut leases = Vec::new();
    for log in &logs.leases {
        leases.push(answer(&flowlog::read(log, about(egress_ip))?, question));
    }
    let leases = together(leases);
    let recorded = recorded(&logs, question, dump.is_some() && options.log.is_none());
    if leases.is_none() && recorded.is_none() && dump.is_none() {
        bail!(
            "there is no log of leases or flows in {}, and no agent has run with the pins in {}: ask on a gateway or on the node of the pod, or name a copy of a log with --log",
            logs.directory.display(),
            options.access.bpffs.display()
        );
    }
    let living = dump.as_ref().map(|dump| Living { dump, now });
    Ok(whois(options.seen, at, options.to, Known { leases, recorded, living: living.as_ref() }))
}

/// The information about a port from each source; `None` for a missing source.
#[derive(Default)]
pub(super) struct Known<'a> {
    /// The answer from leases.
    pub(super) leases: Option<LeaseAnswer>,
    /// The answer from recorded flows.
    pub(super) recorded: Option<Recorded>,
    /// The live flows of this node.
    pub(super) living: Option<&'a Living<'a>>,
}

/// Recorded flows, and the reasons why there may be others.
#[derive(Clone, Debug, Default)]
pub(super) struct Recorded {
    pub(super) likely: Vec<Likely>,
    pub(super) doubts: Vec<flows::Doubt>,
}

/// Searches the flow logs of one or several nodes.
fn recorded(logs: &Logs, question: LeaseQuestion, living: bool) -> Option<Recorded> {
    let wanted = flows::Wanted {
        egress_ip: question.egress_ip,
        port: question.port,
        from: question.from - question.slack - flows::TICK,
        until: question.until + question.slack,
    };
    let mut all = Vec::new();
    for log in &logs.flows {
        let (likely, doubts) = match flows::read(log, &wanted) {
            Ok(found) => flows::answer(found, question, living),
            Err(error) => (Vec::new(), vec![flows::Doubt::Unread(error.to_string())]),
        };
        all.push(Recorded { likely, doubts });
    }
    // If one node certainly had the port, no other node had it.
    if all.iter().any(|one| one.likely.iter().any(|likely| likely.surely)) {
        all.retain(|one| !one.likely.is_empty());
    }
    let together = |mut all: Recorded, one: Recorded| {
        all.likely.extend(one.likely);
        all.doubts.extend(one.doubts);
        all
    };
    all.into_iter().reduce(together)
}

/// Returns a filter for the records that matter for an egress IP: its own leases, and records that show when the log was written.
fn about(address: IpAddr) -> impl Fn(&LeaseRecord) -> bool {
    move |record| match &record.event {
        LeaseEvent::Held(lease) | LeaseEvent::Granted(lease) | LeaseEvent::Returned(lease) => {
            lease.egress_ip == address
        }
        _ => true,
    }
}

/// Returns the translated flows of a dump that the outside sees as `seen`, and that were or may have been live at a time.
pub(super) fn seen_as<'a>(
    living: &Living<'a>,
    seen: SocketAddr,
    to: Option<Server>,
    at: Moment,
) -> Vec<(&'a FlowEntry, Instant)> {
    let dump = living.dump;
    let is_meant = |flow: &&FlowEntry| {
        let egress = dump.egress_ip(flow.flow.egress).filter(|(_, e)| e.generation == flow.flow.egress_generation);
        flow.translated()
            && flow.port() == seen.port()
            && egress.is_some_and(|(address, _)| address == seen.ip().to_canonical())
            && to
                .is_none_or(|to| to.is_of(flow.proto) && to.address() == SocketAddr::new(flow.remote, flow.remote_port))
    };
    let began = |flow: &FlowEntry| living.now - dump.seconds_since(flow.flow.created) as i64 * 1_000_000;
    let flows = dump.flows.iter().filter(is_meant).map(|flow| (flow, began(flow)));
    flows.filter(|(_, began)| *began <= at.until + SLACK).collect()
}

/// Returns whether the leases prove that exactly this node, or no node, had the port.
fn is_sure(answer: &LeaseAnswer) -> bool {
    answer.doubts.is_empty()
}
