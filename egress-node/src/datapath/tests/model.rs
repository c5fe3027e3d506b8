//! Checks the programs against the reference NAT of [`nat`](super::nat) with random packets of pods, forgers and the outside, changes of
//! tables, lost forward halves, expiry, and two concurrent CPUs. After each step the design's rules hold.
//!
//! An episode is a few hundred steps derived from a seed. A failing episode is printed with its seed and the fewest of its steps that still
//! fail. `SPILLWAY_MODEL_SEED=S` runs that episode alone. `SPILLWAY_MODEL_STEPS=N` changes the total number of steps; with both, the steps
//! begin at the episode with seed `S`.

use super::{
    Random,
    datagrams::Datagrams,
    frames::{TCP, UDP, read},
    moves::{BLOCK, EGRESS, NOBODYS, Op, PODS, SERVERS, op, owner, view, views},
    nat::{ACK, How, Nat, Outcome, Reply, SYN, Tuple},
    pieces::Wire,
    races::at_once,
    rig::*,
    tables::FlowTables,
    talk::{answer, complained, error, inward, outcome, outward, packet, quoted},
};
use crate::datapath::load::Programs;
use aya::programs::{TestRun as _, TestRunOptions};
use egress_common::{abi::TICK_SHIFT, net, trace::TraceFilter, verdict::Counter};
use egress_core::encode::NodeView;
use std::{
    collections::BTreeMap,
    process::Command,
    time::{Duration, Instant},
};

/// The default number of steps of all episodes together.
const STEPS: usize = 1_000_000;
const EPISODE: usize = 300;
/// The MAC address of every interface: frames for another address are for another host.
const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];
/// The data of whole packets.
pub const QUESTION: &[u8] = b"question";
/// The shortest time after which the kernel removes a flow by itself, whatever the configuration. An episode takes milliseconds.
const TICK: Duration = Duration::from_nanos(1 << TICK_SHIFT);
/// At most one episode in this many steps may take longer than a tick.
const STALLS: usize = 50_000;
/// The whole flow table is checked after this many steps; the flow of a step after each step.
const LOOK: usize = 50;

pub struct NatFixture {
    pub rig: Rig,
    pub tables: FlowTables,
    pub interfaces: Vec<u32>,
    /// The programs of the second CPU.
    pub others: Programs,
    pub nat: Nat,
    pub datagrams: Datagrams,
    pub wire: Wire,
}

/// A packet on its way to a program.
#[derive(Clone, Debug)]
pub struct Shot {
    pub program: &'static str,
    pub frame: Vec<u8>,
    /// A word of its `__sk_buff`.
    pub field: (usize, u32),
}

/// A program's verdict, and the resulting frame.
pub type Ran = (i32, Vec<u8>);

impl Shot {
    pub fn run(&self, programs: &mut Programs) -> Ran {
        let mut out = vec![0; self.frame.len() + 256];
        let context = context(&[self.field]);
        let options = TestRunOptions {
            data_in: Some(&self.frame),
            data_out: Some(&mut out),
            ctx_in: Some(&context),
            ..Default::default()
        };
        let result = programs.get(self.program).unwrap().test_run(options).unwrap();
        out.truncate(result.data_size_out as usize);
        (result.return_value as i32, out)
    }
}

impl Shot {
    /// Returns a pod's packet.
    pub fn of_pod(frame: Vec<u8>, ifindex: u32) -> Self {
        Self { program: "pod_egress", frame, field: (IFINDEX, ifindex) }
    }
}

impl NatFixture {
    /// Starts with no flows and with the first tables.
    fn begin(&mut self, firewall: bool) {
        self.tables.clear();
        self.datagrams = Datagrams::default();
        self.nat = Nat::new(firewall, [BLOCK].into());
        self.change(0);
    }

    /// Returns the view with this number among [`views`].
    pub fn view(&self, number: usize) -> NodeView {
        view(number, self.nat.firewall, &self.interfaces)
    }

    fn change(&mut self, number: usize) {
        let view = self.view(number);
        self.rig.write(&view);
        self.told(number);
    }

    /// Tells the reference NAT the contents of the tables.
    pub fn told(&mut self, number: usize) {
        let (slots, selected) = &views()[number];
        let all = |numbers: &[usize], of: &[[&str; 2]]| numbers.iter().flat_map(|n| of[*n]).map(addr).collect();
        self.nat.tables_changed(all(slots, &EGRESS), all(selected, &PODS));
    }

    /// Returns a pod's packet that the stack lets leave.
    pub fn leaving(&self, frame: Vec<u8>, tuple: &Tuple) -> Shot {
        Shot { program: "exit_egress", frame, field: (INGRESS_IFINDEX, self.interfaces[owner(tuple.pod)]) }
    }

    /// Returns a packet from outside.
    pub fn arriving(&self, frame: &[u8]) -> Shot {
        let frame = [&UPLINK_MAC, &frame[6..]].concat();
        Shot { program: "uplink_ingress", frame, field: (IFINDEX, self.interfaces[PODS.len()]) }
    }

    fn step(&mut self, op: &Op) -> Result<(), String> {
        match op {
            Op::Pod { by, tuple, flags } => {
                let shot = Shot::of_pod(packet(tuple, *flags, QUESTION), self.interfaces[*by]);
                let outcome = outcome(&shot.run(&mut self.rig.programs), &shot.frame, outward)?;
                if PODS[*by].iter().any(|ip| addr(ip) == tuple.pod) {
                    self.nat.pod_sent(*tuple, *flags, How::Whole, outcome)?;
                    return self.halves(tuple);
                }
                Nat::forged(outcome, NOBODYS.iter().any(|ip| addr(ip) == tuple.pod))
            }
            Op::Complain { by, about } => {
                let frame = error(about.pod, about.server, &answer(&about.mirrored(), ACK, QUESTION));
                let shot = Shot::of_pod(frame, self.interfaces[*by]);
                // The quoted packet is an answer: its destination is the address that the outside knows.
                let read = |out: &[u8]| inward(&quoted(out)).mirrored();
                let seen = outcome(&shot.run(&mut self.rig.programs), &shot.frame, read)?;
                let own = *by == owner(about.pod);
                if own { self.nat.pod_complained(about, own, seen) } else { Nat::forged(seen, false) }
            }
            Op::LetAsked { nth, flags, pieces } => match (self.nat.asked(*nth), pieces) {
                // A test run cannot set the note that the program at the pod's interface leaves in such a packet.
                (Some(tuple), _) if !self.nat.selected.contains(&tuple.pod) => Ok(()),
                (Some(tuple), Some(id)) => self.pieces_pass(&tuple, *flags, *id),
                (Some(tuple), None) => self.step(&Op::Let { tuple, flags: *flags }),
                (None, _) => Ok(()),
            },
            Op::Race(race) => self.race(race),
            Op::Let { tuple, flags } if self.nat.firewall => {
                let shot = self.leaving(packet(tuple, *flags, QUESTION), tuple);
                let outcome = outcome(&shot.run(&mut self.rig.programs), &shot.frame, outward)?;
                if outcome != Outcome::Dropped {
                    self.nat.pod_sent(*tuple, *flags, How::Asked, outcome)?;
                }
                self.halves(tuple)
            }
            Op::Let { .. } => Ok(()),
            Op::Outside { nth, flags, error: is_error } => {
                let Some(reply) = self.reply(*nth) else { return Ok(()) };
                let frame = if *is_error {
                    error(reply.server, reply.egress, &packet(&reply.mirrored(), ACK, QUESTION))
                } else {
                    answer(&reply, *flags, QUESTION)
                };
                self.arrives(reply, &frame, *flags, *is_error)
            }
            Op::Guess { egress, port, from, tcp } => {
                let (proto, server_port) = if *tcp { (TCP, 443) } else { (UDP, 53) };
                let server = addr(SERVERS[*from][usize::from(egress.is_ipv6())]);
                let reply = Reply { egress: *egress, port: *port, server, server_port, proto };
                self.arrives(reply, &answer(&reply, ACK, QUESTION), ACK, false)
            }
            Op::PodPieces { by, tuple, flags, id, parts } => self.pod_pieces(*by, tuple, *flags, *id, parts),
            Op::OutsidePieces { nth, flags, id, parts } => match self.reply(*nth) {
                Some(reply) => self.outside_pieces(&reply, *flags, *id, parts),
                None => Ok(()),
            },
            Op::Lose { nth, both } => {
                let known = self.nat.known();
                known.get(nth % known.len().max(1)).into_iter().for_each(|tuple| self.lose(tuple, *both));
                Ok(())
            }
            Op::Tables(number) => {
                self.change(*number);
                Ok(())
            }
            Op::Together(one, two) => {
                let shots = [one, two].map(|t| [Shot::of_pod(packet(t, SYN, QUESTION), self.interfaces[owner(t.pod)])]);
                let ran = at_once([&mut self.rig.programs, &mut self.others], [&shots[0], &shots[1]], || {});
                for (tuple, ran, shot) in [(one, &ran[0], &shots[0]), (two, &ran[1], &shots[1])] {
                    let outcome = outcome(&ran[0], &shot[0].frame, outward)?;
                    self.nat.pod_sent(*tuple, SYN, How::Whole, outcome)?;
                }
                self.halves(one)?;
                self.halves(two)
            }
        }
    }

    /// Returns one of the replies that the outside knows.
    fn reply(&self, nth: usize) -> Option<Reply> {
        let replies = self.nat.replies();
        replies.get(nth % replies.len().max(1)).copied()
    }

    fn arrives(&mut self, reply: Reply, frame: &[u8], flags: u8, is_error: bool) -> Result<(), String> {
        let shot = self.arriving(frame);
        let ran = shot.run(&mut self.rig.programs);
        let seen = outcome(&ran, &shot.frame, if is_error { complained } else { inward })?;
        self.delivered(reply, flags, is_error, seen, &ran.1)
    }

    /// Judges the fate of a packet from outside, which became `out`.
    pub fn delivered(
        &mut self,
        reply: Reply,
        flags: u8,
        is_error: bool,
        seen: Outcome<Tuple>,
        out: &[u8],
    ) -> Result<(), String> {
        if let Outcome::Sent(tuple) = seen {
            let mac = u8::try_from(owner(tuple.pod)).unwrap();
            if out[5] != mac || read(out).unwrap().dst != tuple.pod {
                return Err(format!("a packet for {tuple:?} goes to another pod's MAC address"));
            }
        }
        self.nat.outside_sent(reply, flags, is_error, seen)
    }

    /// Removes the forward half of a flow, or both halves with `both`. A remaining half looks as if it was used a while ago.
    pub fn lose(&mut self, tuple: &Tuple, both: bool) {
        self.nat.lost(tuple);
        let Some(flow) = self.tables.flow(tuple) else { return };
        self.tables.lose(tuple);
        if self.tables.back(&flow.reply).is_none_or(|back| back.of(&flow.reply) != *tuple) {
            return;
        }
        if both {
            self.tables.lose_back(&flow.reply);
        } else {
            self.tables.age(tuple, &flow.reply, 1);
        }
    }

    /// Checks that the halves of a flow name each other.
    pub fn halves(&self, tuple: &Tuple) -> Result<(), String> {
        let Some(flow) = self.tables.flow(tuple).filter(|flow| flow.translated) else { return Ok(()) };
        match self.tables.back(&flow.reply) {
            Some(back) if back.of(&flow.reply) == *tuple => Ok(()),
            None if !self.nat.is_certain(tuple) => Ok(()),
            other => Err(format!("the halves of {tuple:?} do not name each other: {other:?}")),
        }
    }

    /// Checks that no two flows share one reply tuple.
    fn all(&self) -> Result<(), String> {
        let mut seen = BTreeMap::new();
        for (tuple, flow) in self.tables.flows() {
            if flow.translated
                && let Some(other) = seen.insert(flow.reply, tuple)
            {
                return Err(format!("{tuple:?} and {other:?} have one tuple"));
            }
        }
        Ok(())
    }

    /// Runs an episode. On failure returns the step, and what is wrong after it.
    fn episode(&mut self, ops: &[Op], firewall: bool) -> Result<(), (usize, String)> {
        self.begin(firewall);
        for (n, op) in ops.iter().enumerate() {
            self.step(op).map_err(|what| (n, what))?;
            if n % LOOK == LOOK - 1 {
                self.all().map_err(|what| (n, what))?;
            }
        }
        Ok(())
    }

    /// Returns the fewest steps that still fail in the same way, found by leaving some out.
    fn shrink(&mut self, mut ops: Vec<Op>, firewall: bool, mut what: String) -> (Vec<Op>, String) {
        let words =
            |text: &str| -> String { text.split(' ').filter(|word| !word.contains(char::is_numeric)).collect() };
        let mut size = ops.len();
        while size > 0 {
            let mut at = 0;
            while at < ops.len() {
                let end = (at + size).min(ops.len());
                let fewer = [&ops[..at], &ops[end..]].concat();
                match self.episode(&fewer, firewall) {
                    Err((n, why)) if words(&why) == words(&what) => (ops, what) = (fewer[..=n].to_vec(), why),
                    _ => at = end,
                }
            }
            size /= 2;
        }
        (ops, what)
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[test]
fn random_interleavings_keep_the_rules_of_a_reference_nat() {
    walk("model", STEPS, |_| {});
}

/// One of two CPUs runs the programs of a trace, which report their decisions.
#[test]
fn the_programs_of_a_trace_keep_the_same_rules() {
    let filter = TraceFilter { v4: net::v4(PODS[0][0].parse().unwrap()), ..TraceFilter::NONE };
    walk("model-trace", STEPS / 20, |world| {
        world.rig.programs = Programs::load_trace(world.rig.pins(), SIZES, &filter).unwrap();
    });
}

/// Runs episodes until they have this many steps, for the named test with its own programs.
fn walk(test: &str, steps: usize, prepare: impl FnOnce(&mut NatFixture)) {
    // A network namespace with its own interfaces, whatever this machine has.
    if !nix::unistd::geteuid().is_root() {
        return drop(Rig::new(test, &scene()));
    }
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    let ip = |args: &[&str]| assert!(Command::new("ip").args(args).status().unwrap().success());
    let interfaces: Vec<u32> = (0..=PODS.len())
        .map(|n| {
            let (name, mac) = (format!("p{n}"), UPLINK_MAC.map(|byte| format!("{byte:02x}")).join(":"));
            ip(&["link", "add", &name, "address", &mac, "type", "veth"]);
            // Packets cannot re-enter through an interface that is down.
            ip(&["link", "set", &name, "up"]);
            nix::net::if_::if_nametoindex(name.as_str()).unwrap()
        })
        .collect();
    let Some(rig) = Rig::new(test, &view(0, false, &interfaces)) else { return };
    let tables = FlowTables::open(rig.pins());
    let others = Programs::load_lazily(rig.pins(), SIZES).unwrap();
    let (nat, datagrams) = (Nat::default(), Datagrams::default());
    let mut world = NatFixture { rig, tables, interfaces, others, nat, datagrams, wire: Wire::open() };
    prepare(&mut world);
    let mut seed = number("SPILLWAY_MODEL_SEED").unwrap_or(1);
    let alone = std::env::var_os("SPILLWAY_MODEL_SEED").map(|_| 1);
    let steps = number("SPILLWAY_MODEL_STEPS").map(|n| n as usize).or(alone).unwrap_or(steps);
    let (mut done, mut stalls) = (0, 0);
    while done < steps {
        let mut random = Random(seed);
        let firewall = random.below(2) == 0;
        let ops: Vec<Op> = (0..EPISODE).map(|_| op(&mut random)).collect();
        let began = Instant::now();
        let outcome = world.episode(&ops, firewall);
        if began.elapsed() >= TICK {
            // The episode is not judged: flows that have ended or wait for the firewall may have been removed meanwhile.
            stalls += 1;
            assert!(
                stalls * STALLS <= steps.max(STALLS),
                "{stalls} of the episodes up to {seed} took longer than a tick"
            );
            continue;
        }
        if let Err((n, why)) = outcome {
            let (fewest, what) = world.shrink(ops[..=n].to_vec(), firewall, why.clone());
            let steps: String = fewest.iter().map(|op| format!("  {op:?}\n")).collect();
            panic!("SPILLWAY_MODEL_SEED={seed}, firewall: {firewall}: {why} after {n} steps; {what} after\n{steps}");
        }
        done += ops.iter().map(Op::packets).sum::<usize>();
        seed += 1;
    }
    for counter in [Counter::FragmentHeld, Counter::FragmentReleased, Counter::Delivered, Counter::FirewallPassed] {
        let (seen, few) = (world.rig.count(counter), steps as u64 / 1_000);
        assert!(seen >= few, "{} only {seen} times: the test no longer covers it", counter.name());
    }
}
