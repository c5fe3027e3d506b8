//! `egressctl serve`: a page that shows current flows, from pods through egress IPs and gateways to destinations.
//!
//! One static page, fed by server-sent events. It changes nothing and is meant for local users. By default it listens on the loopback
//! interface. It answers only requests whose `Host` is an address or `localhost`, so that no web site can read it under the site's own
//! name (DNS rebinding).

pub mod cluster;

use crate::ctl::{
    self, NodeAccess, Output, Top,
    explain::{Destination, Question},
    views::By,
};
use anyhow::{Context as _, Result};
use axum::{
    Router,
    extract::{Query, Request, State},
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{
        Html, IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
    routing::get,
};
use futures::{Stream, StreamExt as _, stream};
use serde::Deserialize;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    thread,
    time::Duration,
};
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
};

const PAGE: &str = include_str!("page.html");
/// The page loads nothing from other origins, and must not be framed.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'";
/// The default address of the page.
pub const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8475);
/// The maximum number of paths of one node.
pub const PATHS: usize = 200;
/// The maximum number of concurrent viewers of a page. Each has a copy of its data.
const VIEWERS: usize = 16;
/// The time between two samples.
pub const INTERVAL: Duration = Duration::from_secs(2);

/// The last output of `egressctl top --by path -o json` of each node, by the node's name.
#[derive(Clone, Debug)]
pub struct Feed(watch::Sender<BTreeMap<String, Value>>);

impl Default for Feed {
    fn default() -> Self {
        Self(watch::Sender::new(BTreeMap::new()))
    }
}

impl Feed {
    /// Takes a line of `egressctl top -o json`. `node` is the node's name unless the line has one. Ignores lines that are not JSON.
    pub fn take(&self, node: &str, line: &str) {
        let Ok(view) = serde_json::from_str::<Value>(line) else { return };
        let name = view["node"].as_str().unwrap_or(node).to_owned();
        self.0.send_modify(|nodes| drop(nodes.insert(name, view)));
    }

    /// Removes a node.
    pub fn forget(&self, node: &str) {
        self.0.send_if_modified(|nodes| nodes.remove(node).is_some());
    }
}

/// A click on a path.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Click {
    /// The node of the pod.
    pub node: String,
    /// The pod: `namespace/name` or an address.
    pub pod: String,
    /// The destination, as for `egressctl explain --to`.
    pub to: String,
    /// The policy, if the path has one.
    pub policy: Option<String>,
    /// The egress IP, if the path has one.
    pub egress_ip: Option<String>,
}

/// Explains a click in sentences. It may take long.
pub type Explain = Arc<dyn Fn(&Click) -> Result<String> + Send + Sync>;

/// Serves the page until the process ends, and prints its address to stderr. Blocks.
pub fn serve(listen: SocketAddr, feed: &Feed, explain: Explain) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let told = feed.0.subscribe();
    runtime.block_on(async {
        let listener = TcpListener::bind(listen).await.with_context(|| format!("--listen {listen}"))?;
        eprintln!("egressctl: open http://{}/ (Ctrl-C ends)", listener.local_addr()?);
        Ok(axum::serve(listener, routes(told, explain)).await?)
    })
}

fn routes(told: Told, explain: Explain) -> Router {
    let headers = [(header::CONTENT_SECURITY_POLICY, POLICY), (header::CACHE_CONTROL, "no-store")];
    let page = Router::new().route("/", get(move || async move { (headers, Html(PAGE)) }));
    let viewers = Arc::new(Semaphore::new(VIEWERS));
    let events = Router::new().route("/events", get(events)).with_state((told, viewers));
    let explained = Router::new().route("/explain", get(explained)).with_state(explain);
    page.merge(events).merge(explained).layer(middleware::from_fn(check_host))
}

/// A viewer's receiver of the nodes' views.
type Told = watch::Receiver<BTreeMap<String, Value>>;

async fn events(State((told, viewers)): State<(Told, Arc<Semaphore>)>) -> Response {
    let Ok(viewer) = viewers.try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, format!("this page already has {VIEWERS} viewers: close one\n"))
            .into_response();
    };
    let headers = [(header::CACHE_CONTROL, "no-store")];
    (headers, Sse::new(changes(told, viewer)).keep_alive(KeepAlive::default())).into_response()
}

/// Streams the current state, and then each change.
fn changes(mut told: Told, viewer: OwnedSemaphorePermit) -> impl Stream<Item = Result<Event, Infallible>> {
    told.mark_changed();
    let next = |(mut told, viewer): (Told, OwnedSemaphorePermit)| async {
        told.changed().await.ok()?;
        let nodes = serde_json::to_string(&*told.borrow_and_update()).unwrap_or_default();
        Some((nodes, (told, viewer)))
    };
    stream::unfold((told, viewer), next).map(|nodes| Ok(Event::default().data(nodes)))
}

async fn explained(State(explain): State<Explain>, Query(click): Query<Click>) -> (StatusCode, String) {
    let answer = tokio::task::spawn_blocking(move || explain(&click)).await.map_err(anyhow::Error::from).flatten();
    match answer {
        Ok(text) => (StatusCode::OK, text),
        Err(error) => (StatusCode::BAD_GATEWAY, ctl::message(&error)),
    }
}

async fn check_host(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if is_local_name(host) {
        next.run(request).await
    } else {
        (StatusCode::FORBIDDEN, "open this page with an IP address or as localhost\n").into_response()
    }
}

/// Returns whether a `Host` is an address or `localhost`, with or without a port.
fn is_local_name(host: &str) -> bool {
    let name = host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok()).map_or(host, |(name, _)| name);
    host.parse::<SocketAddr>().is_ok() || name.parse::<IpAddr>().is_ok() || name.eq_ignore_ascii_case("localhost")
}

/// Serves the flows of this node.
pub fn serve_node(listen: SocketAddr, access: &NodeAccess) -> Result<()> {
    let feed = Feed::default();
    let (looking, at) = (feed.clone(), access.clone());
    let look = move |times: Option<u64>| {
        let top = Top { by: By::Path, limit: PATHS, interval: INTERVAL, times };
        ctl::top(&top, &at, Output::Json, |line| {
            looking.take("", line);
            Ok(())
        })
    };
    // A node without maps has nothing to show, so the user gets the error immediately.
    look(Some(1))?;
    thread::Builder::new().name("look".into()).spawn(move || {
        loop {
            let ended = look(None);
            tracing::debug!("looking again: {ended:?}");
            thread::sleep(INTERVAL);
        }
    })?;
    let access = access.clone();
    let explain = move |click: &Click| {
        let to: Destination = click.to.parse()?;
        let question = Question::new(&click.pod, to, None);
        Ok(ctl::run(&ctl::Command::Explain(question), &access, Output::Table)?.text)
    };
    serve(listen, &feed, Arc::new(explain))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use serde_json::json;
    use tower::ServiceExt as _;

    fn page(feed: &Feed) -> Router {
        let explain = |click: &Click| match click.pod.as_str() {
            "gone" => anyhow::bail!("there is no pod {}", click.pod),
            pod => Ok(format!("{pod} on {} goes to {}", click.node, click.to)),
        };
        routes(feed.0.subscribe(), Arc::new(explain))
    }

    async fn ask(page: &Router, path: &str, host: &str) -> Response {
        let request = Request::get(path).header(header::HOST, host).body(Body::empty()).unwrap();
        page.clone().oneshot(request).await.unwrap()
    }

    async fn text(response: Response) -> String {
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn only_hosts_that_are_addresses_or_localhost_are_answered() {
        let page = page(&Feed::default());
        for (host, code) in [
            ("127.0.0.1:8080", 200),
            ("[::1]:8080", 200),
            ("localhost:8080", 200),
            ("192.0.2.7", 200),
            ("rebound.example:8080", 403),
            ("localhost.example", 403),
            ("", 403),
        ] {
            assert_eq!(ask(&page, "/", host).await.status().as_u16(), code, "{host}");
        }
    }

    #[tokio::test]
    async fn a_click_is_explained() {
        let page = page(&Feed::default());
        let good = ask(&page, "/explain?node=n1&pod=prod/web&to=203.0.113.7:443/tcp", "127.0.0.1").await;
        assert_eq!(text(good).await, "prod/web on n1 goes to 203.0.113.7:443/tcp");
        let bad = ask(&page, "/explain?node=n1&pod=gone&to=x", "127.0.0.1").await;
        assert_eq!(bad.status(), StatusCode::BAD_GATEWAY);
        assert_eq!(text(bad).await, "there is no pod gone");
    }

    #[tokio::test]
    async fn viewer_receives_the_current_state_and_then_changes() {
        let feed = Feed::default();
        feed.take("n1", &json!({"node": "n1", "flows": 1}).to_string());
        feed.take("n1", "no JSON");
        let response = ask(&page(&feed), "/events", "localhost").await;
        let mut chunks = response.into_body().into_data_stream();
        let mut next = async || {
            let chunk = chunks.next().await.unwrap().unwrap();
            let text = String::from_utf8(chunk.to_vec()).unwrap();
            serde_json::from_str::<Value>(text.trim().strip_prefix("data: ").unwrap()).unwrap()
        };
        assert_eq!(next().await, json!({"n1": {"node": "n1", "flows": 1}}));
        feed.take("n2", "{\"flows\": 2}");
        assert_eq!(next().await, json!({"n1": {"node": "n1", "flows": 1}, "n2": {"flows": 2}}));
        feed.forget("n1");
        assert_eq!(next().await, json!({"n2": {"flows": 2}}));
    }

    #[tokio::test]
    async fn number_of_concurrent_viewers_is_limited() {
        let page = page(&Feed::default());
        let mut watching = Vec::new();
        for _ in 0..VIEWERS {
            watching.push(ask(&page, "/events", "localhost").await);
        }
        assert!(watching.iter().all(|response| response.status() == StatusCode::OK));
        assert_eq!(ask(&page, "/events", "localhost").await.status(), StatusCode::SERVICE_UNAVAILABLE);
        watching.pop();
        assert_eq!(ask(&page, "/events", "localhost").await.status(), StatusCode::OK);
    }
}
