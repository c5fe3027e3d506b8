//! Notes (see [`Packet::note`](crate::packet::Packet::note)): what the programs of this node know about a packet that the stack, or
//! another program, has in between. No socket can set one, and no rule of netfilter; the kernel copies it to fragments and segments.
//! What comes in by a pod's interface, or from outside of the node, has lost what it brought along.

/// Nothing is known.
pub const NONE: u32 = 0;
/// A reply on its way into a pod.
pub const DELIVERED: u32 = 0x5350;
/// A copy for the node's own stack. It has no bit in common with the others.
pub const COPY: u32 = 0xa000;
/// A pod of this node sent it, and it has passed the gate; nothing of it is ours.
pub const POD: u32 = 0x5352;
/// Left to the stack by `pod_egress`, to be translated at the exit.
pub const ASKED: u32 = 0x5353;
/// Sent by a program of ours: the exit lets it go by.
pub const SENT: u32 = 0x5354;

const _: () = assert!((DELIVERED | POD | ASKED | SENT) & COPY == 0);
