//! Steps that are global functions: the verifier checks each once, for any packet, instead of on
//! each path that leads to it. Each step reads the fields that it needs from the packet again.

/// Creates a module `once` with such a function for each step of the module: `name(symbol for IPv4, symbol for IPv6) = step(argument);`.
macro_rules! once {
    ($($name:ident ($v4:ident, $v6:ident) = $step:ident ($($arg:ident: $type:ty)?);)*) => {
        /// Steps of this module as global functions.
        pub mod once {
            use crate::{headers::packet::Packet, tables::family::Family};
            use aya_ebpf::bindings::__sk_buff;
            use egress_common::{V4, V6};

            $(
                #[unsafe(no_mangle)]
                #[inline(never)]
                extern "C" fn $v4(skb: *mut __sk_buff $(, $arg: $type)?) -> u64 {
                    super::$step::<V4>(&Packet::from_raw(skb) $(, $arg)?)
                }

                #[unsafe(no_mangle)]
                #[inline(never)]
                extern "C" fn $v6(skb: *mut __sk_buff $(, $arg: $type)?) -> u64 {
                    super::$step::<V6>(&Packet::from_raw(skb) $(, $arg)?)
                }

                #[inline(always)]
                pub fn $name<F: Family>(pkt: &Packet $(, $arg: $type)?) -> u64 {
                    if F::VERSION == 4 { $v4(pkt.raw() $(, $arg)?) } else { $v6(pkt.raw() $(, $arg)?) }
                }
            )*
        }
    };
}
