//! Port blocks: 64 consecutive source ports of one egress IP, leased to one source node.
//!
//! Ports here are in host byte order.

/// First port that is ever used as a translated source port.
pub const FIRST_PORT: u16 = 1024;
/// Ports in one block.
pub const SIZE: u16 = 64;
/// Blocks of one egress IP: ports 1024 to 65535.
pub const COUNT: u16 = ((65_536 - FIRST_PORT as u32) / SIZE as u32) as u16;

/// Returns the block that `port` belongs to, or `None` below [`FIRST_PORT`].
#[inline(always)]
pub const fn of_port(port: u16) -> Option<u16> {
    if port < FIRST_PORT { None } else { Some((port - FIRST_PORT) / SIZE) }
}

/// Rows of a table that is indexed by any port: the ports below [`FIRST_PORT`] have rows, too,
/// which stay empty, so that no lookup needs a bounds check.
pub const ROWS: usize = 65_536 / SIZE as usize;

/// Returns the row of `port`.
#[inline(always)]
pub const fn row(port: u16) -> usize {
    (port / SIZE) as usize
}

/// Returns the first port of `block`.
#[inline(always)]
pub const fn first_port(block: u16) -> u16 {
    FIRST_PORT + block * SIZE
}

/// Consecutive probes step through this many blocks, spread evenly over all.
const SPREAD: u32 = 32;

/// Returns the port that probe number `i` of a flow tries, as (index into the node's list of blocks, offset in that block).
///
/// Over `i` in `0 .. blocks * 64` every port of every block is tried exactly once, so a search with that many probes is
/// complete. The walk visits all blocks with one offset before it takes the next offset; `stride` is made odd, so it runs
/// through all 64 offsets. Consecutive probes are in blocks that are far apart in the list: blocks that were leased
/// together fill up together, and a walk in list order would meet a run of full blocks.
#[inline(always)]
pub const fn probe(hash: u32, i: u32, blocks: u32) -> (u32, u16) {
    let stride = (hash >> 24) | 1;
    let (round, i) = (i / blocks, i % blocks);
    let offset = ((hash >> 8).wrapping_add(round.wrapping_mul(stride))) % SIZE as u32;
    let gap = blocks / SPREAD;
    // The blocks beyond a multiple of SPREAD come last.
    let step = if i < gap * SPREAD { (i % SPREAD) * gap + i / SPREAD } else { i };
    ((hash.wrapping_add(step)) % blocks, offset as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    extern crate std;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn blocks_cover_the_ports_from_1024_up() {
        assert_eq!(COUNT, 1008);
        assert_eq!(of_port(1023), None);
        assert_eq!(of_port(1024), Some(0));
        assert_eq!(of_port(65535), Some(1007));
        assert_eq!(first_port(1007) + (SIZE - 1), 65535);
    }

    proptest! {
        #[test]
        fn a_full_walk_visits_every_port_once(hash: u32, blocks in prop_oneof![1u32..40, 1u32..=COUNT as u32]) {
            // Clears the top bit, as the kernel's hash does: otherwise the walk could wrap around at 2^32 and skip ports.
            let hash = hash >> 1;
            let n = blocks * SIZE as u32;
            let seen: BTreeSet<_> = (0..n).map(|i| probe(hash, i, blocks)).collect();
            prop_assert_eq!(seen.len() as u32, n);
        }
        /// Half of the blocks are new and empty; the others, leased earlier, are full. A walk soon reaches an empty block.
        #[test]
        fn a_port_walk_soon_leaves_full_blocks(hash: u32, half in 2u32..=COUNT as u32 / 2) {
            let hash = hash >> 1;
            let found = (0..2 * half).find(|i| probe(hash, *i, 2 * half).0 >= half).unwrap();
            prop_assert!(found <= 32, "{} probes of {} blocks", found, 2 * half);
        }
        #[test]
        fn a_port_lies_in_its_block(port in 1024u16..) {
            let b = of_port(port).unwrap();
            prop_assert!(b < COUNT && first_port(b) <= port && port - first_port(b) < SIZE);
            prop_assert_eq!(row(port), row(first_port(b)));
        }
    }
}
