//! The reference NAT: the design's rules for flows, written for clarity. It makes no choices. It takes what the programs did with a packet,
//! and returns what is wrong with that.

use egress_common::port_block;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Debug, Formatter},
    net::IpAddr,
};

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const ACK: u8 = 16;
pub const TCP: u8 = 6;

/// A flow as its pod knows it; the pod's port of an ICMP query is its identifier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tuple {
    pub pod: IpAddr,
    pub pod_port: u16,
    pub server: IpAddr,
    pub server_port: u16,
    pub proto: u8,
}

/// A flow as the outside knows it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reply {
    pub egress: IpAddr,
    pub port: u16,
    pub server: IpAddr,
    pub server_port: u16,
    pub proto: u8,
}

impl Debug for Tuple {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Tuple { pod, pod_port, server, server_port, proto } = self;
        write!(f, "{pod} {pod_port} -> {server} {server_port} ({proto})")
    }
}

impl Debug for Reply {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.mirrored().fmt(f)
    }
}

impl Tuple {
    /// Returns the reply tuple that the flow would have without translation.
    pub fn mirrored(&self) -> Reply {
        let Tuple { pod, pod_port, server, server_port, proto } = *self;
        Reply { egress: pod, port: pod_port, server, server_port, proto }
    }
}

impl Reply {
    /// Returns the tuple that the flow would have without translation.
    pub fn mirrored(&self) -> Tuple {
        let Reply { egress, port, server, server_port, proto } = *self;
        Tuple { pod: egress, pod_port: port, server, server_port, proto }
    }
}

/// The fate of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    Dropped,
    /// Left to the stack unchanged.
    Passed,
    /// Translated to this, and sent.
    Sent(T),
}

/// How a pod's packet comes to a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Through the pod's interface.
    Whole,
    /// Through the pod's interface, as a fragment of a datagram.
    Fragment,
    /// At the node's exit, after the firewall has let it pass.
    Asked,
}

/// A flow that has sent something.
#[derive(Clone, Copy, Debug)]
struct Flow {
    reply: Reply,
    /// The version of the tables under which its egress IP was chosen, if the model followed the choice.
    chosen: Option<u32>,
    /// The version of the tables under which it sent last.
    tables: u32,
    /// TCP flags that either side has sent since it opened.
    out: u8,
    back: u8,
    /// Whether its behaviour is determined: no part of it was lost, and it did not expire.
    certain: bool,
}

impl Flow {
    /// Returns whether its port may be given to another flow.
    fn is_closed(&self) -> bool {
        (self.out | self.back) & RST != 0 || self.out & self.back & FIN != 0
    }
}

/// The node, as far as the rules concern it.
#[derive(Debug, Default)]
pub struct Nat {
    /// Whether the host's firewall is asked before a flow's first packet.
    pub firewall: bool,
    /// The egress IPs of the policy now; without any, nothing is sent.
    pub slots: BTreeSet<IpAddr>,
    /// The addresses that the policy selects now.
    pub selected: BTreeSet<IpAddr>,
    /// The blocks that this node holds.
    pub blocks: BTreeSet<u16>,
    /// The number of changes of the tables.
    tables: u32,
    flows: BTreeMap<Tuple, Flow>,
    /// The owner of each reply: the last flow that sent with it.
    owners: BTreeMap<Reply, Tuple>,
    /// The replies that the firewall has let pass.
    confirmed: BTreeSet<Reply>,
    /// TCP connections whose first segment a pod has sent.
    opened: BTreeSet<Tuple>,
    /// Flows with a packet at the firewall.
    asked: BTreeSet<Tuple>,
}

type Verdict = Result<(), String>;

fn rule(holds: bool, words: impl Fn() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(words()) }
}

impl Nat {
    /// Returns a node that holds these blocks, before its first tables.
    pub fn new(firewall: bool, blocks: BTreeSet<u16>) -> Self {
        Self { firewall, blocks, ..Self::default() }
    }

    /// Records a change of the policy.
    pub fn tables_changed(&mut self, slots: BTreeSet<IpAddr>, selected: BTreeSet<IpAddr>) {
        self.tables += 1;
        (self.slots, self.selected) = (slots, selected);
        // Any flow except a TCP connection may be forgotten at any time once its pod is not selected.
        for (tuple, flow) in &mut self.flows {
            flow.certain &= tuple.proto == TCP || self.selected.contains(&tuple.pod);
        }
    }

    /// Records that a part of a flow was lost, or that the flow has expired.
    pub fn lost(&mut self, tuple: &Tuple) {
        if let Some(flow) = self.flows.get_mut(tuple) {
            flow.certain = false;
        }
    }

    /// Returns the flow that a reply belongs to.
    pub fn owner(&self, reply: &Reply) -> Option<Tuple> {
        self.owners.get(reply).copied()
    }

    /// Returns the reply of a flow.
    pub fn reply(&self, tuple: &Tuple) -> Option<Reply> {
        self.flows.get(tuple).map(|flow| flow.reply)
    }

    /// Returns the replies that the outside knows.
    pub fn replies(&self) -> Vec<Reply> {
        self.owners.keys().copied().collect()
    }

    /// Returns the flows that have sent something.
    pub fn known(&self) -> Vec<Tuple> {
        self.flows.keys().copied().collect()
    }

    /// Returns one of the flows with a packet at the firewall.
    pub fn asked(&self, nth: usize) -> Option<Tuple> {
        self.asked.iter().nth(nth % self.asked.len().max(1)).copied()
    }

    /// Returns whether a flow keeps its port: nothing has happened that frees the port for another flow.
    pub fn stays(&self, tuple: &Tuple) -> bool {
        let ended = |flow: &Flow| (flow.out | flow.back) & (FIN | RST) != 0;
        self.flows.get(tuple).is_none_or(|flow| flow.certain && flow.tables == self.tables && !ended(flow))
    }

    /// Returns whether any packet of the flow has reached the outside.
    pub fn has_sent(&self, tuple: &Tuple) -> bool {
        self.flows.contains_key(tuple)
    }

    /// Records that a pod has sent the first segment of a connection.
    pub fn opened(&mut self, tuple: Tuple) {
        self.opened.insert(tuple);
    }

    /// Takes over the tables' entry for a flow after steps that the model did not follow.
    pub fn resume(&mut self, tuple: Tuple, reply: Option<Reply>) {
        self.lost(&tuple);
        if let Some(reply) = reply {
            self.flows
                .insert(tuple, Flow { reply, tables: self.tables, chosen: None, out: 0, back: 0, certain: false });
        }
    }

    /// Takes over the owner of a reply after such steps, and whether the firewall lets the reply in.
    pub fn belongs(&mut self, reply: Reply, tuple: Tuple, confirmed: bool) {
        self.owners.insert(reply, tuple);
        if confirmed {
            self.confirmed.insert(reply);
        } else {
            self.confirmed.remove(&reply);
        }
    }

    /// Returns whether both halves of a flow must exist.
    pub fn is_certain(&self, tuple: &Tuple) -> bool {
        self.flows.get(tuple).is_some_and(|flow| flow.certain)
    }

    /// Returns whether only a lost half, expiry or another policy may take the flow's egress IP and port from it.
    fn keeps(&self, flow: &Flow, opening: bool) -> bool {
        let same = flow.tables == self.tables;
        // After a closed connection, egress IPs added to the policy since the last choice get their share.
        let free = opening && flow.is_closed() && flow.chosen != Some(self.tables);
        flow.certain && !free && (same || !opening && self.slots.contains(&flow.reply.egress))
    }

    /// Judges a pod's packet, sent with the pod's own address.
    pub fn pod_sent(&mut self, tuple: Tuple, flags: u8, how: How, outcome: Outcome<Reply>) -> Verdict {
        let asked = how == How::Asked;
        let tcp = tuple.proto == TCP;
        let opening = tcp && flags & (SYN | ACK) == SYN;
        let selected = self.selected.contains(&tuple.pod);
        let flow = self.flows.get(&tuple).copied();
        let live = flow.filter(|flow| self.keeps(flow, opening));
        if opening {
            self.opened.insert(tuple);
        }
        match outcome {
            Outcome::Sent(reply) => {
                rule(selected, || "no policy selects the pod, and its packet is translated".into())?;
                rule(self.slots.contains(&reply.egress), || {
                    format!("{} is not an egress IP of its policy", reply.egress)
                })?;
                let block = port_block::of_port(reply.port);
                rule(block.is_some_and(|b| self.blocks.contains(&b)), || format!("port {} is not leased", reply.port))?;
                let same =
                    (reply.server, reply.server_port, reply.proto) == (tuple.server, tuple.server_port, tuple.proto);
                rule(same, || format!("it goes to {reply:?}"))?;
                let confirmed = !self.firewall || asked || self.confirmed.contains(&reply);
                rule(confirmed, || "the firewall was not asked".into())?;
                let put_together = !self.firewall || how != How::Fragment;
                rule(put_together, || "a fragment is sent past a firewall that knows no fragments".into())?;
                if let Some(live) = live {
                    rule(live.reply == reply, || format!("a live flow changes from {:?} to {reply:?}", live.reply))?;
                }
                if let Some(owner) = self.owners.get(&reply).filter(|owner| **owner != tuple) {
                    let other = self.flows.get(owner);
                    let taken = other.is_some_and(|o| o.reply == reply && o.certain && !o.is_closed());
                    rule(!taken, || format!("two flows with one tuple {reply:?}: this one and {owner:?}"))?;
                }
                self.sent(tuple, flags, opening, reply, asked);
                Ok(())
            }
            Outcome::Passed => {
                if asked && selected {
                    return Err("the firewall has let it pass, but it is not sent".into());
                }
                if !selected {
                    // A remaining connection is severed: its peer knows it by another address.
                    let severed = tcp && !opening && flow.is_some_and(|flow| flow.certain);
                    rule(!severed, || "a connection continues with the pod's own address".into())?;
                    self.flows.remove(&tuple);
                    return Ok(());
                }
                rule(self.firewall, || "a selected pod's packet passes".into())?;
                let known = !tcp || self.opened.contains(&tuple);
                rule(known, || "a segment of a connection that its pod has never opened passes".into())?;
                let confirmed = live.is_some_and(|live| self.confirmed.contains(&live.reply) && !opening);
                // The stack reassembles datagrams.
                rule(!confirmed || how == How::Fragment, || "the firewall sees a confirmed flow".into())?;
                // The connection is reopened, or the tuple is another flow now, which has sent nothing.
                match live {
                    Some(live) if opening && how != How::Fragment => drop(self.confirmed.remove(&live.reply)),
                    // Fragments do not show whether it is reopened: all of them pass. The other half of a lost flow may remain.
                    _ if opening => self.lost(&tuple),
                    _ => {}
                }
                if live.is_none() {
                    self.lost(&tuple);
                }
                self.asked.insert(tuple);
                Ok(())
            }
            Outcome::Dropped => {
                let fine = !selected
                    || opening
                    || live.is_none()
                    || self.firewall
                    || !self.slots.contains(&live.unwrap().reply.egress);
                rule(fine, || "a live flow's packet is dropped".into())?;
                if live.is_none() {
                    self.lost(&tuple);
                }
                Ok(())
            }
        }
    }

    fn sent(&mut self, tuple: Tuple, flags: u8, opening: bool, reply: Reply, asked: bool) {
        let same = self.flows.get(&tuple).filter(|flow| flow.reply == reply).copied();
        let chosen = same.map_or(Some(self.tables), |flow| flow.chosen);
        let new = Flow { reply, tables: self.tables, chosen, out: 0, back: 0, certain: true };
        let mut flow = same.filter(|flow| flow.certain).unwrap_or(new);
        if opening {
            (flow.out, flow.back) = (0, 0);
        }
        flow.out |= flags;
        flow.tables = self.tables;
        self.flows.insert(tuple, flow);
        self.owners.insert(reply, tuple);
        if asked {
            self.confirmed.insert(reply);
            self.asked.remove(&tuple);
        }
    }

    /// Judges a pod's ICMP error about an answer that it got. A sent error shows the flow's reply.
    pub fn pod_complained(&self, about: &Tuple, own: bool, outcome: Outcome<Reply>) -> Verdict {
        let Outcome::Sent(reply) = outcome else { return Ok(()) };
        rule(own, || "an error about another pod's flow is sent".into())?;
        rule(self.selected.contains(&about.pod), || "no policy selects the pod".into())?;
        rule(self.slots.contains(&reply.egress), || format!("{} is not an egress IP of its policy", reply.egress))?;
        rule(self.owners.get(&reply) == Some(about), || format!("{reply:?} is not this flow's"))?;
        rule(!self.firewall || self.confirmed.contains(&reply), || "an error about a flow that is not confirmed".into())
    }

    /// Judges a packet whose sender does not own its source address.
    pub fn forged<T: Debug>(outcome: Outcome<T>, anybodys: bool) -> Verdict {
        match outcome {
            Outcome::Dropped => Ok(()),
            Outcome::Passed if anybodys => Ok(()),
            outcome => Err(format!("a forged packet: {outcome:?}")),
        }
    }

    /// Judges a packet from outside, or an error about one of the flow's packets, and the flow that it was delivered to.
    pub fn outside_sent(&mut self, reply: Reply, flags: u8, error: bool, outcome: Outcome<Tuple>) -> Verdict {
        let owner = self.owners.get(&reply).copied();
        match outcome {
            Outcome::Passed => Err("a packet for an egress IP reaches the stack".into()),
            Outcome::Sent(tuple) => {
                rule(owner == Some(tuple), || format!("delivered to {tuple:?}, but it is for {owner:?}"))?;
                rule(!self.firewall || self.confirmed.contains(&reply), || {
                    "delivered without the firewall's decision".into()
                })?;
                if !error && let Some(flow) = self.flows.get_mut(&tuple).filter(|flow| flow.reply == reply) {
                    flow.back |= flags;
                }
                Ok(())
            }
            Outcome::Dropped => {
                let flow = owner.and_then(|owner| self.flows.get(&owner)).filter(|flow| flow.reply == reply);
                let live = flow.is_some_and(|flow| flow.certain && flow.tables == self.tables && !flow.is_closed());
                let due = live && (!self.firewall || self.confirmed.contains(&reply));
                rule(!due, || format!("a reply of a live flow is dropped: {reply:?} is {owner:?}, {flow:?}"))
            }
        }
    }
}
