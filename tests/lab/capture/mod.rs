//! Packet captures: what passes an interface, decoded, with the queries that tests need.
//!
//! A capture sees packets as an AF_PACKET socket does: merged ones (GRO, GSO) in one piece, and those that this host sends
//! as well as those that it receives. A capture that lost packets returns an error instead of an answer.

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
    /// Its result is how many packets were lost on the way into it.
    thread: Background<u64>,
}

impl Capture {
    /// Captures on `interface` of `ns`, from the moment this returns on.
    pub fn start(ns: &NetNs, interface: &str) -> Result<Capture> {
        let index = ns.ifindex(interface)?;
        Capture::on(ns, interface, index)
    }

    /// Captures on all interfaces of `ns`. A forwarded packet is seen twice.
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

    /// What was captured so far. Use it for waiting: it may be some milliseconds behind, and only [`Capture::finish`] reports whether
    /// something was missed.
    pub fn so_far(&self) -> Trace {
        Trace::new(lock(&self.packets).clone())
    }

    /// How many packets captured so far are `wanted`. Use it for waiting, like [`Capture::so_far`]; it may be some milliseconds behind.
    pub fn count(&self, wanted: impl Fn(&Packet) -> bool) -> usize {
        lock(&self.packets).iter().filter(|packet| wanted(packet)).count()
    }

    /// Waits until a packet that is `wanted` was captured, and returns the first.
    pub fn wait_for(&self, what: &str, timeout: Duration, wanted: impl Fn(&Packet) -> bool) -> Result<Packet> {
        let what = format!("{what} on {}", self.place);
        let first = || Ok(lock(&self.packets).iter().find(|packet| wanted(packet)).cloned());
        wait_until(&what, timeout, first, Option::is_some)?.context("a packet that was seen")
    }

    /// What was captured since the beginning or the last call, and forgets it.
    pub fn take(&self) -> Trace {
        Trace::new(std::mem::take(&mut *lock(&self.packets)))
    }

    /// Forgets what was captured so far.
    pub fn clear(&self) {
        lock(&self.packets).clear();
    }

    /// Ends the capture, with everything that had arrived, and fails if packets were lost on the way into it.
    pub fn finish(self) -> Result<Trace> {
        let place = self.place.clone();
        let (trace, dropped) = self.finish_lossy()?;
        if dropped > 0 {
            bail!("the capture on {place} lost {dropped} packets, so nothing follows from the others");
        }
        Ok(trace)
    }

    /// [`Capture::finish`], which also fails if a packet was captured that must not be there: the verdict on what must not happen.
    pub fn finish_without(self, what: &str, unwanted: impl Fn(&Packet) -> bool) -> Result<Trace> {
        let place = self.place.clone();
        let trace = self.finish()?;
        let found = trace.filter(unwanted);
        if let [first, ..] = found.packets() {
            bail!("{what} on {place}: {} packets, the first one of them: {first:?}", found.packets().len());
        }
        Ok(trace)
    }

    /// Ends the capture; the second value is how many packets were lost on the way into it.
    pub fn finish_lossy(self) -> Result<(Trace, u64)> {
        let dropped = self.thread.finish().with_context(|| format!("the capture on {}", self.place))?;
        Ok((Trace::new(std::mem::take(&mut *lock(&self.packets))), dropped))
    }
}

fn record(socket: &PacketSocket, packets: &Packets, stop: &Stop) -> Result<u64> {
    let mut buffer = vec![0; socket::LARGEST];
    loop {
        // Read before the socket is drained: what had arrived when the end was requested is part of the capture.
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
