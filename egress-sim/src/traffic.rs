//! Simulates connections of pods, reduced to the ports that they use.

use super::{cluster::SimCluster, events::SimEvent};
use egress_common::port_block;
use egress_core::agent::ports::Used;

impl SimCluster {
    /// Ends and begins connections of a node's pods, each with a port of a usable block, and schedules the next call.
    pub fn traffic(&mut self, n: usize) {
        let delay = self.rng.ms(500, 2000);
        self.after(delay, SimEvent::Traffic(n));
        let rng = &mut self.rng;
        let kernel = &mut self.machines[n].kernel;
        // Usually few connections end, so most are long.
        let ends = if rng.chance(200) { rng.below(1000) } else { rng.below(50) };
        kernel.flows.retain(|_| !rng.chance(ends));
        let Some(tables) = &kernel.tables else { return };
        for (egress, entry) in &tables.egress {
            let many = if kernel.flows.len() < 1000 && rng.chance(200) { 200 } else { 8 };
            for _ in 0..rng.below(many) {
                let Some(block) = entry.blocks.get(rng.index(entry.blocks.len())) else { continue };
                let port = port_block::first_port(*block) + rng.below(port_block::SIZE.into()) as u16;
                let remote = ([203, 0, 113, 1].into(), 80 + rng.below(2) as u16, 6);
                kernel.flows.push(Used { pod: [10, 0, 0, 1].into(), egress: *egress, remote, port });
            }
        }
    }
}
