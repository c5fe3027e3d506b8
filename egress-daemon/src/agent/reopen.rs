//! Reopens connections whose SYN went to a gateway that is no longer used, perhaps because it has failed. TCP retransmits an unanswered SYN
//! only after a second (RFC 6298, section 2). This module makes the pods retransmit as soon as another gateway takes over.
//!
//! In SYN-SENT, a RST whose ACK number acknowledges nothing that was sent is dropped (RFC 9293, section 3.10.7.3). Linux then also treats
//! its SYN as failed and retransmits it two clock ticks later (`tcp_rcv_synsent_state_process`, since 5.10), but only once. So the RST is
//! sent when both directions are likely to work: nodes detect a dead gateway at most one probe interval apart.

use super::Agent;
use aya::Pod;
use egress_common::{
    abi::TICK_SHIFT,
    endpoint::RouteKey,
    flow::{Flow, FlowKey, Reverse, is_pair, kind},
    net, tcp,
};
use egress_core::{encode::transport::mac_bytes, network::MacAddress};
use egress_node::{
    datapath::{
        maps::{FamilyMaps, Maps, MapsError},
        monotonic_ns,
    },
    host::{frames, packet::PacketSocket},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::mpsc::{self, UnboundedReceiver, UnboundedSender},
    task::JoinError,
};

/// The number of scans of the flow table after a change of gateways. A connection that is unanswered in two successive scans is reopened.
const LOOKS: u32 = 4;
/// The time between two scans, in halves of the probe interval.
const HALVES: u32 = 3;
/// The maximum age in ticks of an unanswered SYN. TCP has retransmitted older ones.
const LATELY: i32 = 2;
/// The IP protocol number of TCP.
const TCP: u32 = 6;

/// A connection whose SYN has not been answered yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Unanswered {
    pod: SocketAddr,
    remote: SocketAddr,
    /// The pod's interface on this node.
    interface: u32,
    /// The Ethernet addresses of that interface's two ends, the pod's first.
    macs: [MacAddress; 2],
}

/// The results of the scans so far.
#[derive(Default)]
struct Looks {
    before: BTreeSet<Unanswered>,
    again: BTreeSet<Unanswered>,
}

impl Looks {
    /// Returns the connections to reopen: those that are unanswered `now` and were in the previous scan. Returns each connection only once.
    fn look(&mut self, now: BTreeSet<Unanswered>) -> Vec<Unanswered> {
        let again: Vec<_> = now.intersection(&self.before).filter(|one| !self.again.contains(one)).copied().collect();
        self.again.extend(&again);
        self.before = now;
        again
    }
}

impl Agent {
    /// Starts to look for connections by these egress IPs that must be reopened.
    pub(super) fn open_again(&self, egress_ips: &BTreeSet<IpAddr>) {
        let tables = self.writer.present();
        let known = tables.egress_ips.iter().filter(|(_, e)| egress_ips.contains(&net::from_any(e.addr)));
        // Sending fails if the task has ended because it has no socket.
        let _ = self.reopening.send(known.map(|(index, e)| (*index, e.generation)).collect());
    }
}

/// The generation of each egress IP, by index.
type Indices = BTreeMap<u32, u32>;

/// Starts the task that looks for connections by the egress IPs that it receives. The task ends when the sender is dropped.
pub(super) fn start(maps: Arc<Maps>, probe_interval: Duration) -> UnboundedSender<Indices> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let look = move |indices: Arc<Indices>| {
        let maps = maps.clone();
        tokio::task::spawn_blocking(move || unanswered(&maps, &indices))
    };
    tokio::spawn(async move {
        match PacketSocket::into_pods() {
            Ok(socket) => watch(receiver, probe_interval * HALVES / 2, look, |one| open_again(&socket, one)).await,
            Err(e) => tracing::warn!("connections cannot be reopened: {e}"),
        }
    });
    sender
}

/// Scans the flow table [`LOOKS`] times for each set of egress IPs that arrives. Sets that arrive together share their scans.
async fn watch<F>(
    mut receiver: UnboundedReceiver<Indices>,
    pause: Duration,
    mut look: impl FnMut(Arc<Indices>) -> F,
    again: impl Fn(&Unanswered),
) where
    F: Future<Output = Result<Result<BTreeSet<Unanswered>, MapsError>, JoinError>>,
{
    while let Some(indices) = receiver.recv().await {
        let (mut indices, mut looks, mut left) = (indices, Looks::default(), LOOKS);
        while left > 0 {
            while let Ok(more) = receiver.try_recv() {
                indices.extend(more);
                left = LOOKS;
            }
            match look(Arc::new(indices.clone())).await {
                Ok(Ok(found)) => looks.look(found).iter().for_each(&again),
                Ok(Err(e)) => tracing::warn!("cannot reopen connections: {e}"),
                Err(e) => tracing::error!("a thread of the agent has failed: {e}"),
            }
            left -= 1;
            if left > 0 {
                tokio::time::sleep(pause).await;
            }
        }
        if !looks.again.is_empty() {
            tracing::info!("made pods reopen {} connections whose gateway is no longer used", looks.again.len());
        }
    }
}

fn open_again(socket: &PacketSocket, one: &Unanswered) {
    let [pod, host] = one.macs;
    let sent = frames::useless_reset(one.remote, one.pod, host, pod).map(|frame| socket.send(one.interface, &frame));
    if let Some(Err(e)) = sent {
        tracing::debug!("cannot make {} reopen its connection to {}: {e}", one.pod, one.remote);
    }
}

/// Returns the recent unanswered connections by these egress IPs, which are given by index and generation.
fn unanswered(maps: &Maps, indices: &BTreeMap<u32, u32>) -> Result<BTreeSet<Unanswered>, MapsError> {
    let mut found = BTreeSet::new();
    find(&maps.v4, |a| net::from_v4(a).into(), indices, &mut found)?;
    find(&maps.v6, |a| net::from_v6(a).into(), indices, &mut found)?;
    Ok(found)
}

fn find<A: Pod + Ord>(
    maps: &FamilyMaps<A>,
    ip: impl Fn(A) -> IpAddr,
    indices: &BTreeMap<u32, u32>,
    found: &mut BTreeSet<Unanswered>,
) -> Result<(), MapsError>
where
    FlowKey<A>: Pod + Ord,
    Reverse<A>: Pod,
    RouteKey<A>: Pod + Ord,
{
    let now = (monotonic_ns() >> TICK_SHIFT) as u32;
    for entry in maps.reverse.iter() {
        let (back, reverse) = entry?;
        let is_wanted = indices.get(&reverse.egress) == Some(&reverse.egress_generation);
        // A pod's interface without Ethernet headers cannot be sent a frame.
        if back.proto != TCP || !is_wanted || reverse.state != tcp::seen::CONFIRMED || reverse.pod_mac == [0; 3] {
            continue;
        }
        let key = FlowKey { src: reverse.pod, src_port: reverse.pod_port, ..back };
        let has_opened = |flow: &Flow| {
            // The programs count ticks with another clock, which may be ahead.
            let is_late = now.wrapping_sub(flow.last_seen) as i32 > LATELY;
            let opening = flow.kind == kind::TRANSLATED && flow.state & !tcp::seen::CHANGED == tcp::seen::SYN;
            opening && !is_late && is_pair(&key, flow, &back, &reverse)
        };
        if maps.flows.get(&key)?.as_ref().is_some_and(has_opened) {
            let macs = [reverse.pod_mac, reverse.host_mac].map(|mac| MacAddress(mac_bytes(mac)));
            let at = |a, port: u16| SocketAddr::new(ip(a), u16::from_be(port));
            let (pod, remote) = (at(reverse.pod, reverse.pod_port), at(back.dst, back.dst_port));
            found.insert(Unanswered { pod, remote, interface: reverse.ifindex, macs });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(port: u16) -> Unanswered {
        let (pod, remote) = (SocketAddr::from(([10, 0, 0, 1], port)), SocketAddr::from(([192, 0, 2, 1], 80)));
        Unanswered { pod, remote, interface: 7, macs: [MacAddress([2; 6]), MacAddress([4; 6])] }
    }

    #[tokio::test]
    async fn egress_ips_that_arrive_together_share_their_scans() {
        let (sender, receiver) = mpsc::unbounded_channel();
        for set in [[(1, 1)].into(), [(2, 1)].into(), Indices::from([(1, 2)])] {
            sender.send(set).unwrap();
        }
        drop(sender);
        let (mut seen, again) = (Vec::new(), std::cell::RefCell::new(Vec::new()));
        let look = |indices: Arc<Indices>| {
            seen.push((*indices).clone());
            std::future::ready(Ok(Ok([connection(1)].into())))
        };
        watch(receiver, Duration::ZERO, look, |one| again.borrow_mut().push(*one)).await;
        assert_eq!(seen, vec![Indices::from([(1, 2), (2, 1)]); LOOKS as usize]);
        assert_eq!(again.into_inner(), [connection(1)]);
    }

    #[test]
    fn connection_unanswered_in_two_scans_is_reopened_once() {
        let mut looks = Looks::default();
        let [a, b, c] = [1, 2, 3].map(connection);
        assert_eq!(looks.look([a, b].into()), []);
        assert_eq!(looks.look([a, c].into()), [a], "b was answered, c may be");
        assert_eq!(looks.look([a, c].into()), [c], "a was opened again");
        assert_eq!(looks.look([].into()), []);
    }
}
