//! Packet captures: decoded packets that pass an interface, with the queries that tests need.
//!
//! A capture sees packets as an AF_PACKET socket does: packets merged by GRO or GSO in one piece, and sent packets as
//! well as received ones. A capture that lost packets returns an error instead of a result.

mod decode;
mod socket;
mod trace;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};

pub use self::decode::{Arp, Checksum, Content, Inner, Ip, Packet, TcpFlags, TransportLayer};
use self::socket::PacketSocket;
pub use self::trace::Trace;
use crate::background::{Background, Stop, lock};
use crate::netns::NetNs;
use crate::wait::wait_until;

type Packets = Arc<Mutex<Vec<Packet>>>;

/// A capture that runs until it is finished or dropped.
#[derive(Debug)]
pub struct Capture {
    place: String,
    packets: Packets,
    /// Returns the number of packets that the capture lost.
    thread: Background<u64>,
}

impl Capture {
    /// Starts a capture on `interface` of `ns`. It sees every packet that passes after this function has returned.
    pub fn start(ns: &NetNs, interface: &str) -> Result<Capture> {
        let index = ns.ifindex(interface)?;
        Capture::on(ns, interface, index)
    }

    /// Starts a capture on all interfaces of `ns`. It sees a forwarded packet twice.
    pub fn start_everywhere(ns: &NetNs) -> Result<Capture> {
        Capture::on(ns, "all interfaces", 0)
    }

    fn on(ns: &NetNs, interface: &str, index: u32) -> Result<Capture> {
        let place = format!("{} {interface}", ns.name());
        let socket = ns.run(|| PacketSocket::open(index)).with_context(|| format!("cannot capture on {place}"))?;
        let packets = Packets::default();
        let for_thread = Arc::clone(&packets);
        let thread = Background::start(ns, "capture", move |stop| record(&socket, &for_thread, stop))?;
        Ok(Capture { place, packets, thread })
    }

    /// Returns the packets captured so far. Use it only for waiting: it may lag by some milliseconds, and only
    /// [`Capture::finish`] reports lost packets.
    pub fn so_far(&self) -> Trace {
        Trace::new(lock(&self.packets).clone())
    }

    /// Counts the `wanted` packets captured so far. Use it only for waiting: like [`Capture::so_far`], it may lag by some milliseconds.
    pub fn count(&self, wanted: impl Fn(&Packet) -> bool) -> usize {
        lock(&self.packets).iter().filter(|packet| wanted(packet)).count()
    }

    /// Waits until a `wanted` packet has been captured and returns the first one.
    pub fn wait_for(&self, what: &str, timeout: Duration, wanted: impl Fn(&Packet) -> bool) -> Result<Packet> {
        let what = format!("{what} on {}", self.place);
        let first = || Ok(lock(&self.packets).iter().find(|packet| wanted(packet)).cloned());
        wait_until(&what, timeout, first, Option::is_some)?.context("a packet that was seen")
    }

    /// Returns and forgets the packets captured since the beginning or the last call.
    pub fn take(&self) -> Trace {
        Trace::new(std::mem::take(&mut *lock(&self.packets)))
    }

    /// Forgets the packets captured so far.
    pub fn clear(&self) {
        lock(&self.packets).clear();
    }

    /// Ends the capture and returns every packet that had arrived. Fails if the capture lost packets.
    pub fn finish(self) -> Result<Trace> {
        let place = self.place.clone();
        let (trace, dropped) = self.finish_lossy()?;
        if dropped > 0 {
            bail!("the capture on {place} lost {dropped} packets, so the others prove nothing");
        }
        Ok(trace)
    }

    /// Like [`Capture::finish`], but also fails if the capture contains an `unwanted` packet.
    pub fn finish_without(self, what: &str, unwanted: impl Fn(&Packet) -> bool) -> Result<Trace> {
        let place = self.place.clone();
        let trace = self.finish()?;
        let found = trace.filter(unwanted);
        if let [first, ..] = found.packets() {
            bail!("{what} on {place}: {} packets, the first: {first:?}", found.packets().len());
        }
        Ok(trace)
    }

    /// Ends the capture. The second value is the number of packets that it lost.
    pub fn finish_lossy(self) -> Result<(Trace, u64)> {
        let dropped = self.thread.finish().with_context(|| format!("the capture on {}", self.place))?;
        Ok((Trace::new(std::mem::take(&mut *lock(&self.packets))), dropped))
    }
}

fn record(socket: &PacketSocket, packets: &Packets, stop: &Stop) -> Result<u64> {
    let mut buffer = vec![0; socket::LARGEST];
    loop {
        // Read before the socket is drained: the capture includes everything that had arrived when the end was requested.
        let last_round = stop.requested();
        while let Some(frame) = socket.receive(&mut buffer)? {
            let packet = decode::packet(&buffer[..frame.captured], &frame);
            lock(packets).push(packet);
        }
        if last_round {
            return socket.dropped();
        }
        socket.wait(Duration::from_millis(10))?;
    }
}
