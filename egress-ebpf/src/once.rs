//! Steps that are global functions: the verifier checks each once by itself, with any packet, instead of once for each way
//! that leads to it. What they need they read from the packet again.

use crate::{
    deliver, ended, family::Family, fragment, gateway, guard, icmp, large, masquerade, own, packet::Packet, service,
    steer, underlay,
};
use aya_ebpf::bindings::__sk_buff;
use egress_common::{V4, V6};

macro_rules! once {
    ($($(#[$doc:meta])* $name:ident ($v4:ident, $v6:ident) = $module:ident::$step:ident ($($arg:ident: $type:ty)?);)*) => {
        $(
            #[unsafe(no_mangle)]
            #[inline(never)]
            extern "C" fn $v4(skb: *mut __sk_buff $(, $arg: $type)?) -> u64 {
                $module::$step::<V4>(&Packet::from_raw(skb) $(, $arg)?)
            }

            #[unsafe(no_mangle)]
            #[inline(never)]
            extern "C" fn $v6(skb: *mut __sk_buff $(, $arg: $type)?) -> u64 {
                $module::$step::<V6>(&Packet::from_raw(skb) $(, $arg)?)
            }

            $(#[$doc])*
            #[inline(always)]
            pub fn $name<F: Family>(pkt: &Packet $(, $arg: $type)?) -> u64 {
                if F::VERSION == 4 { $v4(pkt.raw() $(, $arg)?) } else { $v6(pkt.raw() $(, $arg)?) }
            }
        )*
    };
}

once! {
    /// [`steer::established`].
    established(established_v4, established_v6) = steer::established();
    /// [`steer::first`].
    first(first_v4, first_v6) = steer::first();
    /// [`deliver::tend`].
    tend(tend_v4, tend_v6) = deliver::tend();
    /// [`ended::question`].
    question(question_v4, question_v6) = ended::question(verdict: u64);
    /// [`ended::reclaim`].
    reclaim(reclaim_v4, reclaim_v6) = ended::reclaim();
    /// [`icmp::outgoing`].
    outgoing(outgoing_v4, outgoing_v6) = icmp::outgoing();
    /// [`guard::caught`].
    caught(caught_v4, caught_v6) = guard::caught();
    /// [`service::unless_own`].
    unless_own(unless_own_v4, unless_own_v6) = service::unless_own(class: u32);
    /// [`service::leaving`].
    leaving(leaving_v4, leaving_v6) = service::leaving(class: u32);
    /// [`masquerade::remember`].
    remember(remember_v4, remember_v6) = masquerade::remember(egress: u32);
    /// [`large::answer`].
    answer(answer_v4, answer_v6) = large::answer(mtu: u32);
    /// [`fragment::gather`].
    gather(gather_v4, gather_v6) = fragment::gather();
    /// [`fragment::hold`].
    hold(hold_v4, hold_v6) = fragment::hold();
    /// [`fragment::release`].
    release(release_v4, release_v6) = fragment::release(place: u32);
    /// [`gateway::forward`].
    forward(forward_v4, forward_v6) = gateway::forward(from: u32);
    /// [`gateway::inward`].
    inward(inward_v4, inward_v6) = gateway::inward(asked: u32);
    /// [`own::whose`].
    whose(whose_v4, whose_v6) = own::whose();
    /// [`deliver::from_node`].
    from_node(from_node_v4, from_node_v6) = deliver::from_node(only: u32);
    /// [`underlay::outward`].
    outward(outward_v4, outward_v6) = underlay::outward();
}
