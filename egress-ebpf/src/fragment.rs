//! Later fragments carry no ports: the first one of a datagram leaves them here.

use crate::{family::Family, parse::Ip, parse::Transport};
use egress_common::flow::{Fragment, FragmentKey};

#[inline(always)]
fn key<F: Family>(ip: &Ip<F>) -> FragmentKey<F> {
    FragmentKey { src: ip.src, dst: ip.dst, id: ip.id, proto: ip.proto }
}

/// Keeps the ports of a first fragment.
#[inline(always)]
pub fn keep<F: Family>(ip: &Ip<F>, t: &Transport) {
    let value = Fragment { src_port: t.src_port, dst_port: t.dst_port };
    // A full table evicts the oldest datagram, so this does not fail for want of room.
    let _ = F::fragments().insert(key::<F>(ip), value, 0);
}

/// The ports of the datagram that a later fragment belongs to.
#[inline(always)]
pub fn recall<F: Family>(ip: &Ip<F>) -> Option<Fragment> {
    // SAFETY: the entry is never changed in place.
    unsafe { F::fragments().get(key::<F>(ip)) }.copied()
}
