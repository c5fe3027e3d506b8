//! An HTTP server for untrusted clients. The number of connections is bounded, and a new connection is always answered.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{collections::BTreeMap, net::IpAddr, pin::pin, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    task::AbortHandle,
    time::{sleep, timeout},
};

/// The maximum number of concurrent connections.
const CONNECTIONS: usize = 256;
/// The timeout for the head of a request, including the wait for the request.
const HEAD: Duration = Duration::from_secs(60);
/// The maximum lifetime of a connection, since a client may never read its response. Browsers and Prometheus reconnect.
const LIFETIME: Duration = Duration::from_secs(600);
/// The pause after a failed accept, for example because of too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves until it is dropped. An error of one connection does not affect others.
pub(super) async fn serve(listener: TcpListener, routes: Router) {
    let mut present = Connections::default();
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            sleep(PAUSE).await;
            continue;
        };
        let task = tokio::spawn(answer(stream, routes.clone()));
        present.add(peer.ip().to_canonical(), task.abort_handle());
    }
}

async fn answer(stream: TcpStream, routes: Router) {
    let service = TowerToHyperService::new(routes);
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD);
    let connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    // The connection ends after its lifetime and after an error alike.
    drop(timeout(LIFETIME, connection).await);
}

/// The current connections with their clients' addresses, oldest first.
#[derive(Debug, Default)]
struct Connections(Vec<(IpAddr, AbortHandle)>);

impl Connections {
    /// Adds a connection. If there are too many, closes the oldest connection of the client with the most. Thus a pod that opens many
    /// connections to block the kubelet's probes loses its own. The new connection counts, so no client with one loses it to one with more.
    fn add(&mut self, peer: IpAddr, task: AbortHandle) {
        self.0.retain(|(_, task)| !task.is_finished());
        self.0.push((peer, task));
        if self.0.len() <= CONNECTIONS {
            return;
        }
        let mut counts = BTreeMap::<IpAddr, usize>::new();
        for (peer, _) in &self.0 {
            *counts.entry(*peer).or_default() += 1;
        }
        let most = counts.values().max();
        if let Some(oldest) = self.0.iter().position(|(peer, _)| counts.get(peer) == most) {
            self.0.remove(oldest).1.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::net::SocketAddr;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpSocket,
    };

    async fn start() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, Router::new().route("/healthz", get(async || "ok\n"))));
        address
    }

    /// Connects from 127.0.0.`host`.
    async fn connect(host: u8, to: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, host], 0).into()).unwrap();
        socket.connect(to).await.unwrap()
    }

    async fn ask(mut client: TcpStream) -> String {
        client.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn new_client_is_answered_despite_idle_connections_of_others() {
        let address = start().await;
        let mut idle = Vec::new();
        for number in 0..CONNECTIONS + 16 {
            idle.push(connect(2 + (number % 4) as u8, address).await);
            if number + 1 >= CONNECTIONS {
                let text = ask(connect(1, address).await).await;
                assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("ok\n"), "{number}: {text}");
            }
        }
        // The oldest connection was closed.
        assert_eq!(idle[0].read(&mut [0]).await.unwrap_or_default(), 0);
    }

    #[tokio::test]
    async fn client_with_many_connections_loses_only_its_own() {
        let address = start().await;
        let lone = connect(2, address).await;
        let mut many = Vec::new();
        for _ in 0..CONNECTIONS + 16 {
            many.push(connect(3, address).await);
        }
        assert_eq!(many[0].read(&mut [0]).await.unwrap_or_default(), 0);
        assert!(ask(lone).await.ends_with("ok\n"));
        assert!(ask(many.pop().unwrap()).await.ends_with("ok\n"));
    }
}
