//! Counters of a policy's flows, for metrics.

use crate::{layout::map_type, verdict::Counter};

/// The account of all traffic that has no account of its own.
pub const OTHER: u16 = 0;

/// The egress IP in the key of the account for refused flows, which have none.
pub const REFUSED: u32 = 0;

map_type! {
    /// Key of `ACCOUNTS`, whose value is an index in `TRAFFIC`: one account for each policy, source namespace and egress IP.
    pub struct AccountKey {
        /// Number of the namespace ([`crate::endpoint::Endpoint::namespace`]).
        pub namespace: u32,
        /// Index of the policy.
        pub policy: u32,
        /// Index of the egress IP, or [`REFUSED`].
        pub egress: u32,
    } size 12
}

/// Why a new flow is refused, in the order of [`Traffic::refused`].
pub const REFUSALS: [Counter; 5] = [
    Counter::DropNoGateway,
    Counter::DropNoPort,
    Counter::DropPortShare,
    Counter::DropPodShare,
    Counter::DropTableFull,
];

map_type! {
    /// Value of `TRAFFIC`, one for each CPU.
    pub struct Traffic {
        /// Packets of pods that were translated and sent.
        pub sent_packets: u64,
        /// Bytes of their IP packets.
        pub sent_bytes: u64,
        /// Replies that were delivered to pods.
        pub received_packets: u64,
        /// Bytes of their IP packets.
        pub received_bytes: u64,
        /// New flows that were translated.
        pub opened: u64,
        /// Packets of new flows that were dropped, by reason ([`REFUSALS`]).
        pub refused: [u64; REFUSALS.len()],
    } size 80
}

impl Traffic {
    /// All counters at zero.
    pub const NONE: Self = Self {
        sent_packets: 0,
        sent_bytes: 0,
        received_packets: 0,
        received_bytes: 0,
        opened: 0,
        refused: [0; REFUSALS.len()],
    };

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.sent_packets, other.sent_packets),
            (&mut self.sent_bytes, other.sent_bytes),
            (&mut self.received_packets, other.received_packets),
            (&mut self.received_bytes, other.received_bytes),
            (&mut self.opened, other.opened),
        ];
        let refused = self.refused.iter_mut().zip(other.refused);
        for (sum, more) in pairs.into_iter().chain(refused) {
            *sum = sum.wrapping_add(more);
        }
    }
}
