//! The hash that chooses a flow's slot, and the checksum of a map entry. The programs compute the
//! hash for every new flow; `egressctl explain` computes the same one.

/// Mixes one word into `h` (the 64-bit finaliser of MurmurHash3, Appleby 2011, over `h ^ word`).
#[inline(always)]
const fn mix(h: u64, word: u64) -> u64 {
    let mut x = h ^ word;
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// An address that can be hashed.
pub trait Words: Copy {
    /// Mixes the address into `h`.
    fn mix_into(self, h: u64) -> u64;
    /// [`multilinear`] of its words.
    fn multilinear(&self, first: u32) -> u64;
}
impl Words for crate::V4 {
    #[inline(always)]
    fn mix_into(self, h: u64) -> u64 {
        mix(h, self[0] as u64)
    }
    #[inline(always)]
    fn multilinear(&self, first: u32) -> u64 {
        multilinear(*self, first)
    }
}
impl Words for crate::V6 {
    #[inline(always)]
    fn mix_into(self, h: u64) -> u64 {
        mix(mix(h, self[0] as u64 | (self[1] as u64) << 32), self[2] as u64 | (self[3] as u64) << 32)
    }
    #[inline(always)]
    fn multilinear(&self, first: u32) -> u64 {
        multilinear(*self, first)
    }
}

/// The golden ratio, as a fraction of 2^64: odd, with bits spread evenly.
pub const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Multiplies a word by the golden ratio as a fraction of 2^32: distinct words stay distinct, and
/// the upper bits are a cheap hash (Knuth, The Art of Computer Programming, section 6.4).
#[inline(always)]
pub const fn scatter(word: u32) -> u32 {
    word.wrapping_mul((GOLDEN >> 32) as u32)
}

/// Returns the sum of the words, each multiplied by its own power of [`GOLDEN`]; the first exponent is `first`, at least 1. The upper half
/// is a hash (Lemire and Kaser, Strongly Universal String Hashing is Fast, 2014) whose multiplications are independent of each other.
#[inline(always)]
pub const fn multilinear<const N: usize>(words: [u32; N], first: u32) -> u64 {
    let (mut sum, mut i) = (0u64, 0);
    while i < N {
        sum = sum.wrapping_add(GOLDEN.wrapping_pow(first + i as u32).wrapping_mul(words[i] as u64));
        i += 1;
    }
    sum
}

/// Returns the checksum of a key and its value, given their [`multilinear`] sums, which use different powers.
///
/// The kernel reuses the memory of a hash table's entry for another key as soon as the entry is removed or replaced, even while a
/// program on another CPU reads it (`bpf_mem_alloc`, Linux 6.1). A program's copy of an entry is valid only if its checksum matches
/// the key and the copy: then all of it was written together and for this key, in whatever order the processors saw the bytes.
#[inline(always)]
pub const fn checksum(key: u64, value: u64) -> u32 {
    (key.wrapping_add(value) >> 32) as u32
}

/// Returns the hash of a flow, 31 bits (the top bit is clear, see [`crate::port_block::probe`]).
///
/// `seed` is the policy's, so that two policies spread the same pods differently.
#[inline(always)]
pub fn flow<A: Words>(key: &crate::flow::FlowKey<A>, seed: u32) -> u32 {
    let h = key.dst.mix_into(key.src.mix_into(seed as u64));
    let h = mix(h, key.src_port as u64 | (key.dst_port as u64) << 16 | (key.proto as u64) << 32);
    (h >> 33) as u32
}

/// Returns the 31-bit hash of an endpoint, which a `PerEndpoint` policy uses while the endpoint's own slot is unusable.
#[inline(always)]
pub fn endpoint<A: Words>(src: A, seed: u32) -> u32 {
    (src.mix_into(seed as u64) >> 33) as u32
}

/// Returns the hash of a flow's `n`th attempt at a slot, 31 bits: successive attempts are a golden-ratio step apart.
#[inline(always)]
pub const fn attempt(hash: u32, n: u32) -> u32 {
    hash.wrapping_add(scatter(n)) & 0x7fff_ffff
}

#[cfg(test)]
mod tests {
    extern crate std;
    use crate::{
        endpoint::{Checked, Member, MemberKey},
        flow::{FlowKey, Reverse, Target},
    };

    #[test]
    fn checksum_detects_values_of_other_keys_and_mixed_values() {
        let member = |generation, usable| Member { generation, slot: 3, weight: 1, usable, check: 0 };
        let key = MemberKey { policy: 1, egress: 2 };
        let (one, other) = (member(4, 1).sealed(&key), member(5, 0).sealed(&key));
        assert!(one.is_whole(&key) && other.is_whole(&key));
        assert!(!one.is_whole(&MemberKey { policy: 2, egress: 1 }));
        assert!(!Member { generation: other.generation, ..one }.is_whole(&key));
        assert!(!Member { check: other.check, ..one }.is_whole(&key));
    }

    #[test]
    fn the_checksum_of_a_reverse_entry_covers_every_field_that_routes_a_reply() {
        let key = FlowKey { src: [1, 2, 3, 4], dst: [5, 6, 7, 8], src_port: 9, dst_port: 10, proto: 17 };
        let to = Target { pod: [11, 12, 13, 14], port: 15, ifindex: 16, macs: [[17, 18, 19], [20, 21, 22]] };
        let mut all = std::vec![(key, to)];
        for word in 0..4 {
            let mut pod = to.pod;
            pod[word] += 1;
            all.push((key, Target { pod, ..to }));
            let mut src = key.src;
            src[word] += 1;
            all.push((FlowKey { src, ..key }, to));
        }
        for word in 0..3 {
            let mut macs = to.macs;
            macs[0][word] += 1;
            all.push((key, Target { macs, ..to }));
            macs = to.macs;
            macs[1][word] += 1;
            all.push((key, Target { macs, ..to }));
        }
        all.push((key, Target { port: 16, ..to }));
        all.push((key, Target { ifindex: 17, ..to }));
        all.push((FlowKey { src_port: 10, ..key }, to));
        all.push((FlowKey { dst_port: 11, ..key }, to));
        all.push((FlowKey { proto: 6, ..key }, to));
        let checks: std::collections::BTreeSet<u32> = all.iter().map(|(key, to)| Reverse::checksum(key, to)).collect();
        assert_eq!(checks.len(), all.len());
    }

    #[test]
    fn ports_and_addresses_spread_evenly() {
        // 3 slots, 3,000 consecutive source ports, 200 seeds: chi-squared with 2 degrees of freedom has the mean 2 and, over
        // 200 draws, a standard error of 0.14.
        let chi = |seed| {
            let mut n = [0f64; 3];
            for port in 0..3000u16 {
                let k = FlowKey { src: [0x0a00_0a0a], dst: [0x0707_0707], src_port: port, dst_port: 443, proto: 6 };
                n[(super::flow(&k, seed) % 3) as usize] += 1.0;
            }
            n.iter().map(|x| (x - 1000.0).powi(2) / 1000.0).sum::<f64>()
        };
        let mean = (0..200).map(chi).sum::<f64>() / 200.0;
        assert!((1.5..2.5).contains(&mean), "{mean}");
    }
}
