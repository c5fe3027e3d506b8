//! Follows the links, addresses and default routes of this network namespace, and publishes each state as a [`LinkTable`].
//!
//! Applies the kernel's reports (netlink multicast) one by one. Reads everything again when reports were lost (the socket's buffer overran,
//! the connection broke), and also at long intervals.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use futures::channel::mpsc::UnboundedReceiver;
use futures::{FutureExt, StreamExt, TryStreamExt};
use nix::sys::socket::{setsockopt, sockopt};
use rtnetlink::packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::address::AddressMessage;
use rtnetlink::packet_route::link::{LinkAttribute, LinkExtentMask, LinkMessage};
use rtnetlink::packet_route::route::RouteMessage;
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::{AsyncSocket, Socket, SocketAddr};
use rtnetlink::{Handle, MulticastGroup};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use super::decode;
pub use egress_core::network::links::{DefaultRoute, Link, LinkKind, LinkTable};
use egress_core::network::links::{LinkChange, LinkState, Stale};

const GROUPS: [MulticastGroup; 5] = [
    MulticastGroup::Link,
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv6Ifaddr,
    MulticastGroup::Ipv4Route,
    MulticastGroup::Ipv6Route,
];

/// The number of attempts at a dump that the kernel flags as interrupted. After that the reports that interrupted it, which are applied on
/// top of it, must suffice.
const DUMP_ATTEMPTS: usize = 5;

/// The ifindex of the loopback device, which every namespace has.
const LOOPBACK: u32 = 1;

/// The pause before another netlink socket is opened after one failed.
const RECONNECT_AFTER: Duration = Duration::from_millis(500);

/// Why the state of the network could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LinksError {
    /// The netlink socket could not be opened.
    #[error("cannot open a route netlink socket: {0}; the agent needs AF_NETLINK, which a seccomp profile may forbid")]
    Open(#[source] io::Error),
    /// A request failed.
    #[error("cannot read {what} through netlink: {message}")]
    Read {
        /// The requested objects.
        what: &'static str,
        /// The kernel's answer.
        message: String,
    },
}

/// Options for following the network.
#[derive(Clone, Copy, Debug)]
pub struct LinksOptions {
    /// The interval at which everything is read again, whatever was reported.
    pub resync: Duration,
    /// The size of the socket's buffer for reports, in bytes.
    pub receive_buffer: usize,
}

impl Default for LinksOptions {
    fn default() -> Self {
        LinksOptions { resync: Duration::from_secs(60), receive_buffer: 4 << 20 }
    }
}

/// Follows the network until it is dropped.
#[derive(Debug)]
pub struct Links {
    table: watch::Receiver<Arc<LinkTable>>,
    _task: JoinSet<()>,
}

impl Links {
    /// Starts to follow. The table is complete when this returns.
    pub async fn follow(options: LinksOptions) -> Result<Links, LinksError> {
        let mut follower = Follower::open(options)?;
        follower.resync().await?;
        let (publish, table) = watch::channel(Arc::new(follower.state.table()));
        let mut task = JoinSet::new();
        task.spawn(run(follower, options, publish));
        Ok(Links { table, _task: task })
    }

    /// Returns the present state.
    pub fn current(&self) -> Arc<LinkTable> {
        self.table.borrow().clone()
    }

    /// Returns whether the present state has every existing link, with its current name, kind and peer namespace: reports take time. False
    /// if the links cannot be read.
    pub async fn is_up_to_date(&self, handle: &Handle) -> bool {
        let now: Result<Vec<LinkMessage>, _> = handle.link().get().execute().try_collect().await;
        let known = self.current();
        let same = |link: Link| {
            let known = known.links.get(&link.index);
            known.is_some_and(|known| {
                (&known.name, &known.kind, known.peer_netns) == (&link.name, &link.kind, link.peer_netns)
            })
        };
        now.is_ok_and(|now| now.iter().filter_map(decode::link).all(same))
    }

    /// Returns a channel that holds the present state and wakes up with each different one. It closes when `self` is dropped.
    pub fn subscribe(&self) -> watch::Receiver<Arc<LinkTable>> {
        self.table.clone()
    }
}

type Reports = UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>;

/// One pair of netlink sockets and the state read through them.
struct Follower {
    reports: Reports,
    requests: Handle,
    state: LinkState,
    _connections: JoinSet<()>,
}

impl Follower {
    fn open(options: LinksOptions) -> Result<Follower, LinksError> {
        // Reports have their own socket, so that they are not taken for answers, and no answers are lost with them.
        let (mut listening, _, reports) = rtnetlink::new_multicast_connection(&GROUPS).map_err(LinksError::Open)?;
        set_receive_buffer(listening.socket_mut().socket_ref(), options.receive_buffer).map_err(LinksError::Open)?;
        let (mut asking, requests, _) = rtnetlink::new_connection().map_err(LinksError::Open)?;
        // The last message of a dump says whether the dump was interrupted.
        asking.set_forward_done(true);
        let mut connections = JoinSet::new();
        connections.spawn(listening);
        connections.spawn(asking);
        Ok(Follower { reports, requests, state: LinkState::default(), _connections: connections })
    }

    /// Applies a report and all reports queued after it, so that a burst is published as one state.
    fn apply_all(&mut self, first: NetlinkMessage<RouteNetlinkMessage>, stale: &mut Stale) {
        let mut next = Some(first);
        while let Some(message) = next {
            if let Some(change) = decode::change(&message) {
                self.state.apply(change, stale);
            }
            next = self.reports.next().now_or_never().flatten().map(|(message, _)| message);
        }
    }

    /// Reads everything. The socket for reports is already open, so nothing is missed in between.
    async fn resync(&mut self) -> Result<(), LinksError> {
        let mut state = self.state.anew();
        let mut ignored = Stale::default();
        let link = |message| match message {
            RouteNetlinkMessage::NewLink(message) => decode::link(&message).map(LinkChange::Link),
            _ => None,
        };
        let address = |message| match message {
            RouteNetlinkMessage::NewAddress(message) => match decode::address(&message)? {
                (index, net, true) => Some(LinkChange::Address(index, net)),
                _ => None,
            },
            _ => None,
        };
        let mut all = self.dump("links", RouteNetlinkMessage::GetLink(link_request(0)), link).await?;
        let addresses = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        all.extend(self.dump("addresses", addresses, address).await?);
        all.into_iter().for_each(|change| state.apply(change, &mut ignored));
        self.state = state;
        self.read_routes().await
    }

    async fn read_routes(&mut self) -> Result<(), LinksError> {
        let (mut routes, mut hosts) = (BTreeSet::new(), BTreeMap::new());
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut request = RouteMessage::default();
            request.header.address_family = family;
            // Of up to a million routes, few are of interest.
            let route = |message| {
                let RouteNetlinkMessage::NewRoute(message) = message else { return None };
                let (defaults, host) = (decode::default_routes(&message), decode::host_route(&message));
                (!defaults.is_empty() || host.is_some()).then_some((defaults, host))
            };
            for (defaults, host) in self.dump("routes", RouteNetlinkMessage::GetRoute(request), route).await? {
                routes.extend(defaults);
                hosts.extend(host);
            }
        }
        self.state.default_routes = routes;
        self.state.host_routes = hosts;
        Ok(())
    }

    async fn read_link(&mut self, index: u32) -> Result<(), LinksError> {
        let mut request = NetlinkMessage::from(RouteNetlinkMessage::GetLink(link_request(index)));
        request.header.flags = NLM_F_REQUEST;
        let mut answers = self.requests.request(request).map_err(|error| failed("a link", error))?;
        let change = match answers.next().await.map(|answer| answer.payload) {
            Some(NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(message))) => {
                decode::link(&message).map(LinkChange::Link)
            }
            Some(NetlinkPayload::Error(error)) if error.raw_code() == -libc::ENODEV => {
                Some(LinkChange::LinkGone(index))
            }
            Some(NetlinkPayload::Error(error)) => return Err(failed("a link", error)),
            Some(_) => None,
            None => return Err(failed("a link", "the connection closed")),
        };
        if let Some(change) = change {
            self.state.apply(change, &mut Stale::default());
        }
        Ok(())
    }

    /// Requests all objects of one kind. Keeps only the result of `take` for each message in memory.
    async fn dump<T>(
        &mut self,
        what: &'static str,
        request: RouteNetlinkMessage,
        take: impl Fn(RouteNetlinkMessage) -> Option<T>,
    ) -> Result<Vec<T>, LinksError> {
        let mut found = Vec::new();
        for _ in 0..DUMP_ATTEMPTS {
            found.clear();
            let mut request = NetlinkMessage::from(request.clone());
            request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
            let mut answers = self.requests.request(request).map_err(|error| failed(what, error))?;
            let mut disturbed = false;
            let mut complete = false;
            while let Some(answer) = answers.next().await {
                disturbed |= answer.header.flags & NLM_F_DUMP_INTR != 0;
                match answer.payload {
                    NetlinkPayload::InnerMessage(message) => found.extend(take(message)),
                    NetlinkPayload::Done(_) => complete = true,
                    NetlinkPayload::Error(error) => return Err(failed(what, error)),
                    _ => {}
                }
            }
            if !complete {
                return Err(failed(what, "the connection closed"));
            }
            if !disturbed {
                break;
            }
        }
        Ok(found)
    }

    /// Rereads the parts that the changes left unknown. Another report may make a part unknown once more; that report has its own round.
    async fn settle(&mut self, stale: &Stale) -> Result<(), LinksError> {
        if stale.all {
            return self.resync().await;
        }
        for &index in &stale.links {
            self.read_link(index).await?;
        }
        if stale.routes {
            // The kernel reports the removal of an address before it drops the routes that depend on it. A dump of
            // routes does not wait for that, but reading a single link does.
            self.read_link(LOOPBACK).await?;
            self.read_routes().await?;
        }
        Ok(())
    }
}

/// Sets the size beyond `net.core.rmem_max` if the process has the permission, and otherwise up to that limit.
fn set_receive_buffer(socket: &Socket, bytes: usize) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as the socket is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(socket.as_raw_fd()) };
    setsockopt(&fd, sockopt::RcvBufForce, &bytes)
        .or_else(|_| setsockopt(&fd, sockopt::RcvBuf, &bytes))
        .map_err(io::Error::from)
}

fn failed(what: &'static str, error: impl ToString) -> LinksError {
    LinksError::Read { what, message: error.to_string() }
}

fn link_request(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    message
}

/// Publishes each state until the task is aborted.
async fn run(mut follower: Follower, options: LinksOptions, publish: watch::Sender<Arc<LinkTable>>) {
    let mut backstop = tokio::time::interval_at(Instant::now() + options.resync, options.resync);
    backstop.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut stale = Stale::default();
    let mut broken = false;
    loop {
        tokio::select! {
            report = follower.reports.next(), if !broken => match report {
                Some((message, _)) => follower.apply_all(message, &mut stale),
                None => broken = true,
            },
            _ = backstop.tick() => stale.all = true,
            () = tokio::time::sleep(RECONNECT_AFTER), if broken => match Follower::open(options) {
                Ok(fresh) => {
                    follower = Follower { state: follower.state, ..fresh };
                    broken = false;
                    stale.all = true;
                }
                Err(error) => tracing::error!(%error, "cannot follow links and addresses; retrying"),
            },
        }
        if broken {
            continue;
        }
        if let Err(error) = follower.settle(&stale).await {
            tracing::error!(%error, "keeping the last known links and addresses; reconnecting");
            broken = true;
            continue;
        }
        stale = Stale::default();
        let table = follower.state.table();
        publish.send_if_modified(|published| {
            let different = **published != table;
            if different {
                *published = Arc::new(table);
            }
            different
        });
    }
}

#[cfg(test)]
#[path = "links_tests.rs"]
mod tests;
