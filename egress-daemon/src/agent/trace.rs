//! `egressctl trace`: replaces the usual programs with those of a trace while a client reads their events.

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

/// The interval at which a line is sent at the latest. Sending detects that a reader has gone, and shows that the agent is alive.
pub const HEARTBEAT: Duration = Duration::from_secs(1);

/// The prefix of a line with the number of packets seen, whether reported or not.
pub const SEEN: &str = "seen ";

/// The packets to trace, as in the query of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct TraceQuery {
    /// The index of the pod's interface; 0 if not known.
    pub ifindex: u32,
    /// The pod's IPv4 address.
    pub v4: Option<Ipv4Addr>,
    /// The pod's IPv6 address.
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
    /// Replaces the usual programs.
    Begin {
        /// The trace's programs.
        programs: Box<Programs>,
        /// The index of the pod's interface; 0 for any.
        pod: u32,
        /// Receives the result.
        done: oneshot::Sender<Result<(), String>>,
    },
    /// Restores the usual programs.
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
            // This fails if the client has gone. The end of the trace then follows.
            let _ = done.send(result);
        }
        Change::End => attacher.trace(None).iter().for_each(|error| tracing::warn!("{error}")),
    }
}

/// Starts traces, one at a time.
#[derive(Clone)]
pub struct Tracer {
    pins: Pins,
    sizes: Sizes,
    changes: mpsc::UnboundedSender<Change>,
    one: Arc<Semaphore>,
}

impl Tracer {
    /// Creates a tracer for the maps with these pins and sizes. Also returns the receiver of its changes.
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

/// A running trace. Dropping it ends the trace.
struct Trace {
    lines: AsyncFd<Lines>,
    /// The time at which the number of packets was last reported.
    counted: Instant,
    _ends: Ends,
}

struct Ends {
    changes: mpsc::UnboundedSender<Change>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Ends {
    fn drop(&mut self) {
        // This fails only if the task that attaches programs has ended. A trace's programs have then ended, too.
        let _ = self.changes.send(Change::End);
    }
}

impl Trace {
    /// Returns the reported lines, each with a line feed, and every [`HEARTBEAT`] the number of packets.
    async fn next(&mut self) -> io::Result<String> {
        let lines = match timeout(HEARTBEAT, self.lines.readable_mut()).await {
            Ok(guard) => {
                let mut guard = guard?;
                // Clear before reading, so that events that arrive meanwhile make it readable again.
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
            // An empty line tells the client that the trace has begun.
            let begun = stream::once(async { Ok("\n".to_owned()) });
            Body::from_stream(begun.chain(stream::unfold(trace, next))).into_response()
        }
        Err(message) => (StatusCode::CONFLICT, message).into_response(),
    }
}
