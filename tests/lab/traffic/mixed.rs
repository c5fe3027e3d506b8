//! The load during a failure: streams, datagrams and new connections, in both families.

use std::time::Duration;

use anyhow::Result;

use super::{
    ConnectRate, ConnectionReport, RateReport, RunningRate, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients,
    UdpFlowReport, UdpOptions, UdpServer, syns_retransmitted,
};
use crate::netns::NetNs;
use crate::topology::{Family, Server};

const STREAMS: u16 = 80;
const NEW: u16 = 81;
const DATAGRAMS: u16 = 82;
/// For each pod and family.
const STREAM_COUNT: usize = 50;
const DATAGRAM_FLOWS: usize = 4;
const NEW_PER_SECOND: u32 = 50;
/// More than the connections opened while a SYN is retransmitted for seconds.
const NEW_AT_ONCE: usize = 1000;
const GIVE_UP: Duration = Duration::from_secs(5);

/// The load of some pods towards one server. Two pods have 200 streams, 16 flows with one datagram every 5 ms each, and
/// 200 new connections per second.
#[derive(Debug)]
pub struct Mixed {
    pods: Vec<NetNs>,
    streams: TcpServer,
    clients: Vec<TcpClients>,
    questions: Vec<UdpClients>,
    rates: Vec<RunningRate>,
    _servers: (TcpServer, UdpServer),
}

/// The longest pauses, including current ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pauses {
    /// The longest time between two answers to the datagrams of a flow.
    pub datagrams: Duration,
    /// The longest time between two arrivals on a stream, at either end.
    pub streams: Duration,
}

impl Mixed {
    /// Starts the load and waits until all of it makes progress.
    pub fn start(pods: &[NetNs], server: &Server, patience: Duration) -> Result<Mixed> {
        let streams = TcpServer::start(&server.ns, &server.ips.both(STREAMS), ServerMode::Stream)?;
        let echo = TcpServer::start(&server.ns, &server.ips.both(NEW), ServerMode::Echo)?;
        let udp = UdpServer::start(&server.ns, &server.ips.both(DATAGRAMS))?;
        let (mut clients, mut questions, mut rates) = (Vec::new(), Vec::new(), Vec::new());
        let rate = ConnectRate {
            per_second: NEW_PER_SECOND,
            concurrency: NEW_AT_ONCE,
            timeout: GIVE_UP,
            ..ConnectRate::default()
        };
        let each = UdpOptions { interval: Duration::from_millis(5), ..UdpOptions::default() };
        for pod in pods {
            for family in Family::BOTH {
                let at = |port| server.ips.at(family, port);
                clients.push(TcpClients::establish(pod, at(STREAMS), STREAM_COUNT, TcpOptions::default())?);
                questions.push(UdpClients::start(pod, at(DATAGRAMS), DATAGRAM_FLOWS, each.clone())?);
                rates.push(rate.start(pod, at(NEW))?);
            }
        }
        let load = Mixed { pods: pods.to_vec(), streams, clients, questions, rates, _servers: (echo, udp) };
        load.wait_progress(patience)?;
        Ok(load)
    }

    /// Returns the namespaces of the pods that it comes from.
    pub fn pods(&self) -> &[NetNs] {
        &self.pods
    }

    /// Restarts the measurement of pauses.
    pub fn reset_pauses(&self) {
        self.streams.reset_pauses();
        self.clients.iter().for_each(|clients| clients.reset_pauses());
        self.questions.iter().for_each(UdpClients::reset_pauses);
    }

    /// Waits until all of it makes progress.
    pub fn wait_progress(&self, patience: Duration) -> Result<()> {
        self.streams.wait_progress(3, patience)?;
        self.clients.iter().try_for_each(|clients| clients.wait_progress(3, patience))?;
        self.questions.iter().try_for_each(|questions| questions.wait_progress(3, patience))
    }

    /// Returns the longest pauses.
    pub fn pauses(&self) -> Pauses {
        let clients = self.clients.iter().flat_map(|clients| clients.connections());
        let streams = clients.chain(self.streams.connections()).map(|one| one.pause());
        let datagrams = self.questions.iter().flat_map(UdpClients::flows).map(|flow| flow.pause());
        Pauses { datagrams: datagrams.max().unwrap_or_default(), streams: streams.max().unwrap_or_default() }
    }

    /// Waits until each datagram so far is answered. Fails if one was lost.
    pub fn all_answered(&self) -> Result<()> {
        self.questions.iter().try_for_each(|questions| questions.all_answered().map(drop))
    }

    /// Returns the number of SYNs that the pods have retransmitted so far.
    pub fn syns_retransmitted(&self) -> Result<u64> {
        self.pods.iter().map(syns_retransmitted).sum()
    }

    /// Returns the number of streams that are closed, corrupt or without an arrival for `silent`, and of such datagram flows.
    pub fn broken(&self, silent: Duration) -> [usize; 2] {
        let stream = |one: &ConnectionReport| !one.intact() || one.last_arrival.elapsed() > silent;
        let flow = |one: &UdpFlowReport| one.last_arrival.elapsed() > silent;
        let streams = self.clients.iter().flat_map(|clients| clients.connections()).filter(stream).count();
        [streams, self.questions.iter().flat_map(UdpClients::flows).filter(flow).count()]
    }

    /// Ends the load. Returns the results of the new connections of each pod and family, and of all streams.
    pub fn finish(self) -> Result<(Vec<RateReport>, Vec<ConnectionReport>)> {
        let rates = self.rates.into_iter().map(RunningRate::finish).collect::<Result<_>>()?;
        let streams = self.clients.into_iter().map(TcpClients::close).collect::<Result<Vec<_>>>()?;
        Ok((rates, streams.concat()))
    }
}
