//! Finds the policy, if any, that a pod's packet belongs to.

use crate::{
    headers::packet::Packet,
    tables::{
        family::Family,
        maps::{MEMBERS, POLICIES},
    },
};
use aya_ebpf::btf_maps::{HashMap, lpm_trie::Key};
use egress_common::{
    config::{DatapathConfig, flags},
    endpoint::{Checked, Endpoint, Member, MemberKey, NO_POLICY, Policy, PolicyKey, RouteKey, except},
};

/// The classification of a source and a destination.
pub enum Class {
    /// No policy: the packet is not ours. The first value is the class of the pod that sent it, 0 if no policy selects
    /// that pod; the second is the exception for its destination, one of [`except`], [`except::NONE`] if the class is 0.
    Outside(u32, u32),
    /// The source is unknown while a selected pod is starting.
    Held,
    /// The policy with this index.
    Policy(u32, Endpoint),
}

/// Classifies a source and a destination.
#[inline(always)]
pub fn classify<F: Family>(config: &DatapathConfig, src: F, dst: F) -> Class {
    let endpoint = match copied(F::endpoints(), &src) {
        Ok(endpoint) => endpoint,
        Err(Miss::Changing) => return Class::Held,
        Err(Miss::Absent) => {
            // An unspecified or link-local source asks for addresses and neighbours; it is never forwarded.
            let held = config.flags & flags::HOLD != 0 && !F::never_leaves(src) && exception(dst) == except::NONE;
            return if held { Class::Held } else { Class::Outside(0, except::NONE) };
        }
    };
    match route(endpoint.class, dst) {
        Ok(policy) => Class::Policy(policy, endpoint),
        Err(exception) => Class::Outside(endpoint.class, exception),
    }
}

/// Returns the policy for packets that pods of this class send to `dst`, or else the exception for `dst`.
#[inline(always)]
pub fn route<F: Family>(class: u32, dst: F) -> Result<u32, u32> {
    if class == 0 {
        return Err(except::NONE);
    }
    match exception(dst) {
        except::NONE => {
            let policy = F::routes().get(&Key::new(32 + F::BITS, RouteKey { class, addr: dst })).copied();
            policy.filter(|policy| *policy != NO_POLICY).ok_or(except::NONE)
        }
        exception => Err(exception),
    }
}

/// Returns whether policies select the pod with this address.
#[inline(always)]
pub fn is_selected<F: Family>(src: F) -> bool {
    match copied(F::endpoints(), &src) {
        Ok(endpoint) => endpoint.class != 0,
        Err(miss) => miss == Miss::Changing,
    }
}

/// Returns whether the packet's source is a pod that is known to be behind an interface other than
/// the one where the packet arrived, or on another node.
#[inline(always)]
pub fn is_spoofed<F: Family>(pkt: &Packet, src: F) -> bool {
    match copied(F::endpoints(), &src) {
        Ok(endpoint) => endpoint.ifindex != 0 && endpoint.ifindex != pkt.ifindex(),
        Err(Miss::Changing) => true,
        Err(Miss::Absent) => matches!(F::excepts().get(&Key::new(F::BITS, src)), Some(&except::ELSEWHERE)),
    }
}

/// Returns the reason why no policy applies to this destination: one of [`except`].
#[inline(always)]
fn exception<F: Family>(dst: F) -> u32 {
    if F::never_leaves(dst) {
        return except::ANYWHERE;
    }
    F::excepts().get(&Key::new(F::BITS, dst)).copied().unwrap_or(except::NONE)
}

/// Number of attempts to read an entry that is replaced meanwhile.
const READS: u32 = 4;

/// The reason why there is no copy of an entry.
#[derive(PartialEq, Eq)]
enum Miss {
    /// There is no entry.
    Absent,
    /// There is an entry, but it was replaced during each read. No packet may pass because of that.
    Changing,
}

/// Returns a copy of an entry, valid if its checksum matches. A lookup that meets memory of another
/// key misses the entry that has replaced it: only the second miss counts.
#[inline(always)]
fn copied<K, V: Checked<K>, const M: usize, const F: usize>(map: &HashMap<K, V, M, F>, key: &K) -> Result<V, Miss> {
    for _ in 0..reads() {
        let Some(entry) = map.get_ptr(key).or_else(|| map.get_ptr(key)) else { return Err(Miss::Absent) };
        // SAFETY: a pointer into the map.
        let copy = unsafe { entry.read_volatile() };
        if copy.is_whole(key) {
            return Ok(copy);
        }
    }
    Err(Miss::Changing)
}

/// Returns [`READS`], hidden from LLVM: without unrolling, the programs are a seventh smaller and the verifier takes a tenth less time.
#[inline(always)]
fn reads() -> u32 {
    let reads: u32;
    // SAFETY: it only sets the register.
    unsafe { core::arch::asm!("{0} = {1}", out(reg) reads, const READS, options(pure, nomem, nostack)) };
    reads
}

/// Returns whether the pod with this address has a number other than `id`: it is not the pod that had the address before.
#[inline(always)]
pub fn is_another<F: Family>(addr: F, id: u32) -> bool {
    matches!(copied(F::endpoints(), &addr), Ok(now) if now.id != id)
}

/// Returns the part of a policy that serves one address family.
#[inline(always)]
pub fn policy<F: Family>(policy: u32) -> Option<Policy> {
    copied(&POLICIES, &PolicyKey { policy, family: F::VERSION }).ok()
}

/// Returns [`Policy::leaves_as_node`] for the policy with this index.
#[inline(always)]
pub fn leaves_as_node<F: Family>(index: u32) -> bool {
    policy::<F>(index).is_some_and(|policy| policy.leaves_as_node())
}

/// Returns the slot of an egress IP in a policy, if it has one.
#[inline(always)]
pub fn member(policy: u32, egress: u32) -> Option<Member> {
    copied(&MEMBERS, &MemberKey { policy, egress }).ok()
}
