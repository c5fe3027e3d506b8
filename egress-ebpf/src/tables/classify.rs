//! Which policy, if any, a packet of a pod belongs to.

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

/// The answer for one source and destination.
pub enum Class {
    /// No policy: the packet is not ours. The class of the pod that sent it, 0 if no policy selects that pod; and the exception
    /// for its destination, one of [`except`], [`except::NONE`] if the class is 0.
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

/// The policy for packets that pods of this class send to `dst`, or else the exception for `dst`.
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

/// Whether policies select the pod with this address.
#[inline(always)]
pub fn is_selected<F: Family>(src: F) -> bool {
    match copied(F::endpoints(), &src) {
        Ok(endpoint) => endpoint.class != 0,
        Err(miss) => miss == Miss::Changing,
    }
}

/// Whether the packet's source is a pod that is known to be behind another interface than the one where the packet arrived, or
/// on another node.
#[inline(always)]
pub fn is_spoofed<F: Family>(pkt: &Packet, src: F) -> bool {
    match copied(F::endpoints(), &src) {
        Ok(endpoint) => endpoint.ifindex != 0 && endpoint.ifindex != pkt.ifindex(),
        Err(Miss::Changing) => true,
        Err(Miss::Absent) => matches!(F::excepts().get(&Key::new(F::BITS, src)), Some(&except::ELSEWHERE)),
    }
}

/// Why no policy touches this destination: one of [`except`].
#[inline(always)]
fn exception<F: Family>(dst: F) -> u32 {
    if F::never_leaves(dst) {
        return except::ANYWHERE;
    }
    F::excepts().get(&Key::new(F::BITS, dst)).copied().unwrap_or(except::NONE)
}

/// How often an entry is read again if it is replaced while it is read.
const READS: u32 = 4;

/// Why there is no copy of an entry.
#[derive(PartialEq, Eq)]
enum Miss {
    /// There is no entry.
    Absent,
    /// There is one, but it was replaced during each read. Nothing passes because of that.
    Changing,
}

/// A copy of an entry, valid if its checksum fits. A look-up that meets memory of another key misses the entry that has replaced it: only the
/// second miss counts.
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

/// [`READS`], hidden from LLVM, which would unroll the loop. The programs are a seventh smaller with it, and the verifier takes a tenth less time.
#[inline(always)]
fn reads() -> u32 {
    let reads: u32;
    // SAFETY: it only sets the register.
    unsafe { core::arch::asm!("{0} = {1}", out(reg) reads, const READS, options(pure, nomem, nostack)) };
    reads
}

/// Whether the pod with this address has another number than `id`: it is not the one that had the address before.
#[inline(always)]
pub fn is_another<F: Family>(addr: F, id: u32) -> bool {
    matches!(copied(F::endpoints(), &addr), Ok(now) if now.id != id)
}

/// The part of a policy that serves one address family.
#[inline(always)]
pub fn policy<F: Family>(policy: u32) -> Option<Policy> {
    copied(&POLICIES, &PolicyKey { policy, family: F::VERSION }).ok()
}

/// [`Policy::leaves_as_node`], by the policy's index.
#[inline(always)]
pub fn leaves_as_node<F: Family>(index: u32) -> bool {
    policy::<F>(index).is_some_and(|policy| policy.leaves_as_node())
}

/// The slot that an egress IP is in a policy, if it is one.
#[inline(always)]
pub fn member(policy: u32, egress: u32) -> Option<Member> {
    copied(&MEMBERS, &MemberKey { policy, egress }).ok()
}
