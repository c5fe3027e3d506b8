//! Starts, ends and thaws processes.

use super::{
    api::{Client, KINDS},
    boss::Boss,
    cluster::{Process, SimCluster},
    events::SimEvent,
    machine::{Hands, SimAgent, while_waiting},
};
use std::time::Duration;

/// The greatest age of the objects that a starting process lists, in ms.
const STALE: u64 = 1000;

impl SimCluster {
    /// Starts a process, or retries later if it cannot read the objects.
    pub fn start(&mut self, process: usize) {
        let (now, incarnation) = (self.now, self.processes[process].incarnation);
        if !self.is_online(process) {
            if let Some(machine) = self.machines.get_mut(process) {
                while_waiting(&mut machine.kernel, now, self.times.deadline);
            }
            return self.after(Duration::from_millis(200), SimEvent::Start(process, incarnation));
        }
        let late = if self.rng.chance(300) { self.rng.ms(0, STALE) } else { Duration::ZERO };
        let client = match self.machines.get(process) {
            Some(machine) if self.selective => Client::list_for_agent(&self.server, late, machine.name.as_str()),
            _ => Client::list(&self.server, late),
        };
        self.processes[process].told = [false; KINDS];
        let nodes = self.machines.len();
        let times = self.times;
        match self.machines.get_mut(process) {
            Some(machine) => {
                let (connected, reader) = (machine.uplink_faults == 0, &mut self.reader);
                let mut effects = Vec::new();
                let hands = &mut Hands { now, kernel: &mut machine.kernel, connected, reader, effects: &mut effects };
                machine.agent = Some(SimAgent::start(machine.name.clone(), times, client, hands));
                self.carry_out(process, effects);
            }
            None => {
                let identity = format!("controller{}-{incarnation}", process - nodes);
                self.bosses[process - nodes] = Some(Boss::start(identity, client, times, now));
            }
        }
        // The watches continue from the listed versions.
        self.resume_watches(process);
        self.act(process, |agent, hands| agent.turn(hands));
    }

    /// Ends a process, and starts it again after `after`.
    pub fn restart(&mut self, process: usize, after: Duration) {
        self.kill(process);
        let incarnation = self.processes[process].incarnation;
        self.after(after, SimEvent::Start(process, incarnation));
    }

    /// Ends a process.
    pub fn kill(&mut self, process: usize) {
        let Process { incarnation, wake, backlog, .. } = &mut self.processes[process];
        *incarnation += 1;
        *wake = None;
        backlog.clear();
        let nodes = self.machines.len();
        match self.machines.get_mut(process) {
            Some(machine) => machine.agent = None,
            None => self.bosses[process - nodes] = None,
        }
    }

    /// Resumes a frozen process. It handles answers to probes first, then all other events that came meanwhile.
    pub fn thaw(&mut self, process: usize) {
        let backlog = std::mem::take(&mut self.processes[process].backlog);
        let (answers, rest): (Vec<SimEvent>, Vec<SimEvent>) =
            backlog.into_iter().partition(|event| matches!(event, SimEvent::Answer(..)));
        for event in answers.into_iter().chain(rest) {
            self.at(self.now, event);
        }
        self.processes[process].wake = Some(self.now);
        let incarnation = self.processes[process].incarnation;
        self.at(self.now, SimEvent::Wake(process, incarnation));
    }
}
