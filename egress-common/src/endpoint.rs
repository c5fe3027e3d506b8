//! What the datapath knows about endpoints and policies.

use crate::{
    hash::{Words, checksum, multilinear},
    layout::map_type,
};

/// A value with a checksum over the value and its key, which detects torn and misplaced copies: see [`checksum`].
pub trait Checked<K>: Sized {
    /// Returns the checksum that the value should have.
    fn checksum(&self, key: &K) -> u32;
    /// Returns the checksum that the value has.
    fn check(&self) -> u32;
    /// Returns the value with another checksum.
    fn with_check(self, check: u32) -> Self;

    /// Returns the value with the checksum that it should have.
    fn sealed(self, key: &K) -> Self {
        let check = self.checksum(key);
        self.with_check(check)
    }
    /// Returns whether the value is complete and was written for this key.
    #[inline(always)]
    fn is_whole(&self, key: &K) -> bool {
        self.check() == self.checksum(key)
    }
}

/// Values of `EXCEPTS_*`.
pub mod except {
    /// No entry: policies may apply to the destination.
    pub const NONE: u32 = 0;
    /// No policy applies to the destination.
    pub const ANYWHERE: u32 = 1;
    /// The same, for addresses of another node's pods: no pod of this node has an address there.
    pub const ELSEWHERE: u32 = 2;
    /// No policy applies to it or to the address that NAT turns it into: the API server's Service, whose backends may be anywhere.
    pub const SERVICE: u32 = 3;
}

map_type! {
    /// Value of `ENDPOINTS_*`; the key is the pod's address.
    pub struct Endpoint {
        /// Number of the endpoint on this node.
        pub id: u32,
        /// Its class; 0 for a pod that no policy selects.
        pub class: u32,
        /// From this tick on, the pod may not send TCP segments of unknown connections; before it, they
        /// may be older than the policy that selected the pod. 0: the pod has no older connections.
        pub history_until: u32,
        /// The interface that the pod is behind, if the node's routes show it; 0: any.
        pub ifindex: u32,
        /// Number of its namespace on this node; 0 for a pod that no policy selects.
        pub namespace: u32,
        /// Its checksum ([`Checked`]).
        pub check: u32,
    } size 24
}

impl<A: Words> Checked<A> for Endpoint {
    #[inline(always)]
    fn checksum(&self, addr: &A) -> u32 {
        let own = [self.id, self.class, self.history_until, self.ifindex, self.namespace];
        checksum(addr.multilinear(1), multilinear(own, 5))
    }
    #[inline(always)]
    fn check(&self) -> u32 {
        self.check
    }
    fn with_check(self, check: u32) -> Self {
        Self { check, ..self }
    }
}

map_type! {
    /// Data part of the key of `ROUTES_*`; the prefix length counts the 32 bits of the class as well.
    pub struct RouteKey<A> {
        /// The class, host byte order (it always matches whole).
        pub class: u32,
        /// The destination.
        pub addr: A,
    } sizes 8, 20
}

/// Value of a route that excludes its destinations from every policy of the class.
pub const NO_POLICY: u32 = 0;

map_type! {
    /// Key of `POLICIES`.
    pub struct PolicyKey {
        /// Index of the policy.
        pub policy: u32,
        /// 4 or 6: a policy has slots of both families, and a table for each.
        pub family: u32,
    } size 8
}

map_type! {
    /// Value of `POLICIES`.
    pub struct Policy {
        /// [`policy_flags`].
        pub flags: u32,
        /// First chunk of its Maglev table.
        pub table: u32,
        /// Entries of its Maglev table; 0 when no slot can be used.
        pub table_len: u32,
        /// Seed of its flows' hash.
        pub seed: u32,
        /// Its checksum ([`Checked`]).
        pub check: u32,
    } size 20
}

impl Checked<PolicyKey> for Policy {
    #[inline(always)]
    fn checksum(&self, key: &PolicyKey) -> u32 {
        checksum(
            multilinear([key.policy, key.family], 1),
            multilinear([self.flags, self.table, self.table_len, self.seed], 3),
        )
    }
    #[inline(always)]
    fn check(&self) -> u32 {
        self.check
    }
    fn with_check(self, check: u32) -> Self {
        Self { check, ..self }
    }
}

impl Policy {
    /// Returns whether packets currently leave with the node's address: there is no usable slot, and the policy allows it.
    pub const fn leaves_as_node(&self) -> bool {
        self.table_len == 0 && self.flags & policy_flags::ON_NO_GATEWAY_NODE_IP != 0
    }
}

/// Bits of [`Policy::flags`].
pub mod policy_flags {
    /// Endpoints are assigned to egress IPs (map `ASSIGNMENTS`).
    pub const PER_ENDPOINT: u32 = 1;
    /// Without a usable slot, packets leave with the node's address instead of being dropped.
    pub const ON_NO_GATEWAY_NODE_IP: u32 = 2;
    /// TCP segments of unknown connections are dropped instead of left on their old path.
    pub const EXISTING_DROP: u32 = 4;
}

map_type! {
    /// Key of `ASSIGNMENTS`; the value is an index in `EGRESS_IPS`.
    pub struct AssignmentKey {
        /// [`Endpoint::id`].
        pub endpoint: u32,
        /// Index of the policy.
        pub policy: u32,
        /// 4 or 6: a policy has slots of both families.
        pub family: u32,
    } size 12
}

map_type! {
    /// Key of `MEMBERS`, which lists the slots: the egress IPs of each policy.
    pub struct MemberKey {
        /// Index of the policy.
        pub policy: u32,
        /// Index of the egress IP.
        pub egress: u32,
    } size 8
}

map_type! {
    /// Value of `MEMBERS`.
    pub struct Member {
        /// [`crate::egress::EgressIp::generation`] of the index.
        pub generation: u32,
        /// Number of the slot in its policy, for display.
        pub slot: u32,
        /// Weight of the slot.
        pub weight: u32,
        /// 1 while new flows may choose it.
        pub usable: u32,
        /// Its checksum ([`Checked`]).
        pub check: u32,
    } size 20
}

impl Checked<MemberKey> for Member {
    #[inline(always)]
    fn checksum(&self, key: &MemberKey) -> u32 {
        checksum(
            multilinear([key.policy, key.egress], 1),
            multilinear([self.generation, self.slot, self.weight, self.usable], 3),
        )
    }
    #[inline(always)]
    fn check(&self) -> u32 {
        self.check
    }
    fn with_check(self, check: u32) -> Self {
        Self { check, ..self }
    }
}

map_type! {
    /// One element of `MAGLEV`: a part of a policy's table, indices in `EGRESS_IPS`.
    pub struct MaglevChunk {
        /// The entries.
        pub egress: [u16; crate::limits::MAGLEV_CHUNK],
    } size 256
}
