//! Counts flows and the ports that they use, in the background, because the tables may hold a million flows.

use super::{Agent, tell};
use egress_common::{flow::Flow, net};
use egress_core::agent::{
    machine::Counted,
    ports::{Growth, Ports, Used},
};
use egress_node::datapath::maps::{Maps, MapsError};
use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

/// Returns the CPU time of this thread.
fn thread_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// The result of a count.
pub(super) struct Count {
    /// The machine's part.
    counted: Counted,
    /// The number of flows of each account.
    accounts: BTreeMap<u32, u64>,
}

impl Agent {
    /// Starts to count the ports that flows of this node use.
    pub(super) fn begin_count(&mut self, growth: Growth) {
        let (maps, began) = (self.maps.clone(), self.now());
        let tables = self.writer.present();
        let known = tables.egress_ips.iter().map(|(index, e)| (*index, (e.generation, net::from_any(e.addr))));
        let known: BTreeMap<u32, (u32, IpAddr)> = known.collect();
        self.counting.begin(move || {
            let idle = thread_time();
            let mut accounts = BTreeMap::new();
            let ports = count_ports(&maps, &known, &growth, &mut accounts);
            let ports = ports.inspect_err(|e| tracing::warn!("cannot count the ports in use: {e}")).ok();
            Count { counted: Counted { ports, began, took: thread_time().saturating_sub(idle) }, accounts }
        });
    }

    /// Processes the result of a count.
    pub(super) fn take_count(&mut self, Count { counted, accounts }: Count) {
        let peaks = counted.ports.as_ref().map(Ports::peaks);
        self.machine.handle_ports(counted, self.now());
        if let Some(peaks) = peaks {
            self.account_flows = accounts;
            let (blocks, flows) = (tell::blocks(self), self.account_flows.clone());
            self.publish.send_modify(|state| {
                let state = Arc::make_mut(state);
                (state.ports_used, state.blocks, state.account_flows) = (peaks, blocks, flows);
            });
        }
    }
}

/// Returns the result of a failed count.
pub(super) fn failed(now: Duration) -> Count {
    Count { counted: Counted { ports: None, began: now, took: Duration::ZERO }, accounts: BTreeMap::new() }
}

/// Counts the ports that flows in the maps use with the egress IPs in `known`, by index and generation. Adds the number of each account's
/// flows to `accounts`.
fn count_ports(
    maps: &Maps,
    known: &BTreeMap<u32, (u32, IpAddr)>,
    growth: &Growth,
    accounts: &mut BTreeMap<u32, u64>,
) -> Result<Ports, MapsError> {
    let egress = |flow: &Flow| {
        let (generation, address) = known.get(&flow.egress)?;
        (*generation == flow.egress_generation).then_some(*address)
    };
    let used = |flow: &Flow, pod: IpAddr, remote: IpAddr, port: u16, proto: u32| {
        let remote = (remote, u16::from_be(port), proto);
        let used = egress(flow).map(|egress| Used { pod, egress, remote, port: u16::from_be(flow.port) });
        used.map(|used| (used, u32::from(flow.account)))
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
    let all = all.flatten().map(|(used, account)| {
        *accounts.entry(account).or_default() += 1;
        used
    });
    let ports = Ports::count(all, growth);
    failed.map_or(Ok(ports), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_common::{port_block, verdict::Counter};
    use egress_node::datapath::testing::{
        frames::{TCP, ip, ports, seal, tcp},
        rig::*,
    };

    const SYN: u8 = 2;
    const ACK: u8 = 16;

    /// Blocks that no flow uses are given back, and another node takes their ports.
    #[test]
    fn a_severed_flow_holds_its_port_block() {
        let Some(mut rig) = Rig::new("severed-ports", &scene()) else { return };
        let mut without = scene();
        without.policies.values_mut().for_each(|policy| policy.slots.clear());
        for [pod, server, egress] in [[POD4, SERVER4, EGRESS4], [POD6, SERVER6, EGRESS6]].map(|all| all.map(addr)) {
            rig.write(&scene());
            let segment = |flags: u8| seal(ip(pod, server, TCP, &[], &tcp(40_000, 443, flags, &[])));
            let (verdict, sent) = rig.run("pod_egress", &segment(SYN));
            assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
            rig.write(&without);
            rig.dropped("pod_egress", &segment(ACK), Counter::DropSevered);
            let known = rig.writer.present().egress_ips.iter();
            let known: BTreeMap<u32, (u32, IpAddr)> =
                known.map(|(index, e)| (*index, (e.generation, net::from_any(e.addr)))).collect();
            let counted = count_ports(rig.writer.maps(), &known, &Growth::default(), &mut BTreeMap::new()).unwrap();
            let block = port_block::of_port(ports(&sent).0).unwrap();
            assert_eq!(counted.flows(egress, block), 1, "{egress}");
        }
    }
}
