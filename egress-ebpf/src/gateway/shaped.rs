//! Sends on packets that have passed the shaper: out, or to the node that their port is leased to.

use crate::{
    gateway::forward,
    headers::packet::{ETH_LEN, IPV4, IPV6, Mac, Packet},
    tables::{egress, family::Family, maps::CONFIG},
    transports::shaper::{IN, MACS, OUT, passed},
};
use egress_common::{
    V4, V6,
    verdict::{Counter, Verdict},
};

/// Handles a packet from the shaper. Returns the argument for [`forward::delivered`]. It is a
/// separate function, because the variables of several do not fit on the stack.
#[inline(never)]
pub fn leave<F: Family>(pkt: &Packet) -> u64 {
    let Some(mac) = pkt.read::<Mac>(0) else { return Verdict::Drop(Counter::DropMalformed).to_bits() };
    if mac == MACS[1] { leave_inwards::<F>(pkt) } else { leave_outwards::<F>(pkt).to_bits() }
}

#[inline(always)]
fn leave_outwards<F: Family>(pkt: &Packet) -> Verdict {
    let Some(src) = pkt.read::<F>(ETH_LEN + F::SRC) else { return Verdict::Drop(Counter::DropMalformed) };
    let Some((egress, _)) = egress::find(src) else { return Verdict::Drop(Counter::DropNotOwner) };
    passed(pkt, egress, OUT);
    Verdict::leave(egress)
}

#[inline(always)]
fn leave_inwards<F: Family>(pkt: &Packet) -> u64 {
    let Ok(ip) = F::parse(pkt) else { return Verdict::Drop(Counter::DropMalformed).to_bits() };
    let (Some((egress, e)), Some(config)) = (egress::find(ip.dst), CONFIG.get(0)) else {
        return Verdict::Drop(Counter::DropNotOwner).to_bits();
    };
    passed(pkt, egress, IN);
    forward::to_source::<F>(pkt, config, &ip, egress, e)
}

/// Handles a packet that came out of the shaper, by its EtherType.
#[inline(always)]
pub fn receive(pkt: &Packet) -> u64 {
    match pkt.protocol() {
        IPV4 => forward::delivered::<V4>(pkt, leave::<V4>(pkt)),
        IPV6 => forward::delivered::<V6>(pkt, leave::<V6>(pkt)),
        // The devices have no addresses: nothing else belongs here.
        _ => Verdict::Drop(Counter::DropStranger).to_bits(),
    }
}
