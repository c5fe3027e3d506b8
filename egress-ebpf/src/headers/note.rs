//! Notes (see [`Packet::note`]): knowledge about a packet that this node's programs keep in it while the stack, or
//! another program, has it. No socket and no netfilter rule can set a note; the kernel copies it to fragments and
//! segments. Packets that arrive on a pod's interface, or from outside the node, lose the note that they carry.

use crate::headers::packet::Packet;
use egress_common::{
    abi::{FIREWALL_PRIORITY, SEEN_PRIORITY},
    limits::MAX_CLASSES,
};

/// Index of `lo` in every network namespace (Linux, include/net/flow.h).
const LOOPBACK_IFINDEX: u32 = 1;

/// Nothing is known.
pub const NONE: u32 = 0;
/// A reply on its way into a pod.
pub const DELIVERED: u32 = 0x5350;
/// A copy for the node's own stack, its sockets included.
pub const COPY: u32 = 0x8000;
/// A copy for the connections that the node masquerades, not for its sockets.
pub const COPY_TO_FORWARD: u32 = 0x2000;
/// The bits of copies, which no other note has.
pub const COPIES: u32 = COPY | COPY_TO_FORWARD;
/// A pod of this node sent the packet, and it has passed the gate; our programs leave it alone.
pub const POD: u32 = 0x5352;
/// Left to the stack by `pod_egress`, to be translated at the exit.
pub const ASKED: u32 = 0x5353;
/// Sent by one of our programs: the exit lets it pass.
pub const SENT: u32 = 0x5354;
/// As [`POD`], to the API server's Service: no policy applies to the result of its NAT.
pub const FREE: u32 = 0x5355;
/// As [`POD`], with the class of the pod in the lower bits: the packet may open a flow, and was
/// left to the stack because no policy matches its destination.
const CLASS: u32 = 0x1000;

const _: () =
    assert!((DELIVERED | POD | ASKED | SENT | FREE | CLASS) & COPIES == 0 && (DELIVERED ^ CLASS) & !(CLASS - 1) != 0);
const _: () = assert!(MAX_CLASSES <= CLASS as usize);

/// Returns the note for a packet of a pod of this class.
#[inline(always)]
pub fn of_class(class: u32) -> u32 {
    CLASS | class & (CLASS - 1)
}

impl Packet {
    /// Leaves a note in the packet for the programs that see it next. Otherwise only packet
    /// schedulers of another kind (dsmark) use the field.
    #[inline(always)]
    pub fn note(&self, note: u32) {
        // SAFETY: the context pointer is valid while the program runs.
        unsafe { (&raw mut (*self.raw()).tc_index).write_volatile(note) }
    }

    #[inline(always)]
    fn noted(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (&raw const (*self.raw()).tc_index).read_volatile() }
    }

    /// Returns whether the packet has this note.
    #[inline(always)]
    pub fn is_noted(&self, note: u32) -> bool {
        self.noted() == note
    }

    /// Returns the class of the pod that sent the packet, if it is noted.
    #[inline(always)]
    pub fn noted_class(&self) -> Option<u32> {
        let note = self.noted();
        (note & !(CLASS - 1) == CLASS).then_some(note & (CLASS - 1))
    }

    /// Returns whether a pod of this node sent the packet, as noted by the gate.
    #[inline(always)]
    pub fn is_pods(&self) -> bool {
        self.is_noted(POD) || self.is_noted(FREE) || self.noted_class().is_some()
    }

    /// Returns whether a socket of this host created the packet: it still has that socket, or has been looped back. Packets
    /// from elsewhere may lack an interface of arrival, too, such as those that Open vSwitch has passed to its daemon.
    #[inline(always)]
    pub fn is_hosts(&self) -> bool {
        match self.ingress_ifindex() {
            0 => {
                // SAFETY: the context pointer is valid while the program runs; the socket's is only compared.
                let socket = unsafe { (&raw const (*self.raw()).__bindgen_anon_2.sk).read_volatile() };
                !socket.is_null()
            }
            index => index == LOOPBACK_IFINDEX,
        }
    }

    /// Clears the note of a packet from outside the node: where nodes are containers, the packet still has
    /// the note that another node's programs, or anything else there, have set. Only the node's own copy of
    /// a packet keeps its note. There is no branch, which would double the paths that the verifier follows.
    #[inline(always)]
    pub fn came_in(&self) {
        self.note(self.noted() & COPIES);
    }

    /// Returns whether the packet has this note, and clears the note.
    #[inline(always)]
    pub fn take_note(&self, note: u32) -> bool {
        let noted = self.is_noted(note);
        if noted {
            self.note(NONE);
        }
        noted
    }

    /// Prepares the packet for the host-stack path: the note is for the program at the exit, the priority for our nftables rules.
    #[inline(always)]
    pub fn ask(&self) {
        self.note(ASKED);
        self.set_priority(FIREWALL_PRIORITY);
    }

    /// Notes that `pod_egress` has seen the packet, unless it is on the host-stack path.
    #[inline(always)]
    pub fn note_seen(&self) {
        if self.priority() != FIREWALL_PRIORITY {
            self.set_priority(SEEN_PRIORITY);
        }
    }
}
