//! Applies faults to the cluster.

use super::{
    api::Object,
    boss::Squeeze,
    cluster::SimCluster,
    faults::{Fault, Planned},
    machine::Kernel,
};
use k8s_openapi::api::core::v1::NodeSpec;
use std::{sync::Arc, time::Duration};

impl SimCluster {
    /// Begins or ends a planned fault.
    pub fn fault(&mut self, number: usize, begins: bool) {
        let Planned { fault, .. } = self.faults[number].clone();
        self.say(format_args!("{} {fault:?}", if begins { "begins:" } else { "ends:  " }));
        let count = |faults: &mut u32| if begins { *faults += 1 } else { *faults -= 1 };
        match &fault {
            Fault::Power(n) if begins => {
                self.kill(*n);
                self.machines[*n].kernel = Kernel::default();
                self.machines[*n].powered = false;
            }
            Fault::Power(n) => {
                self.machines[*n].powered = true;
                self.restart(*n, Duration::from_secs(1));
            }
            Fault::Agent { node, stopped } if begins => {
                if *stopped && self.processes[*node].frozen == 0 {
                    self.act(*node, |agent, hands| agent.stop(hands));
                }
                self.kill(*node);
            }
            Fault::Agent { node, .. } => {
                if self.machines[*node].powered {
                    self.restart(*node, Duration::from_millis(300));
                }
            }
            Fault::Controller(n) => {
                let process = self.machines.len() + n;
                match begins {
                    true => self.kill(process),
                    false => self.restart(process, Duration::from_millis(500)),
                }
            }
            Fault::Frozen(process) => {
                count(&mut self.processes[*process].frozen);
                if self.processes[*process].frozen == 0 {
                    self.thaw(*process);
                }
            }
            Fault::Uplink(n) => {
                count(&mut self.machines[*n].uplink_faults);
                if self.processes[*n].frozen == 0 {
                    self.act(*n, |agent, hands| agent.turn(hands));
                }
            }
            Fault::Underlay { of, out, back } => {
                for a in of.iter().copied() {
                    for b in (0..self.machines.len()).filter(|b| !of.contains(b)) {
                        [(*out, (a, b)), (*back, (b, a))].into_iter().filter(|(cut, _)| *cut).for_each(|(_, way)| {
                            count(self.cuts.entry(way).or_default());
                        });
                    }
                }
            }
            Fault::Link { ends: [a, b], both } => {
                count(self.cuts.entry((*a, *b)).or_default());
                if *both {
                    count(self.cuts.entry((*b, *a)).or_default());
                }
            }
            Fault::Offline(process) => {
                count(&mut self.processes[*process].api_faults);
                if self.is_online(*process) {
                    self.resume_watches(*process);
                }
            }
            Fault::ApiServer => {
                count(&mut self.api_faults);
                for process in 0..self.processes.len() {
                    if self.is_online(process) {
                        self.resume_watches(process);
                    }
                }
            }
            Fault::Cordon(n) => self.cordon(*n, begins),
            Fault::Weather { loss, delay } => {
                (self.loss, self.delay) = if begins { (*loss, *delay) } else { (0, 1) };
            }
            Fault::Slow { request, watch } => {
                (self.request_delay, self.watch_delay) = if begins { (*request, *watch) } else { (5, 20) };
            }
            Fault::Squeeze(share) => self.squeeze = Squeeze(begins.then_some(*share)),
        }
    }

    fn cordon(&mut self, n: usize, cordoned: bool) {
        let name = self.machines[n].name.clone();
        let node = self.server.all().find_map(|object| match object {
            Object::Node(node) if node.metadata.name.as_deref() == Some(name.as_str()) => Some(node.clone()),
            _ => None,
        });
        let Some(mut node) = node else { return };
        let spec = Arc::make_mut(&mut node).spec.get_or_insert_with(NodeSpec::default);
        spec.unschedulable = Some(cordoned);
        if self.server.write(Object::Node(node)).is_some() {
            self.notify_watches(0);
        }
    }
}
