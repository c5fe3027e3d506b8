//! Two concurrent CPUs: batches of packets, while flows expire and tables change. The order cannot be predicted, so the test checks only
//! what holds in any order. Afterwards the reference NAT takes over the contents of the tables.

use super::{
    Random,
    datagrams::Part,
    frames::read,
    model::{NatFixture, QUESTION, Ran, Shot},
    moves::{BLOCK, owner, tuple},
    nat::{ACK, FIN, Nat, Outcome, RST, Reply, SYN, TCP, Tuple},
    pieces::DATA,
    rig::{cpus, run_on},
    tables::{Backward, Forward},
    talk::{answer, inward, outcome, outward, packet},
};
use crate::datapath::load::Programs;
use egress_common::port_block;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The number of times that a CPU checks whether the other one has caught up: the other one may not be running at all.
const PATIENCE: usize = 3_000;
/// More ticks than any flow lives without a packet.
const LONG: u32 = 20_000;

/// Runs packets on two CPUs: the first packets of both concurrently, then the second ones, and so on. Runs `meanwhile` on any CPU.
pub fn at_once(programs: [&mut Programs; 2], shots: [&[Shot]; 2], meanwhile: impl FnOnce()) -> [Vec<Ran>; 2] {
    let cpus = cpus();
    let (done, start) = (&[AtomicUsize::new(0), AtomicUsize::new(0)], &Barrier::new(3));
    std::thread::scope(|scope| {
        let mut numbers = 0..2;
        let runs = programs.map(|programs| {
            let n = numbers.next().unwrap();
            let (cpu, shots) = (cpus[n % cpus.len()], shots[n]);
            scope.spawn(move || {
                run_on(&[cpu]);
                start.wait();
                let mut ran = Vec::new();
                for (at, shot) in shots.iter().enumerate() {
                    done[n].store(at + 1, Ordering::Release);
                    let is_behind = |_: &usize| done[1 - n].load(Ordering::Acquire) <= at;
                    (0..PATIENCE).take_while(is_behind).for_each(|_| std::hint::spin_loop());
                    ran.push(shot.run(programs));
                }
                ran
            })
        });
        start.wait();
        meanwhile();
        runs.map(|run| run.join().unwrap())
    })
}

/// A packet of a batch.
#[derive(Clone, Debug)]
pub enum Move {
    Pod {
        tuple: Tuple,
        flags: u8,
    },
    /// A part of the only datagram of this flow.
    Piece {
        tuple: Tuple,
        flags: u8,
        part: Part,
    },
    Let {
        tuple: Tuple,
        flags: u8,
    },
    Outside {
        nth: usize,
        flags: u8,
    },
}

#[derive(Clone, Debug)]
pub struct Race {
    pub batches: [Vec<Move>; 2],
    /// Known flows that have been idle for too long.
    pub due: Vec<usize>,
    /// The tables that are written during the race.
    pub tables: Option<usize>,
}

/// Returns packets of few flows, so that both CPUs meet, towards few destinations, so that ports get scarce.
pub fn race(random: &mut Random, tables: usize) -> Race {
    let hot: Vec<Tuple> = (0..6).map(|_| tuple(random)).collect();
    let mut batches = [Vec::new(), Vec::new()];
    for _ in 0..24 {
        let mut both = random.of(&hot);
        for batch in &mut batches {
            if random.below(2) == 0 {
                both = random.of(&hot);
            }
            let other = tuple(random);
            let flags = random.of(&[SYN, SYN, SYN, ACK, FIN | ACK, RST]);
            let tuple = if random.below(4) == 0 { other } else { both };
            batch.push(match random.below(20) {
                0..=11 => Move::Pod { tuple, flags },
                12..=13 => Move::Let { tuple, flags: SYN },
                14..=15 => Move::Piece { tuple, flags: SYN, part: random.of(&Part::ALL) },
                _ => Move::Outside { nth: random.below(1 << 16), flags: random.of(&[SYN | ACK, ACK, ACK, RST]) },
            });
        }
    }
    let due = (0..random.below(8)).map(|_| random.below(1 << 16)).collect();
    Race { batches, due, tables: (random.below(4) == 0).then(|| random.below(tables)) }
}

type Flows = BTreeMap<Tuple, Forward>;
type Backs = BTreeMap<Reply, Backward>;

/// A packet and its result.
struct Played<'a> {
    this: &'a Move,
    /// The flow that the packet belongs to, if known.
    flow: Option<Tuple>,
    /// The reply tuple that the packet answers.
    reply: Option<Reply>,
    shot: &'a Shot,
    ran: Ran,
}

impl Played<'_> {
    fn outcome<T>(&self, read: impl Fn(&[u8]) -> T) -> Result<Outcome<T>, String> {
        outcome(&self.ran, &self.shot.frame, read)
    }
}

/// The facts by which the results of a race are judged.
struct Judge<'a> {
    nat: &'a Nat,
    flows: &'a Flows,
    /// The policy's egress IPs before and after the race.
    slots: BTreeSet<IpAddr>,
    selected: BTreeSet<IpAddr>,
    /// Whether the tables have not changed.
    same: bool,
    /// Flows that may have ended, or begun anew.
    over: BTreeSet<Tuple>,
    /// The flows that used each reply tuple.
    users: BTreeMap<Reply, BTreeSet<Tuple>>,
    confirmed: BTreeSet<Reply>,
}

impl Judge<'_> {
    /// Returns whether something may have taken the flow's egress IP and port from it.
    fn is_over(&self, t: &Tuple) -> bool {
        // For a flow that has sent nothing yet, the reference NAT does not know the tables under which it was made.
        let silent = self.flows.contains_key(t) && !self.nat.has_sent(t);
        !self.same || silent || self.over.contains(t) || !self.selected.contains(&t.pod) || !self.nat.stays(t)
    }

    fn pod(&mut self, t: &Tuple, asked: bool, outcome: Outcome<Reply>) -> Result<(), String> {
        let live = self.flows.get(t).filter(|_| !self.is_over(t));
        match outcome {
            Outcome::Sent(reply) => {
                let leased = port_block::of_port(reply.port) == Some(BLOCK);
                if !self.is_source(t, reply.egress) || !leased || reply.mirrored().server != t.server {
                    return Err(format!("{t:?} leaves as {reply:?}"));
                }
                if self.nat.firewall && !asked && !self.confirmed.contains(&reply) {
                    return Err(format!("{t:?} leaves without the firewall's approval"));
                }
                self.users.entry(reply).or_default().insert(*t);
                Ok(())
            }
            Outcome::Passed if !self.nat.firewall && self.same && self.selected.contains(&t.pod) => {
                Err(format!("a selected pod's packet passes: {t:?}"))
            }
            Outcome::Dropped if live.is_some_and(|f| f.translated && !self.nat.firewall) => {
                Err(format!("a live flow's packet is dropped: {t:?}"))
            }
            _ => Ok(()),
        }
    }

    fn is_source(&self, t: &Tuple, egress: IpAddr) -> bool {
        self.selected.contains(&t.pod) && self.slots.contains(&egress)
    }

    /// Judges the results of all packets by the remaining tables.
    fn packets(&mut self, played: &[Played], flows: &Flows) -> Result<(), String> {
        // Packets that the firewall let pass may have come before all others.
        for one in played {
            if let Move::Let { tuple, .. } = one.this {
                let seen = one.outcome(outward)?;
                self.pod(tuple, true, seen)?;
                if let Outcome::Sent(reply) = seen {
                    self.confirmed.insert(reply);
                }
            }
        }
        for one in played {
            match one.this {
                Move::Pod { tuple, .. } => self.pod(tuple, false, one.outcome(outward)?)?,
                Move::Piece { tuple, .. } => {
                    self.piece(tuple, one.outcome(|out| read(out).unwrap().src)?, flows.get(tuple))?;
                }
                Move::Let { .. } | Move::Outside { .. } => {}
            }
        }
        for one in played {
            if let (Move::Outside { .. }, Some(reply)) = (one.this, one.reply) {
                self.delivered(&reply, one.outcome(inward)?, &one.ran.1)?;
            }
        }
        self.unique()
    }

    /// Judges a fragment; a later one shows no port.
    fn piece(&mut self, t: &Tuple, outcome: Outcome<IpAddr>, left: Option<&Forward>) -> Result<(), String> {
        // A first fragment that others wait for has opened the flow, and is sent when it re-enters.
        if let Some(flow) = left {
            self.users.entry(flow.reply).or_default().insert(*t);
        }
        match outcome {
            Outcome::Sent(egress) if !self.is_source(t, egress) || self.nat.firewall => {
                Err(format!("a fragment of {t:?} leaves with {egress}"))
            }
            _ => Ok(()),
        }
    }

    fn delivered(&self, reply: &Reply, outcome: Outcome<Tuple>, out: &[u8]) -> Result<(), String> {
        let Outcome::Sent(t) = outcome else { return Ok(()) };
        let own = self.users.get(reply).is_some_and(|users| users.contains(&t));
        let confirmed = !self.nat.firewall || self.confirmed.contains(reply);
        if own && confirmed && out[5] == owner(t.pod) as u8 {
            Ok(())
        } else {
            Err(format!("{reply:?} is delivered to {t:?}"))
        }
    }

    /// Checks that no flow has left with the tuple of another, or with two.
    fn unique(&self) -> Result<(), String> {
        let mut replies: BTreeMap<Tuple, Reply> = BTreeMap::new();
        for (reply, users) in &self.users {
            let mut live = users.iter().filter(|t| !self.is_over(t));
            if let (Some(one), Some(two)) = (live.next(), live.next()) {
                return Err(format!("two flows with one tuple {reply:?}: {one:?} and {two:?}"));
            }
            for t in users.iter().filter(|t| !self.is_over(t)) {
                if let Some(other) = replies.insert(*t, *reply) {
                    return Err(format!("{t:?} leaves as {other:?} and as {reply:?}"));
                }
            }
        }
        Ok(())
    }

    /// Judges the contents of the tables after the race.
    fn tables(&self, flows: &Flows, backs: &Backs, touched: &BTreeSet<Tuple>) -> Result<(), String> {
        let mut owners = BTreeMap::new();
        for (t, flow) in flows.iter().filter(|(_, flow)| flow.translated) {
            if let Some(other) = owners.insert(flow.reply, t) {
                return Err(format!("{t:?} and {other:?} have one tuple"));
            }
            let back = backs.get(&flow.reply).map(|back| back.of(&flow.reply));
            if back != Some(*t) && !self.is_over(t) {
                return Err(format!("the halves of {t:?} do not name each other: {back:?}"));
            }
        }
        for (reply, back) in backs {
            let t = back.of(reply);
            if flows.get(&t).map(|flow| flow.reply) != Some(*reply) && !self.is_over(&t) {
                return Err(format!("no flow has {reply:?}, but its reverse half names {t:?}"));
            }
        }
        let kept =
            |(t, flow): &(&Tuple, &Forward)| flows.get(t) == Some(flow) || touched.contains(t) || self.is_over(t);
        match self.flows.iter().find(|entry| !kept(entry)) {
            Some((t, _)) => Err(format!("{t:?} is gone, although no packet used it")),
            None => Ok(()),
        }
    }
}

impl Move {
    fn tuple(&self) -> Option<Tuple> {
        match self {
            Move::Pod { tuple, .. } | Move::Piece { tuple, .. } | Move::Let { tuple, .. } => Some(*tuple),
            Move::Outside { .. } => None,
        }
    }

    fn flags(&self) -> u8 {
        match self {
            Move::Pod { flags, .. }
            | Move::Piece { flags, .. }
            | Move::Let { flags, .. }
            | Move::Outside { flags, .. } => *flags,
        }
    }
}

impl NatFixture {
    /// Returns a move's packet, and the reply tuple that it answers.
    fn shot(&self, this: &Move, replies: &[Reply]) -> Option<(Shot, Option<Reply>)> {
        match this {
            Move::Pod { tuple, flags } => {
                let frame = packet(tuple, *flags, QUESTION);
                Some((Shot::of_pod(frame, self.interfaces[owner(tuple.pod)]), None))
            }
            Move::Piece { tuple, flags, part } => {
                let frame = part.of(&packet(tuple, *flags, &DATA), tuple.pod_port + tuple.server_port);
                Some((Shot::of_pod(frame, self.interfaces[owner(tuple.pod)]), None))
            }
            Move::Let { tuple, flags } if self.nat.firewall => {
                Some((self.leaving(packet(tuple, *flags, QUESTION), tuple), None))
            }
            Move::Let { .. } => None,
            Move::Outside { nth, flags } => {
                let reply = replies.get(nth % replies.len().max(1))?;
                Some((self.arriving(&answer(reply, *flags, QUESTION)), Some(*reply)))
            }
        }
    }

    /// Removes halves that have lost their counterpart, so that the rest are pairs.
    fn settle(&mut self) {
        let (flows, backs) = (self.tables.flows(), self.tables.backs());
        let pairs = |t: &Tuple, reply: &Reply| {
            flows.get(t).is_some_and(|flow| flow.reply == *reply)
                && backs.get(reply).is_some_and(|back| back.of(reply) == *t)
        };
        for (t, _) in flows.iter().filter(|(t, flow)| !pairs(t, &flow.reply)) {
            self.tables.lose(t);
            self.nat.lost(t);
        }
        for (reply, _) in backs.iter().filter(|(reply, back)| !pairs(&back.of(reply), reply)) {
            self.tables.lose_back(reply);
        }
    }

    /// Makes known flows old enough for the collector, which runs with the next new flows.
    fn fall_due(&mut self, due: &[usize]) -> BTreeSet<Tuple> {
        let flows: Vec<(Tuple, Forward)> = self.tables.flows().into_iter().collect();
        let due: BTreeMap<Tuple, Forward> =
            due.iter().filter_map(|nth| flows.get(nth % flows.len().max(1)).copied()).collect();
        due.iter().for_each(|(t, flow)| self.tables.age(t, &flow.reply, LONG));
        if !due.is_empty() {
            self.tables.turn();
        }
        due.into_keys().collect()
    }

    pub fn race(&mut self, race: &Race) -> Result<(), String> {
        self.settle();
        let due = self.fall_due(&race.due);
        let (flows, backs, replies) = (self.tables.flows(), self.tables.backs(), self.nat.replies());
        let (slots, selected) = (self.nat.slots.clone(), self.nat.selected.clone());
        let plan = |batch: &Vec<Move>| -> Vec<_> {
            batch.iter().filter_map(|this| Some((this.clone(), self.shot(this, &replies)?))).collect()
        };
        let plans = [0, 1].map(|n| plan(&race.batches[n]));
        let shots = [0, 1].map(|n| plans[n].iter().map(|(_, (shot, _))| shot.clone()).collect::<Vec<_>>());
        let ran = self.run_race(&shots, race.tables);
        let played: Vec<Played> = plans
            .iter()
            .flatten()
            .zip(ran.into_iter().flatten())
            .map(|((this, (shot, reply)), ran)| {
                let answered = reply.and_then(|reply| Some(backs.get(&reply)?.of(&reply)));
                Played { this, flow: answered.or(this.tuple()), reply: *reply, shot, ran }
            })
            .collect();
        let ends = |one: &&Played| one.this.flags() & (FIN | RST) != 0;
        let ended = played.iter().filter(ends).filter_map(|one| one.flow).filter(|t| t.proto == TCP);
        let over: BTreeSet<Tuple> = ended.chain(due.iter().copied()).collect();
        let touched: BTreeSet<Tuple> = played.iter().filter_map(|one| one.flow).collect();
        let (after, left) = (self.tables.flows(), self.tables.backs());
        let confirmed = || backs.iter().filter(|(_, back)| back.confirmed);
        let mut judge = Judge {
            nat: &self.nat,
            flows: &flows,
            slots: slots.union(&self.nat.slots).copied().collect(),
            selected: selected.union(&self.nat.selected).copied().collect(),
            same: race.tables.is_none(),
            over,
            users: confirmed().map(|(reply, back)| (*reply, [back.of(reply)].into())).collect(),
            confirmed: confirmed().map(|(reply, _)| *reply).collect(),
        };
        judge.packets(&played, &after)?;
        judge.tables(&after, &left, &touched)?;
        let unknown: BTreeSet<Tuple> = flows
            .keys()
            .filter(|t| judge.is_over(t))
            .chain(&touched)
            .chain(after.keys().filter(|t| !flows.contains_key(t)))
            .copied()
            .collect();
        self.resume(&unknown, &after, &left);
        // The collector may still remove the due flows that no packet has used.
        due.iter().for_each(|t| self.lose(t, true));
        for one in played.iter().filter(|one| one.this.flags() == SYN) {
            one.flow.into_iter().for_each(|t| self.nat.opened(t));
        }
        Ok(())
    }

    fn run_race(&mut self, shots: &[Vec<Shot>; 2], tables: Option<usize>) -> [Vec<Ran>; 2] {
        let view = tables.map(|number| self.view(number));
        let (encoder, writer) = (&mut self.rig.encoder, &mut self.rig.writer);
        let write = || {
            if let Some(view) = view {
                let tables = encoder.encode(&view, writer.present()).unwrap();
                writer.write(tables).unwrap();
            }
        };
        let ran = at_once([&mut self.rig.programs, &mut self.others], [&shots[0], &shots[1]], write);
        if let Some(number) = tables {
            self.told(number);
        }
        ran
    }

    /// Makes the reference NAT take over the tables' entries for these flows.
    fn resume(&mut self, of: &BTreeSet<Tuple>, flows: &Flows, backs: &Backs) {
        for t in of {
            self.nat.resume(*t, flows.get(t).filter(|flow| flow.translated).map(|flow| flow.reply));
        }
        for (reply, back) in backs {
            self.nat.belongs(*reply, back.of(reply), back.confirmed);
        }
    }
}
