//! Reports decisions through `aya-log`: one line each, with the packet's number in front.
//!
//! Numbers to which only the agent's tables give a meaning are in angle brackets, with their kind:
//! `egressctl trace`, which prints the lines, has the names.

use super::{Step, notes::under_way};
use aya_log_ebpf::info;
use egress_common::verdict::{Counter, bits};

/// The kernel's code for a redirect (`TC_ACT_REDIRECT`).
const REDIRECT: u32 = 7;

/// Reports the packet in progress.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn trace_frame_v4(number: u32) -> u64 {
    let Some(n) = under_way() else { return 0 };
    let (src, dst) = (u32::from_be(n.src[3]), u32::from_be(n.dst[3]));
    let [from, to] = n.ports.map(|port| u16::from_be(port as u16));
    info!(
        (),
        "{} > <hook {}> {:i}:{} to {:i}:{} <proto {}><flags {}> {} bytes",
        number,
        n.hook,
        src,
        from,
        dst,
        to,
        n.proto,
        n.flags,
        n.len
    );
    0
}

/// Reports the packet in progress over IPv6, or a packet whose headers cannot be read.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn trace_frame_v6(number: u32) -> u64 {
    let Some(n) = under_way() else { return 0 };
    if n.family == 0 {
        info!((), "{} > <hook {}> unreadable headers, {} bytes", number, n.hook, n.len);
        return 0;
    }
    let [from, to] = n.ports.map(|port| u16::from_be(port as u16));
    info!(
        (),
        "{} > <hook {}> [{:i}]:{} to [{:i}]:{} <proto {}><flags {}> {} bytes",
        number,
        n.hook,
        halves(&n.src),
        from,
        halves(&n.dst),
        to,
        n.proto,
        n.flags,
        n.len
    );
    0
}

/// Returns an address in the form that `aya-log` takes.
#[inline(always)]
fn halves(words: &egress_common::V6) -> [u8; 16] {
    let mut octets = [0; 16];
    for (to, word) in octets.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    octets
}

/// Reports one decision.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn trace_step(number: u32, step: u32, a: u32, b: u32) -> u64 {
    macro_rules! tell {
        ($($step:ident: $text:literal $(, $number:ident)*;)*) => {
            match step {
                $(step if step == Step::$step as u32 => info!((), $text, number $(, $number)*),)*
                _ => {}
            }
        };
    }
    tell! {
        Flow: "{} it belongs to a flow of policy <policy {}>", a;
        Anew: "{} the tables have changed since its flow began: it is classified again";
        Unselected: "{} no policy selects its sender";
        Elsewhere: "{} no policy that selects its sender has this destination";
        Policy: "{} it has no flow yet, and policy <policy {}> matches the pod and the destination", a;
        Opened: "{} a flow is opened, with port {} of <egress {}>", b, a;
        Asked: "{} the host's routes and firewall decide first: it is translated where it leaves";
        Confirmed: "{} the host let it pass, which confirms its flow";
        Translated: "{} its source becomes port {} of <egress {}>", b, a;
        LeftAlone: "{} the connection was opened from outside, or is older than the policy: it is left alone";
        Remembered: "{} a connection is opened from outside: the pod's answers will be left alone";
        Expires: "{} its hop limit ends here: the host answers it";
        AsNode: "{} the policy has no gateway, and lets its pods leave with the node's address";
        Fragment: "{} it is a fragment that arrived before the first one";
        Quotes: "{} it is an ICMP error: the quoted packet decides";
        TooLarge: "{} it is too large: the pod is told that {} bytes fit", a;
        Answer: "{} it answers a flow of the pod: its destination becomes the pod, port {}", b;
        Delivered: "{} it is a reply, translated on this node";
        ToNode: "{} it goes to node <node {}>, <purpose {}>", a, b;
        Leaves: "{} this node is the gateway of <egress {}>", a;
    }
    0
}

/// Reports the packet's outcome, given the halves of a verdict's bits.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn trace_verdict(number: u32, verdict: u32, of: u32) -> u64 {
    match verdict as u64 {
        bits::PASS => info!((), "{} = passed on to the host's stack", number),
        bits::DROP => info!((), "{} = dropped: <drop {}>", number, of),
        bits::TAKEN if of == REDIRECT => info!((), "{} = sent", number),
        _ => info!((), "{} = dropped: <drop {}>", number, Counter::DropRedirect as u32),
    }
    0
}
