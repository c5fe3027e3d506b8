//! Steps that are global functions: the verifier checks each once by itself, with any packet, instead of once for each way
//! that leads to it. What they need they read from the packet again.

use crate::{family::Family, firewall, gateway, icmp, own, packet::Packet, steer};
use aya_ebpf::bindings::__sk_buff;
use egress_common::{V4, V6};

macro_rules! once {
    ($($(#[$doc:meta])* $name:ident ($v4:ident, $v6:ident) = $module:ident::$step:ident;)*) => {
        $(
            #[unsafe(no_mangle)]
            #[inline(never)]
            extern "C" fn $v4(skb: *mut __sk_buff) -> u64 {
                $module::$step::<V4>(&Packet::from_raw(skb))
            }

            #[unsafe(no_mangle)]
            #[inline(never)]
            extern "C" fn $v6(skb: *mut __sk_buff) -> u64 {
                $module::$step::<V6>(&Packet::from_raw(skb))
            }

            $(#[$doc])*
            #[inline(always)]
            pub fn $name<F: Family>(pkt: &Packet) -> u64 {
                if F::VERSION == 4 { $v4(pkt.raw()) } else { $v6(pkt.raw()) }
            }
        )*
    };
}

once! {
    /// [`steer::established`].
    established(established_v4, established_v6) = steer::established;
    /// [`steer::first`].
    first(first_v4, first_v6) = steer::first;
    /// [`icmp::outgoing`].
    outgoing(outgoing_v4, outgoing_v6) = icmp::outgoing;
    /// [`firewall::passed`].
    passed(passed_v4, passed_v6) = firewall::passed;
    /// [`gateway::inward`].
    inward(inward_v4, inward_v6) = gateway::inward;
    /// [`gateway::asked`].
    asked(asked_v4, asked_v6) = gateway::asked;
    /// [`own::whose`].
    whose(whose_v4, whose_v6) = own::whose;
}
