//! Counting the ports in use, aside: the tables may hold a million flows.

use super::Agent;
use crate::datapath::maps::{Maps, MapsError};
use egress_common::{
    flow::{Flow, kind},
    net,
};
use egress_core::agent::{
    machine::Counted,
    ports::{Growth, Ports, Used},
};
use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

/// The CPU time of this thread.
fn thread_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

impl Agent {
    /// Begins to count the ports that flows of this node use.
    pub(super) fn begin_count(&mut self, growth: Growth) {
        let (maps, began) = (self.maps.clone(), self.now());
        let tables = self.writer.present();
        let known = tables.egress_ips.iter().map(|(index, e)| (*index, (e.generation, net::from_any(e.addr))));
        let known: BTreeMap<u32, (u32, IpAddr)> = known.collect();
        self.counting.begin(move || {
            let idle = thread_time();
            let ports = count_ports(&maps, &known, &growth);
            let ports = ports.inspect_err(|e| tracing::warn!("cannot count the ports in use: {e}")).ok();
            Counted { ports, began, took: thread_time().saturating_sub(idle) }
        });
    }

    /// Takes over a count.
    pub(super) fn take_count(&mut self, counted: Counted) {
        if let Some(ports) = &counted.ports {
            self.publish.send_modify(|state| Arc::make_mut(state).ports_used = ports.peaks());
        }
        self.machine.handle_ports(counted, self.now());
    }
}

/// A count that came to nothing.
pub(super) fn failed(now: Duration) -> Counted {
    Counted { ports: None, began: now, took: Duration::ZERO }
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
