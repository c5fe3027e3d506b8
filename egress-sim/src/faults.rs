//! The faults of a run, drawn from a seed.

use super::rng::Rng;
use std::time::Duration;

#[derive(Clone, Debug)]
pub enum Fault {
    /// A machine loses power, and afterwards boots with empty maps.
    Power(usize),
    /// An agent is killed or stopped, and starts again afterwards.
    Agent { node: usize, stopped: bool },
    /// A process is frozen.
    Frozen(usize),
    /// A controller is killed, and starts again afterwards.
    Controller(usize),
    /// A gateway's uplink has no carrier.
    Uplink(usize),
    /// The underlay of these machines is cut off from that of the others, in one direction or in both.
    Underlay { of: Vec<usize>, out: bool, back: bool },
    /// Packets between two machines are lost, in one direction or in both.
    Link { ends: [usize; 2], both: bool },
    /// A process does not reach the API server.
    Offline(usize),
    /// No process reaches the API server.
    ApiServer,
    /// A machine is cordoned.
    Cordon(usize),
    /// The underlay loses and delays packets.
    Weather { loss: u64, delay: u64 },
    /// Requests and watches are slow.
    Slow { request: u64, watch: u64 },
    /// The plan makes nodes return blocks.
    Squeeze(u32),
}

#[derive(Clone, Debug)]
pub struct Planned {
    pub fault: Fault,
    pub from: Duration,
    pub until: Duration,
}

impl Fault {
    /// Draws random faults, each between `from` and `until`.
    pub fn draw(rng: &mut Rng, gateways: usize, machines: usize, from: Duration, until: Duration) -> Vec<Planned> {
        let span = (until - from).as_millis() as u64;
        let mut planned = Vec::new();
        for _ in 0..1 + rng.below(6) {
            let (fault, longest) = Self::any(rng, gateways, machines);
            let begin = rng.below(span * 3 / 4);
            let length = match rng.below(3) {
                0 => 50 + rng.below(700),
                1 => 200 + rng.below(4000),
                _ => 1000 + rng.below(12_000),
            };
            let end = (begin + length.min(longest)).min(span);
            let at = |ms| from + Duration::from_millis(ms);
            planned.push(Planned { fault, from: at(begin), until: at(end) });
        }
        planned
    }

    fn any(rng: &mut Rng, gateways: usize, machines: usize) -> (Fault, u64) {
        let gateway = rng.index(gateways);
        let machine = if rng.chance(700) { gateway } else { rng.index(machines) };
        let some = |rng: &mut Rng| (0..machines).filter(|_| rng.chance(500)).collect::<Vec<_>>();
        let long = 12_000;
        match rng.below(22) {
            0 | 1 => (Fault::Power(machine), long),
            2 | 3 => (Fault::Agent { node: machine, stopped: rng.chance(500) }, long),
            4 => (Fault::Frozen(machine), 8000),
            5 => (Fault::Frozen(machines + rng.index(2)), 8000),
            6 => (Fault::Controller(rng.index(2)), long),
            7 | 8 => (Fault::Uplink(gateway), long),
            9 => (Fault::Underlay { of: vec![gateway], out: true, back: true }, long),
            10 => {
                let (of, out) = (some(rng), rng.chance(700));
                (Fault::Underlay { of, out, back: !out || rng.chance(700) }, long)
            }
            11 | 12 => {
                let other = (gateway + 1 + rng.index(machines - 1)) % machines;
                (Fault::Link { ends: [gateway, other], both: rng.chance(500) }, long)
            }
            13 | 14 => (Fault::Offline(machine), long),
            15 => (Fault::Offline(machines + rng.index(2)), long),
            16 => (Fault::ApiServer, long),
            17 => (Fault::Cordon(gateway), long),
            18 if rng.chance(500) => (Fault::Weather { loss: rng.below(60), delay: 1 + rng.below(40) }, long),
            18 => (Fault::Slow { request: 1 + rng.below(100), watch: rng.below(500) }, long),
            _ => (Fault::Squeeze(1 + rng.below(4) as u32), long),
        }
    }
}
