//! Foreign programs at this node's interfaces.
//!
//! A packet into a pod passes `pod_ingress`, at the egress hook of the pod's interface, with two exceptions: a program at an ingress hook
//! may redirect it to the interface's peer (`bpf_redirect_peer`), and an XDP program may hand it to the device. Every other way to forward
//! (routes, bridges, flowtables, Open vSwitch, a filter's `mirred`, `bpf_redirect`) ends in `dev_queue_xmit`, which runs that hook.

use super::{
    filters::filters,
    rtnetlink::{Extent, ask},
    tcx,
};
use aya::programs::{TcAttachType, loaded_programs};
use rtnetlink::packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkExtentMask, LinkMessage, LinkXdp},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
};

/// How a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum How {
    /// By TCX.
    Tcx,
    /// As a filter, or as the action of a filter.
    Filter,
    /// At the device's driver.
    Xdp,
}

/// A program that is not ours.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stranger {
    /// The interface's name.
    pub interface: String,
    /// Whether it sees packets that leave through the interface, not packets that come in.
    pub egress: bool,
    /// How it is attached.
    pub how: How,
    /// The kernel's id of the program; none for the action of a filter.
    pub program: Option<u32>,
    /// Its name, if the hook reports it.
    pub name: Option<String>,
}

impl Stranger {
    /// Returns its name, or its id if neither the hook nor the kernel reports the name.
    pub fn program(&self) -> String {
        let loaded = || {
            let found = loaded_programs().filter_map(Result::ok).find(|program| Some(program.id()) == self.program)?;
            found.name_as_str().map(str::to_owned)
        };
        let number = || self.program.map_or("without a name".to_owned(), |id| format!("number {id}"));
        self.name.clone().or_else(loaded).filter(|name| !name.is_empty()).unwrap_or_else(number)
    }

    /// Returns the hook, for display: `ingress (tcx)`.
    pub fn hook(&self) -> &'static str {
        match (self.how, self.egress) {
            (How::Tcx, false) => "ingress (tcx)",
            (How::Tcx, true) => "egress (tcx)",
            (How::Filter, false) => "ingress (clsact)",
            (How::Filter, true) => "egress (clsact)",
            (How::Xdp, _) => "ingress (xdp)",
        }
    }
}

impl fmt::Display for Stranger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "program {} at {} {}", self.program(), self.interface, self.hook())
    }
}

/// Returns the programs in one direction of an interface that are not among `ours`.
pub fn at(index: u32, interface: &str, egress: bool, ours: &BTreeSet<u32>) -> io::Result<Vec<Stranger>> {
    let direction = if egress { TcAttachType::Egress } else { TcAttachType::Ingress };
    let stranger = |how, program, name| Stranger { interface: interface.to_owned(), egress, how, program, name };
    let tcx = there(tcx::programs(index, direction))?.into_iter().map(|id| stranger(How::Tcx, Some(id), None));
    let filters = there(filters(interface, direction))?.into_iter();
    let filters = filters.filter(|filter| filter.program.is_some() || filter.acts_by_program);
    let filters = filters.map(|filter| stranger(How::Filter, filter.program, filter.name));
    let xdp = if egress { Vec::new() } else { there(xdp(index))? };
    let xdp = xdp.into_iter().map(|id| stranger(How::Xdp, Some(id), None));
    let all = tcx.chain(filters).chain(xdp);
    Ok(all.filter(|one| one.program.is_none_or(|id| !ours.contains(&id))).collect())
}

/// Returns the XDP program at an interface that is not among `ours`.
pub fn xdp_at(index: u32, interface: &str, ours: &BTreeSet<u32>) -> io::Result<Option<Stranger>> {
    let stranger =
        |id| Stranger { interface: interface.to_owned(), egress: false, how: How::Xdp, program: Some(id), name: None };
    Ok(there(xdp(index))?.into_iter().find(|id| !ours.contains(id)).map(stranger))
}

/// Treats an interface that is gone, or a kind of hook that this kernel lacks, as one without programs.
fn there<T>(found: io::Result<Vec<T>>) -> io::Result<Vec<T>> {
    match found {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ENOENT | libc::EINVAL)) => Ok(Vec::new()),
        found => found,
    }
}

/// Returns the XDP programs of a link.
pub(super) fn xdp(index: u32) -> io::Result<Vec<u32>> {
    let mut question = LinkMessage::default();
    question.header.index = index;
    question.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    let mut programs = BTreeSet::new();
    for answer in ask(RouteNetlinkMessage::GetLink(question), Extent::One)? {
        let RouteNetlinkMessage::NewLink(link) = answer else { continue };
        let attributes = link.attributes.iter().filter_map(|attribute| match attribute {
            LinkAttribute::Xdp(xdp) => Some(xdp),
            _ => None,
        });
        programs.extend(attributes.flatten().filter_map(|attribute| match attribute {
            LinkXdp::ProgId(id) | LinkXdp::DrvProgId(id) | LinkXdp::SkbProgId(id) | LinkXdp::HwProgId(id) => Some(*id),
            _ => None,
        }));
    }
    Ok(programs.into_iter().filter(|id| *id != 0).collect())
}

/// The programs found at an interface, or the reason why they are unknown.
type Found = Result<Vec<Stranger>, String>;

/// Looks for programs that may bring packets into a pod past `pod_ingress`.
#[derive(Default)]
pub struct Lookout {
    seen: BTreeMap<(u32, String), Found>,
    /// The first finding, and its text: finding a program's name takes a walk over all programs.
    first: Option<(Result<Stranger, String>, String)>,
}

impl Lookout {
    /// Searches the interfaces (names by index) that are new since the last call, or all of them. Returns the first program that may bring
    /// packets into a pod past `pod_ingress`, for display. An interface that cannot be searched counts as well: connections must not break
    /// because its programs are unknown.
    pub fn look(&mut self, interfaces: &BTreeMap<u32, String>, ours: &BTreeSet<u32>, all: bool) -> Option<&str> {
        self.seen.retain(|(index, name), _| interfaces.get(index) == Some(name));
        for (index, name) in interfaces {
            let place = (*index, name.clone());
            if all || !self.seen.contains_key(&place) {
                let found =
                    at(*index, name, false, ours).map_err(|e| format!("the programs at {name} cannot be listed: {e}"));
                self.seen.insert(place, found);
            }
        }
        let first = self.seen.values().find_map(|found| match found {
            Ok(strangers) => strangers.first().cloned().map(Ok),
            Err(error) => Some(Err(error.clone())),
        });
        if first != self.first.as_ref().map(|(known, _)| known.clone()) {
            self.first = first.map(|one| {
                let words = one.as_ref().map_or_else(Clone::clone, ToString::to_string);
                (one, words)
            });
        }
        self.first.as_ref().map(|(_, words)| words.as_str())
    }
}
