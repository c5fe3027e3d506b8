//! HTTP for everybody who reaches the port: how much one client, and all together, can hold is bounded.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{
    collections::BTreeMap,
    net::IpAddr,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

/// Connections at once, of all other hosts together, and of this host: the kubelet's probes come from it.
const CONNECTIONS: usize = 256;
/// Connections of one other host. More are closed.
const CONNECTIONS_OF_ONE: usize = 16;
/// How long a connection may take for the head of a request, or wait for one.
const HEAD: Duration = Duration::from_secs(60);
/// How long a connection lasts, since a client may never read what it has asked for. Browsers and Prometheus connect again.
const LIFETIME: Duration = Duration::from_secs(600);
/// How soon connections are accepted again after an error, such as too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves until it is dropped. Errors of single connections are theirs alone.
pub(super) async fn serve(listener: TcpListener, routes: Router) {
    let places = Arc::new(Places::default());
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            sleep(PAUSE).await;
            continue;
        };
        let peer = peer.ip().to_canonical();
        let own = stream.local_addr().is_ok_and(|own| own.ip().to_canonical() == peer);
        if let Some(place) = places.take(peer, own) {
            tokio::spawn(answer(stream, routes.clone(), place));
        }
    }
}

async fn answer(stream: TcpStream, routes: Router, _place: Place) {
    let service = TowerToHyperService::new(routes);
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD);
    let connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    // Too late, or an error of the client: either way the connection ends.
    drop(timeout(LIFETIME, connection).await);
}

/// The connections at present, by the client's address.
#[derive(Debug, Default)]
struct Places(Mutex<BTreeMap<(bool, IpAddr), usize>>);

/// One connection, until it is dropped.
#[derive(Debug)]
struct Place(Arc<Places>, (bool, IpAddr));

impl Places {
    /// A place for a client, if there is one. `own`: it is on this host.
    fn take(self: &Arc<Self>, peer: IpAddr, own: bool) -> Option<Place> {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = places.iter().filter(|((is_own, _), _)| *is_own == own).map(|(_, count)| count).sum();
        let count = places.get(&(own, peer)).copied().unwrap_or_default();
        if all == CONNECTIONS || !own && count == CONNECTIONS_OF_ONE {
            return None;
        }
        places.insert((own, peer), count + 1);
        Some(Place(Arc::clone(self), (own, peer)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        match places.get_mut(&self.1) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(places.remove(&self.1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[test]
    fn one_host_or_all_others_together_do_not_take_the_places_of_this_host() {
        let host = |number: u8| IpAddr::from([10, 0, 0, number]);
        let places = Arc::new(Places::default());
        let mut taken: Vec<Place> = std::iter::from_fn(|| places.take(host(1), false)).collect();
        assert_eq!(taken.len(), CONNECTIONS_OF_ONE);
        for number in 2..=u8::MAX {
            taken.extend(std::iter::from_fn(|| places.take(host(number), false)));
        }
        assert_eq!(taken.len(), CONNECTIONS);
        assert!(places.take(host(0), true).is_some());
        taken.pop();
        assert!(places.take(host(255), false).is_some());
        drop(taken);
        assert_eq!(places.0.lock().unwrap().len(), 0);
    }

    #[tokio::test]
    async fn clients_that_only_connect_do_not_keep_this_hosts_requests_waiting() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, Router::new().route("/healthz", get(async || "ok\n"))));
        // Linux takes the connections of 127.0.0.2 to 127.0.0.1 as those of another host's.
        let mut silent = Vec::new();
        for _ in 0..2 * CONNECTIONS_OF_ONE {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
            silent.push(socket.connect(address).await.unwrap());
        }
        // Those beyond the limit are closed.
        let mut last = silent.pop().unwrap();
        assert_eq!(last.read(&mut [0]).await.unwrap_or_default(), 0);
        let mut own = TcpStream::connect(address).await.unwrap();
        own.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut text = String::new();
        own.read_to_string(&mut text).await.unwrap();
        assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("ok\n"), "{text}");
    }
}
