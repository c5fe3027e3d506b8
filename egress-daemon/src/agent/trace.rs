//! `egressctl trace`: the programs of a trace replace the usual ones while somebody reads their events.

use axum::{
    Router,
    body::Body,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse as _, Response},
    routing::get,
};
use egress_common::{net, trace::TraceFilter};
use egress_node::datapath::{
    Pins,
    attach::Attacher,
    load::{Programs, Sizes},
    trace::Lines,
};
use futures::{StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::unix::AsyncFd,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    task::spawn_blocking,
    time::timeout,
};

/// A line is sent at least this often. It reveals that a reader has gone, and shows that the agent is alive.
pub const HEARTBEAT: Duration = Duration::from_secs(1);

/// Begins a line with the number of packets seen, whether reported or not.
pub const SEEN: &str = "seen ";

/// What is traced, as in the query of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct TraceQuery {
    /// The pod's interface; 0: not known.
    pub ifindex: u32,
    /// Its IPv4 address.
    pub v4: Option<Ipv4Addr>,
    /// Its IPv6 address.
    pub v6: Option<Ipv6Addr>,
    /// The other end.
    pub to: Option<IpAddr>,
    /// The other end's port.
    pub port: Option<u16>,
}

impl TraceQuery {
    fn filter(&self) -> TraceFilter {
        TraceFilter {
            ifindex: self.ifindex,
            v4: self.v4.map_or([0], net::v4),
            v6: self.v6.map_or([0; 4], net::v6),
            to: self.to.map_or([0; 4], net::any),
            to_port: u32::from(self.port.unwrap_or(0).to_be()),
        }
    }
}

/// A trace that begins or ends, for the task that attaches programs.
pub enum Change {
    /// These programs take the place of the usual ones.
    Begin {
        /// The programs.
        programs: Box<Programs>,
        /// The pod's interface; 0: any.
        pod: u32,
        /// Whether they have.
        done: oneshot::Sender<Result<(), String>>,
    },
    /// The usual ones take their place again.
    End,
}

/// Carries out a change.
pub fn carry_out(change: Change, attacher: &mut Attacher) {
    match change {
        Change::Begin { programs, pod, done } => {
            let known = pod == 0 || attacher.attached().contains_key(&("pod_egress", pod));
            let errors = match known {
                true => attacher.trace(Some((*programs, pod))).iter().map(ToString::to_string).collect(),
                false => vec![format!("interface {pod} belongs to no pod, or has no programs")],
            };
            let result = if errors.is_empty() { Ok(()) } else { Err(errors.join("; ")) };
            // Nobody waits any more: the end of the trace follows.
            let _ = done.send(result);
        }
        Change::End => attacher.trace(None).iter().for_each(|error| tracing::warn!("{error}")),
    }
}

/// Begins traces, one at a time.
#[derive(Clone)]
pub struct Tracer {
    pins: Pins,
    sizes: Sizes,
    changes: mpsc::UnboundedSender<Change>,
    one: Arc<Semaphore>,
}

impl Tracer {
    /// Creates one for the maps with these pins and sizes. Also returns the changes that it wants.
    pub fn new(pins: Pins, sizes: Sizes) -> (Self, mpsc::UnboundedReceiver<Change>) {
        let (changes, receiver) = mpsc::unbounded_channel();
        (Self { pins, sizes, changes, one: Arc::new(Semaphore::new(1)) }, receiver)
    }

    /// `GET /trace`: the lines of a trace.
    pub fn routes(self) -> Router {
        Router::new().route("/trace", get(answer)).with_state(self)
    }

    async fn begin(self, query: TraceQuery) -> Result<Trace, String> {
        let busy = "a trace is already running on this node: only one can run at a time";
        let permit = self.one.try_acquire_owned().map_err(|_| busy.to_owned())?;
        let (pins, sizes, filter) = (self.pins, self.sizes, query.filter());
        let load = move || {
            let mut programs = Programs::load_trace(&pins, sizes, &filter)?;
            Lines::of(&mut programs).map(|lines| (programs, lines))
        };
        let loaded = spawn_blocking(load).await.map_err(|error| error.to_string())?;
        let (programs, lines) = loaded.map_err(|error| error.to_string())?;
        // SAFETY: the ring buffer keeps its descriptor open and the same for as long as it lives.
        let lines = unsafe { AsyncFd::register(lines) }.map_err(|error| error.to_string())?;
        let (done, is_done) = oneshot::channel();
        let ends = Ends { changes: self.changes, _permit: permit };
        let begin = Change::Begin { programs: Box::new(programs), pod: query.ifindex, done };
        let gone = "the agent is ending";
        ends.changes.send(begin).map_err(|_| gone.to_owned())?;
        is_done.await.map_err(|_| gone.to_owned())??;
        Ok(Trace { lines, counted: Instant::now(), _ends: ends })
    }
}

/// A trace under way. Dropping it ends it.
struct Trace {
    lines: AsyncFd<Lines>,
    /// When the number of packets was last reported.
    counted: Instant,
    _ends: Ends,
}

struct Ends {
    changes: mpsc::UnboundedSender<Change>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Ends {
    fn drop(&mut self) {
        // Without the task that attaches there are no programs of a trace.
        let _ = self.changes.send(Change::End);
    }
}

impl Trace {
    /// Returns the reported lines, each ending with a line feed, and from time to time the number of packets.
    async fn next(&mut self) -> io::Result<String> {
        let lines = match timeout(HEARTBEAT, self.lines.readable_mut()).await {
            Ok(guard) => {
                let mut guard = guard?;
                // Before reading: events that arrive meanwhile make it readable again.
                guard.clear_ready();
                guard.get_inner_mut().take()
            }
            Err(_) => self.lines.get_mut().take(),
        };
        let mut text: String = lines.into_iter().map(|line| line + "\n").collect();
        if self.counted.elapsed() >= HEARTBEAT {
            self.counted = Instant::now();
            let seen = self.lines.get_ref().seen().map_err(io::Error::other)?;
            text.push_str(&format!("{SEEN}{seen}\n"));
        }
        Ok(text)
    }
}

async fn answer(State(tracer): State<Tracer>, Query(query): Query<TraceQuery>) -> Response {
    match tracer.begin(query).await {
        Ok(trace) => {
            let next = |mut trace: Trace| async { Some((trace.next().await, trace)) };
            // An empty line: the trace has begun.
            let begun = stream::once(async { Ok("\n".to_owned()) });
            Body::from_stream(begun.chain(stream::unfold(trace, next))).into_response()
        }
        Err(message) => (StatusCode::CONFLICT, message).into_response(),
    }
}
