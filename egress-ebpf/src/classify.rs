//! Which policy, if any, a packet of a pod belongs to.

use crate::{
    family::Family,
    maps::{MEMBERS, POLICIES},
    packet::Packet,
};
use aya_ebpf::btf_maps::{HashMap, lpm_trie::Key};
use egress_common::{
    config::{Config, flags},
    endpoint::{Endpoint, Member, MemberKey, NO_POLICY, Policy, PolicyKey, RouteKey, except},
};

/// The answer for one source and destination.
pub enum Class {
    /// No policy: the packet is not ours. The class of the pod that sent it; 0: of none that a policy selects.
    Outside(u32),
    /// The source is unknown while a selected pod is starting.
    Held,
    /// The policy with this index.
    Policy(u32, Endpoint),
}

/// Classifies a source and a destination.
#[inline(always)]
pub fn classify<F: Family>(config: &Config, src: F, dst: F) -> Class {
    let Some(endpoint) = copied(F::endpoints(), &src) else {
        // An unspecified or link-local source asks for addresses and neighbours; it is never forwarded.
        let held = config.flags & flags::HOLD != 0 && !F::never_leaves(src) && !excepted(dst);
        return if held { Class::Held } else { Class::Outside(0) };
    };
    match route(endpoint.class, dst) {
        Some(policy) => Class::Policy(policy, endpoint),
        None => Class::Outside(endpoint.class),
    }
}

/// The policy that has what pods of this class send to `dst`.
#[inline(always)]
pub fn route<F: Family>(class: u32, dst: F) -> Option<u32> {
    if class == 0 || excepted(dst) {
        return None;
    }
    F::routes()
        .get(&Key::new(32 + F::BITS, RouteKey { class, addr: dst }))
        .copied()
        .filter(|policy| *policy != NO_POLICY)
}

/// Whether policies select the pod with this address.
#[inline(always)]
pub fn is_selected<F: Family>(src: F) -> bool {
    // SAFETY: entries are replaced, not changed in place.
    matches!(unsafe { F::endpoints().get(src) }, Some(e) if e.class != 0)
}

/// Whether the packet's source is a pod that is known to be behind another interface than the packet came in by, or on another
/// node.
#[inline(always)]
pub fn is_spoofed<F: Family>(pkt: &Packet, src: F) -> bool {
    // SAFETY: entries are replaced, not changed in place.
    match unsafe { F::endpoints().get(src) } {
        Some(e) => e.ifindex != 0 && e.ifindex != pkt.ifindex(),
        None => matches!(F::excepts().get(&Key::new(F::BITS, src)), Some(&except::ELSEWHERE)),
    }
}

/// Whether no policy touches this destination.
#[inline(always)]
fn excepted<F: Family>(dst: F) -> bool {
    F::never_leaves(dst) || F::excepts().get(&Key::new(F::BITS, dst)).is_some()
}

/// Whether no policy touches what the node's NAT makes of this destination.
#[inline(always)]
pub fn is_free_service<F: Family>(dst: F) -> bool {
    matches!(F::excepts().get(&Key::new(F::BITS, dst)), Some(&except::SERVICE))
}

/// How often an entry that is replaced while it is read is read again.
const READS: u32 = 4;

/// A copy of an entry. The kernel gives an entry's memory to another key as soon as the entry is removed or replaced, also while it is read:
/// the copy counts if the entry is there afterwards.
#[inline(always)]
fn copied<K, V: Copy, const M: usize, const F: usize>(map: &HashMap<K, V, M, F>, key: &K) -> Option<V> {
    for _ in 0..READS {
        let entry = map.get_ptr(key)?;
        // SAFETY: a pointer into the map.
        let copy = unsafe { entry.read_volatile() };
        if map.get_ptr(key) == Some(entry) {
            return Some(copy);
        }
    }
    None
}

/// The part of a policy that serves one address family.
#[inline(always)]
pub fn policy<F: Family>(policy: u32) -> Option<Policy> {
    copied(&POLICIES, &PolicyKey { policy, family: F::VERSION })
}

/// [`Policy::leaves_as_node`], by the policy's index.
#[inline(always)]
pub fn leaves_as_node<F: Family>(index: u32) -> bool {
    policy::<F>(index).is_some_and(|policy| policy.leaves_as_node())
}

/// The slot that an egress IP is in a policy, if it is one.
#[inline(always)]
pub fn member(policy: u32, egress: u32) -> Option<Member> {
    copied(&MEMBERS, &MemberKey { policy, egress })
}
