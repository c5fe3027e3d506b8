//! Long-lived connections on which both ends send continuously, and the outcome of each.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::Result;
use lab::NetNs;
use lab::traffic::{ConnectionReport, ServerMode, TcpClients, TcpOptions, TcpServer};

const PATIENCE: Duration = Duration::from_secs(20);

/// The connections of all pods, and the server's ends.
pub struct Streams {
    groups: Vec<TcpClients>,
    server: TcpServer,
}

/// One connection as both ends know it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stream {
    /// Its source address at the server; `None` if the server does not know it.
    pub source: Option<IpAddr>,
    /// Whether both ends are open and every byte was right.
    pub intact: bool,
    /// The longest time in which nothing arrived at one of the ends.
    pub pause: Duration,
}

impl Streams {
    /// Opens `per_pod` connections from each pod to the server in `ns`, each pod to the address listed with it.
    pub fn open(ns: &NetNs, pods: &[(NetNs, SocketAddr)], per_pod: usize) -> Result<Streams> {
        let options = || TcpOptions { interval: Duration::from_millis(50), ..TcpOptions::default() };
        let addresses: BTreeSet<SocketAddr> = pods.iter().map(|(_, address)| *address).collect();
        let addresses: Vec<SocketAddr> = addresses.into_iter().collect();
        let end = TcpServer::start_with(ns, &addresses, ServerMode::Stream, options())?;
        let open = |(ns, address): &(NetNs, SocketAddr)| TcpClients::establish(ns, *address, per_pod, options());
        let streams = Streams { groups: pods.iter().map(open).collect::<Result<_>>()?, server: end };
        streams.wait_progress(3)?;
        Ok(streams)
    }

    /// Waits until every open connection has received this many additional records at both ends.
    pub fn wait_progress(&self, records: u64) -> Result<()> {
        self.groups.iter().try_for_each(|group| group.wait_progress(records, PATIENCE))?;
        self.server.wait_progress(records, PATIENCE)
    }

    /// Restarts the measurement of pauses.
    pub fn reset_pauses(&self) {
        self.groups.iter().for_each(|clients| clients.reset_pauses());
        self.server.reset_pauses();
    }

    /// Returns the outcome of each connection.
    pub fn all(&self) -> Vec<Stream> {
        let clients: Vec<ConnectionReport> = self.groups.iter().flat_map(|clients| clients.connections()).collect();
        join(&clients, &self.server.connections())
    }
}

fn join(clients: &[ConnectionReport], servers: &[ConnectionReport]) -> Vec<Stream> {
    let by_id: BTreeMap<u64, &ConnectionReport> = servers.iter().map(|one| (one.id, one)).collect();
    let stream = |client: &ConnectionReport| {
        let server = by_id.get(&client.id);
        Stream {
            source: server.map(|server| server.peer.ip()),
            intact: client.intact() && server.is_some_and(|server| server.intact()),
            pause: server.map_or(Duration::ZERO, |server| server.pause()).max(client.pause()),
        }
    };
    clients.iter().map(stream).collect()
}

/// Returns the number of intact connections.
pub fn intact(streams: &[Stream]) -> usize {
    streams.iter().filter(|stream| stream.intact).count()
}

/// Returns the longest pause among the connections whose source is `wanted`.
pub fn longest_pause(streams: &[Stream], wanted: impl Fn(IpAddr) -> bool) -> Duration {
    let chosen = streams.iter().filter(|stream| stream.source.is_some_and(&wanted));
    chosen.map(|stream| stream.pause).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lab::traffic::ConnectionState;
    use std::time::Instant;

    fn report(id: u64, last: u8, wrong: u64, pause: u64) -> ConnectionReport {
        ConnectionReport {
            id,
            local: ([10, 0, 0, 1], 1).into(),
            peer: ([192, 0, 2, last], 2).into(),
            state: ConnectionState::Open,
            connect_time: Duration::ZERO,
            sent: 0,
            received: 0,
            wrong,
            stalls: 0,
            longest_pause: Duration::from_secs(pause),
            last_arrival: Instant::now(),
        }
    }

    #[test]
    fn streams_combine_the_reports_of_both_ends() {
        let streams = join(
            &[report(1, 1, 0, 1), report(2, 1, 0, 5), report(3, 1, 0, 0)],
            &[report(2, 11, 1, 2), report(1, 10, 0, 3)],
        );
        assert_eq!(intact(&streams), 1);
        let facts: Vec<_> = streams.iter().map(|one| (one.source.is_some(), one.pause.as_secs())).collect();
        assert_eq!(facts, [(true, 3), (true, 5), (false, 0)]);
        assert_eq!(longest_pause(&streams, |source| source == IpAddr::from([192, 0, 2, 10])).as_secs(), 3);
    }
}
