//! Counting the ports in use, aside: the tables may hold a million flows.

use super::Agent;
use crate::datapath::maps::{Maps, MapsError};
use egress_common::{
    flow::{Flow, kind},
    net,
    verdict::Counter,
};
use egress_core::agent::demand::{Growth, Ports, Used};
use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

/// The least time between two counts of the ports in use.
const COUNT_EVERY: Duration = Duration::from_secs(2);
/// A count may take one part in so many of the time.
const COUNT_SHARE: u32 = 20;
/// The same when ports are getting scarce.
const AT_ONCE_EVERY: Duration = Duration::from_millis(100);
/// The same when ports are getting scarce.
const AT_ONCE_SHARE: u32 = 4;

/// When a count began, and the CPU time that it took. On a busy node it waits for its turn, and what waits costs nobody anything.
pub(super) struct Counting {
    began: Duration,
    took: Duration,
}

/// The CPU time of this thread.
fn thread_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

impl Agent {
    /// Begins to count the ports that flows of this node use.
    pub(super) fn begin_count(&mut self) {
        let (maps, began) = (self.maps.clone(), self.start.elapsed());
        let tables = self.writer.present();
        let known = tables.egress_ips.iter().map(|(index, e)| (*index, (e.generation, net::from_any(e.addr))));
        let known: BTreeMap<u32, (u32, IpAddr)> = known.collect();
        let growth = self.past.growth(began);
        self.counting.begin(move || {
            let idle = thread_time();
            (count_ports(&maps, &known, &growth), Counting { began, took: thread_time().saturating_sub(idle) })
        });
    }

    /// Whether new flows have found ports taken since this was asked last.
    pub(super) fn are_ports_tight(&mut self) -> bool {
        let tight = self.maps.counter(Counter::PortsTight).unwrap_or(self.tight);
        std::mem::replace(&mut self.tight, tight) != tight
    }

    /// Takes over a count. Whether the tables have to be written again.
    pub(super) fn take_count(&mut self, ports: Result<Ports, MapsError>, Counting { began, took }: Counting) -> bool {
        self.next_count = self.start + began + COUNT_EVERY.max(took * COUNT_SHARE);
        self.at_once = self.start + began + AT_ONCE_EVERY.max(took * AT_ONCE_SHARE);
        match ports {
            Ok(ports) => {
                self.status_due |= ports != self.ports;
                self.publish.send_modify(|state| Arc::make_mut(state).ports_used = ports.peaks());
                self.past.note(began, &ports);
                self.ports = ports;
                self.counted = Some(began);
                self.decide_blocks()
            }
            Err(e) => {
                tracing::warn!("ports in use are not counted: {e}");
                false
            }
        }
    }
}

/// The ports that the flows in the maps use, of the egress IPs that are known by index with their generations.
fn count_ports(maps: &Maps, known: &BTreeMap<u32, (u32, IpAddr)>, growth: &Growth) -> Result<Ports, MapsError> {
    let egress = |flow: &Flow| {
        let (generation, address) = known.get(&flow.egress).filter(|_| flow.kind == kind::TRANSLATED)?;
        (*generation == flow.egress_generation).then_some(*address)
    };
    let used = |flow: &Flow, pod: IpAddr, remote: IpAddr, port: u16, proto: u32| {
        let remote = (remote, u16::from_be(port), proto);
        egress(flow).map(|egress| Used { pod, egress, remote, port: u16::from_be(flow.port) })
    };
    let v4 = maps.v4.flows.iter().map(|entry| {
        entry.map(|(key, flow)| {
            used(&flow, net::from_v4(key.src).into(), net::from_v4(key.dst).into(), key.dst_port, key.proto)
        })
    });
    let v6 = maps.v6.flows.iter().map(|entry| {
        entry.map(|(key, flow)| {
            used(&flow, net::from_v6(key.src).into(), net::from_v6(key.dst).into(), key.dst_port, key.proto)
        })
    });
    let mut failed = None;
    let all = v4.chain(v6).map_while(|used| used.map_err(|e| failed = Some(e)).ok());
    let ports = Ports::count(all.flatten(), growth);
    failed.map_or(Ok(ports), Err)
}
