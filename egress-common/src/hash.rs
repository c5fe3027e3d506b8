//! The hash that chooses a flow's slot. The kernel computes it for every new flow, `egressctl explain` computes the same.

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
    /// The sum of its words, each times another power of `factor`, the first one times `factor` itself.
    fn multilinear(&self, factor: u64) -> u64;
}
impl Words for crate::V4 {
    #[inline(always)]
    fn mix_into(self, h: u64) -> u64 {
        mix(h, self[0] as u64)
    }
    #[inline(always)]
    fn multilinear(&self, factor: u64) -> u64 {
        factor.wrapping_mul(self[0] as u64)
    }
}
impl Words for crate::V6 {
    #[inline(always)]
    fn mix_into(self, h: u64) -> u64 {
        mix(mix(h, self[0] as u64 | (self[1] as u64) << 32), self[2] as u64 | (self[3] as u64) << 32)
    }
    #[inline(always)]
    fn multilinear(&self, factor: u64) -> u64 {
        let term = |word: u32, power: u32| factor.wrapping_pow(power).wrapping_mul(word as u64);
        let [a, b, c, d] = *self;
        term(a, 1).wrapping_add(term(b, 2)).wrapping_add(term(c, 3)).wrapping_add(term(d, 4))
    }
}

/// The hash of a flow, 31 bits (the top bit is clear, see [`crate::port_block::probe`]).
///
/// `seed` is the policy's, so that two policies spread the same pods differently.
#[inline(always)]
pub fn flow<A: Words>(key: &crate::flow::FlowKey<A>, seed: u32) -> u32 {
    let h = key.dst.mix_into(key.src.mix_into(seed as u64));
    let h = mix(h, key.src_port as u64 | (key.dst_port as u64) << 16 | (key.proto as u64) << 32);
    (h >> 33) as u32
}

/// The hash of an endpoint, 31 bits: what a `PerEndpoint` policy uses while an endpoint's own slot cannot be used.
#[inline(always)]
pub fn endpoint<A: Words>(src: A, seed: u32) -> u32 {
    (src.mix_into(seed as u64) >> 33) as u32
}

/// The hash of a flow's `n`th attempt at a slot, 31 bits: attempts are a golden-ratio step apart.
#[inline(always)]
pub const fn attempt(hash: u32, n: u32) -> u32 {
    hash.wrapping_add(n.wrapping_mul(0x9e37_79b9)) & 0x7fff_ffff
}

#[cfg(test)]
mod tests {
    use crate::flow::FlowKey;

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
