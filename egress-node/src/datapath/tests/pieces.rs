//! Fragments in the model: what the programs do with each fragment, in any order, and which fragments wait for the first one.

use super::{
    datagrams::{Datagram, Part, is_untouched},
    frames::read,
    model::{NatFixture, Ran, Shot},
    moves::{NOBODYS, PODS},
    nat::{How, Nat, Outcome, Reply, Tuple},
    rig::*,
    talk::{answer, inward, outcome, outward, packet},
};
use egress_common::verdict::Counter;
use nix::{
    poll::{PollFd, PollFlags, poll},
    sys::socket::{AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, recvfrom, socket},
};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

/// Data of a datagram: longer than all parts except the last one.
pub const DATA: [u8; 144] = [7; 144];

/// A socket that receives the packets that re-enter interfaces of this network namespace.
pub struct Wire(OwnedFd);

impl Wire {
    pub fn open() -> Self {
        let (family, kind, flags) = (AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_NONBLOCK);
        Self(socket(family, kind, flags, SockProtocol::EthAll).unwrap())
    }

    /// Returns the next frame that has arrived at an interface.
    fn next(&self, ifindex: u32) -> Option<Vec<u8>> {
        let mut buffer = [0; 1024];
        while let Ok((len, from)) = recvfrom::<LinkAddr>(self.0.as_raw_fd(), &mut buffer) {
            let from = from.unwrap();
            if from.ifindex() == ifindex as usize && from.pkttype() != libc::PACKET_OUTGOING {
                return Some(buffer[..len].to_vec());
            }
        }
        None
    }

    fn drain(&self) {
        let mut buffer = [0; 1];
        while nix::sys::socket::recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()).is_ok() {}
    }

    /// Returns the next `count` frames that arrive at an interface, waiting for them if necessary.
    fn take(&self, count: u64, ifindex: u32) -> Result<Vec<Vec<u8>>, String> {
        let mut frames = Vec::new();
        while frames.len() < count as usize {
            match self.next(ifindex) {
                Some(frame) => frames.push(frame),
                None => {
                    let ready = poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], 10_000u16).unwrap();
                    if ready == 0 {
                        return Err(format!("only {} of {count} fragments have re-entered", frames.len()));
                    }
                }
            }
        }
        Ok(frames)
    }
}

impl NatFixture {
    /// Runs a first fragment. If others wait for it, returns its result and those fragments as they re-enter.
    fn gathered(&mut self, shot: &Shot, of: &Datagram) -> Result<(Ran, Vec<Vec<u8>>), String> {
        if !self.datagrams.are_waiting(of) {
            return Ok((shot.run(&mut self.rig.programs), Vec::new()));
        }
        self.wire.drain();
        let count = |world: &Self, counter| world.rig.writer.maps().counter(counter).unwrap();
        let before = [Counter::DatagramOrdered, Counter::FragmentReleased].map(|counter| count(self, counter));
        let ran = shot.run(&mut self.rig.programs);
        let after = [Counter::DatagramOrdered, Counter::FragmentReleased].map(|counter| count(self, counter));
        if after[0] == before[0] {
            return Ok((ran, Vec::new()));
        }
        let mut frames = self.wire.take(1 + after[1] - before[1], shot.field.1)?;
        if ran.0 != SHOT || frames[0] != shot.frame {
            return Err(format!("{:02x?} comes before the fragments that waited for it", frames[0]));
        }
        let behind = frames.split_off(1);
        self.datagrams.released(of, &behind, now_tick())?;
        Ok((shot.run(&mut self.rig.programs), behind))
    }

    /// Sends parts of a pod's datagram through the interface of pod number `by`.
    pub fn pod_pieces(&mut self, by: usize, tuple: &Tuple, flags: u8, id: u16, parts: &[Part]) -> Result<(), String> {
        let whole = packet(tuple, flags, &DATA);
        let of = Datagram { src: tuple.pod, dst: tuple.server, id, proto: tuple.proto };
        for part in parts {
            let shot = Shot::of_pod(part.of(&whole, id), self.interfaces[by]);
            if !PODS[by].iter().any(|ip| addr(ip) == tuple.pod) {
                let ran = shot.run(&mut self.rig.programs);
                let anybodys = NOBODYS.iter().any(|ip| addr(ip) == tuple.pod);
                Nat::forged(outcome(&ran, &shot.frame, |_| ())?, anybodys)?;
            } else if part.is_later() {
                self.pod_later(&shot, &of, How::Fragment)?;
            } else {
                self.pod_first(&shot, &of, tuple, flags, part.has_header(tuple.proto))?;
            }
        }
        self.halves(tuple)
    }

    fn pod_first(&mut self, shot: &Shot, of: &Datagram, t: &Tuple, flags: u8, header: bool) -> Result<(), String> {
        let (ran, behind) = self.gathered(shot, of)?;
        if !header {
            let outcome = outcome(&ran, &shot.frame, |_| ())?;
            let left_alone = outcome == Outcome::Passed && !self.nat.selected.contains(&t.pod);
            return if left_alone { Ok(()) } else { Nat::forged(outcome, false) };
        }
        let outcome = outcome(&ran, &shot.frame, outward)?;
        if let Outcome::Sent(_) = outcome {
            self.went(shot, of, &ran.1)?;
            self.datagrams.know(*of, (t.pod_port, t.server_port));
        }
        self.nat.pod_sent(*t, flags, How::Fragment, outcome)?;
        for frame in behind {
            self.pod_later(&Shot { frame, ..shot.clone() }, of, How::Fragment)?;
        }
        Ok(())
    }

    /// Checks that a sent fragment is unchanged, and that no fragment of its datagram still waits.
    fn went(&self, shot: &Shot, of: &Datagram, out: &[u8]) -> Result<(), String> {
        match is_untouched(&shot.frame, out) {
            _ if self.datagrams.are_waiting(of) => Err(format!("fragments that wait for {of:?} are left behind")),
            false => Err(format!("of {:02x?} becomes {out:02x?}", shot.frame)),
            true => Ok(()),
        }
    }

    /// Sends a pod's fragment without ports, whose flow is that of the first fragment.
    fn pod_later(&mut self, shot: &Shot, of: &Datagram, how: How) -> Result<(), String> {
        let ran = shot.run(&mut self.rig.programs);
        let source = outcome(&ran, &shot.frame, |out| read(out).unwrap().src)?;
        let Some(tuple) = self.datagrams.ports(of).map(|ports| of.with(ports)) else {
            match source {
                Outcome::Sent(_) => return Err(format!("{of:?} is sent, but its first fragment was never seen")),
                Outcome::Dropped if how == How::Fragment => self.datagrams.wait(*of, &shot.frame, now_tick()),
                Outcome::Dropped | Outcome::Passed => {}
            }
            let passes = self.nat.firewall && how == How::Fragment || !self.nat.selected.contains(&of.src);
            let right = source == if passes { Outcome::Passed } else { Outcome::Dropped };
            return if right {
                Ok(())
            } else {
                Err(format!("{source:?} for {of:?}, whose first fragment was never seen"))
            };
        };
        let seen = match source {
            Outcome::Sent(egress) => {
                self.went(shot, of, &ran.1)?;
                // As in `outside_later`.
                let flow = self.tables.flow(&tuple).map(|flow| flow.translated.then_some(flow.reply));
                let reply = flow.unwrap_or_else(|| self.nat.reply(&tuple)).filter(|reply| reply.egress == egress);
                Outcome::Sent(reply.ok_or_else(|| format!("{tuple:?} leaves with {egress}, but has no such flow"))?)
            }
            Outcome::Dropped => Outcome::Dropped,
            Outcome::Passed => Outcome::Passed,
        };
        self.nat.pod_sent(tuple, 0, how, seen)
    }

    /// Lets the firewall pass a datagram that the stack has reassembled; it leaves in parts again.
    pub fn pieces_pass(&mut self, tuple: &Tuple, flags: u8, id: u16) -> Result<(), String> {
        if !self.nat.firewall || !self.nat.selected.contains(&tuple.pod) {
            return Ok(());
        }
        let whole = packet(tuple, flags, &DATA);
        let of = Datagram { src: tuple.pod, dst: tuple.server, id, proto: tuple.proto };
        for part in Part::ORDERED {
            let shot = self.leaving(part.of(&whole, id), tuple);
            if part.is_later() {
                self.pod_later(&shot, &of, How::Asked)?;
                continue;
            }
            let ran = shot.run(&mut self.rig.programs);
            let outcome = outcome(&ran, &shot.frame, outward)?;
            if let Outcome::Sent(_) = outcome {
                self.went(&shot, &of, &ran.1)?;
                self.datagrams.know(of, (tuple.pod_port, tuple.server_port));
            }
            if outcome != Outcome::Dropped {
                self.nat.pod_sent(*tuple, flags, How::Asked, outcome)?;
            }
        }
        self.halves(tuple)
    }

    /// Sends parts of an answer.
    pub fn outside_pieces(&mut self, reply: &Reply, flags: u8, id: u16, parts: &[Part]) -> Result<(), String> {
        let whole = answer(reply, flags, &DATA);
        let of = Datagram { src: reply.server, dst: reply.egress, id, proto: reply.proto };
        for part in parts {
            let shot = self.arriving(&part.of(&whole, id));
            if part.is_later() {
                self.outside_later(&shot, &of)?;
            } else if part.has_header(reply.proto) {
                self.outside_first(&shot, &of, reply, flags)?;
            } else {
                Nat::forged(outcome(&shot.run(&mut self.rig.programs), &shot.frame, |_| ())?, false)?;
            }
        }
        Ok(())
    }

    fn outside_first(&mut self, shot: &Shot, of: &Datagram, reply: &Reply, flags: u8) -> Result<(), String> {
        let (ran, behind) = self.gathered(shot, of)?;
        let seen = outcome(&ran, &shot.frame, inward)?;
        // Whether the fragment belongs to any flow is checked later.
        let icmp = reply.server_port == 0;
        self.datagrams.know(*of, if icmp { (reply.port, 0) } else { (reply.server_port, reply.port) });
        if let Outcome::Sent(_) = seen {
            self.went(shot, of, &ran.1)?;
        }
        self.delivered(*reply, flags, false, seen, &ran.1)?;
        for frame in behind {
            self.outside_later(&Shot { frame, ..shot.clone() }, of)?;
        }
        Ok(())
    }

    /// Sends a fragment without ports from outside, whose receiver is that of the first fragment.
    fn outside_later(&mut self, shot: &Shot, of: &Datagram) -> Result<(), String> {
        let ran = shot.run(&mut self.rig.programs);
        let to = outcome(&ran, &shot.frame, |out| read(out).unwrap().dst)?;
        let Some((from, port)) = self.datagrams.ports(of) else {
            self.datagrams.wait(*of, &shot.frame, now_tick());
            return Nat::forged(to, false);
        };
        let icmp = port == 0;
        let reply = Reply {
            egress: of.dst,
            port: if icmp { from } else { port },
            server: of.src,
            server_port: if icmp { 0 } else { from },
            proto: of.proto,
        };
        let seen = match to {
            Outcome::Sent(pod) => {
                self.went(shot, of, &ran.1)?;
                // The collector runs all the time, and may have removed the reverse half since.
                let back = self.tables.back(&reply).map(|back| back.of(&reply)).or_else(|| self.nat.owner(&reply));
                let tuple = back.filter(|tuple| tuple.pod == pod);
                Outcome::Sent(
                    tuple.ok_or_else(|| format!("{pod} gets a packet that is not for it: {reply:?}, {back:?}"))?,
                )
            }
            Outcome::Dropped => Outcome::Dropped,
            Outcome::Passed => Outcome::Passed,
        };
        self.delivered(reply, 0, false, seen, &ran.1)
    }
}
