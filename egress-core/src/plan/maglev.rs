//! The table that spreads new flows of a policy over its slots: weighted Maglev hashing.
//!
//! Every agent computes the same table from the same slots. A slot that comes or goes changes few entries of the others.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::IpAddr;

use super::hash::hash;

/// An entry of a table that has no slots.
pub const EMPTY: u16 = u16::MAX;

/// The sizes that tables have: primes.
const SIZES: [u32; 9] = [251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521];

/// Returns the size of the table for this many slots: at least a hundred entries a slot, as long as 65,521 suffice.
pub fn size(slots: usize) -> u32 {
    let wanted = (slots as u64 * 100).min(65_521) as u32;
    SIZES.into_iter().find(|size| *size >= wanted).unwrap_or(65_521)
}

/// Returns the key by which a slot is hashed. It depends only on the address.
pub fn key(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Fills a table of `size` (a prime) entries with places in `slots`: each slot gets its weight's share of them, to within one entry. Slots
/// of weight 0 get none; if there is no other slot, all entries are [`EMPTY`]. Apart from the numbers, the result does not depend on the
/// order of `slots`. There are at most 65,535 slots.
pub fn table<K: AsRef<[u8]>>(slots: &[(K, u32)], size: u32) -> Vec<u16> {
    let mut table = vec![EMPTY; size as usize];
    let mut turns: Vec<Turn> = slots
        .iter()
        .enumerate()
        .filter(|(_, (_, weight))| *weight > 0)
        .map(|(slot, (key, weight))| Turn::new(slot as u16, key.as_ref(), *weight, size))
        .collect();
    let mut next: BinaryHeap<_> = turns.iter().enumerate().map(|(at, turn)| Reverse(turn.order(at))).collect();
    let mut free = table.len();
    while free > 0 {
        let Some(Reverse((.., at))) = next.pop() else { break };
        let turn = &mut turns[at];
        let mut place = turn.step(size);
        while table[place] != EMPTY {
            place = turn.step(size);
        }
        table[place] = turn.slot;
        turn.taken += 1;
        free -= 1;
        next.push(Reverse(turn.order(at)));
    }
    table
}

/// A slot that takes entries in the order of its own permutation of the table.
struct Turn {
    slot: u16,
    weight: u32,
    taken: u64,
    place: u64,
    skip: u64,
    tie: u64,
}

impl Turn {
    fn new(slot: u16, key: &[u8], weight: u32, size: u32) -> Self {
        let size = u64::from(size);
        let (place, skip) = (hash(1, key) % size, hash(2, key) % (size - 1) + 1);
        Self { slot, weight, taken: 0, place, skip, tie: hash(3, key) }
    }

    fn step(&mut self, size: u32) -> usize {
        let place = self.place;
        self.place = (self.place + self.skip) % u64::from(size);
        place as usize
    }

    /// Returns the order of turns: next is the slot whose share would still be the smallest for its weight.
    fn order(&self, at: usize) -> (u64, u64, usize) {
        (((self.taken + 1) << 32) / u64::from(self.weight), self.tie, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slots(weights: &[u32]) -> Vec<([u8; 16], u32)> {
        let key = |n: usize| key(IpAddr::from([192, 0, (n / 256) as u8, (n % 256) as u8]));
        weights.iter().enumerate().map(|(n, weight)| (key(n), *weight)).collect()
    }

    fn counts(table: &[u16], slots: usize) -> Vec<u64> {
        (0..slots).map(|slot| table.iter().filter(|entry| usize::from(**entry) == slot).count() as u64).collect()
    }

    #[test]
    fn table_sizes_are_primes_large_enough_for_the_slots() {
        for size in SIZES {
            assert!((2..size).take_while(|d| d * d <= size).all(|d| size % d != 0), "{size}");
        }
        assert_eq!([0, 1, 2, 3, 8, 655, 656, 10_000].map(size), [251, 251, 251, 509, 1021, 65521, 65521, 65521]);
    }

    #[test]
    fn a_table_without_slots_is_empty() {
        assert_eq!(table(&slots(&[]), 251), vec![EMPTY; 251]);
        assert_eq!(table(&slots(&[0, 0]), 251), vec![EMPTY; 251]);
    }

    #[test]
    fn the_table_is_the_same_on_every_machine() {
        let table = table(&slots(&[1, 1, 1]), 251);
        assert_eq!(
            hash(0, &table.iter().flat_map(|e| e.to_be_bytes()).collect::<Vec<u8>>()),
            3_871_211_447_409_543_192
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn weights_are_respected_to_the_entry(weights in prop::collection::vec(0u32..20, 1..24)) {
            prop_assume!(weights.iter().any(|w| *w > 0));
            let size = size(weights.len());
            let counts = counts(&table(&slots(&weights), size), weights.len());
            let all: u64 = weights.iter().map(|w| u64::from(*w)).sum();
            prop_assert_eq!(counts.iter().sum::<u64>(), u64::from(size));
            for (count, weight) in counts.iter().zip(&weights) {
                let exact = u64::from(size) as f64 * f64::from(*weight) / all as f64;
                prop_assert!((*count as f64 - exact).abs() <= 1.0 + weights.len() as f64 * f64::from(*weight) / all as f64);
                prop_assert!(*weight > 0 || *count == 0);
            }
        }

        #[test]
        fn removing_a_slot_changes_few_entries_of_the_others(n in 2usize..40, gone in 0usize..40) {
            let gone = gone % n;
            let size = size(n);
            let before = table(&slots(&vec![1; n]), size);
            let mut weights = vec![1; n];
            weights[gone] = 0;
            let after = table(&slots(&weights), size);
            let moved = before.iter().zip(&after).filter(|(b, a)| usize::from(**b) != gone && a != b).count();
            prop_assert!(moved * 8 <= before.len(), "{} of {} entries moved", moved, before.len());
        }

        #[test]
        fn the_order_of_slots_and_removed_slots_do_not_matter(weights in prop::collection::vec(0u32..9, 1..12)) {
            let forward = slots(&weights);
            let mut backward = forward.clone();
            backward.reverse();
            backward.retain(|(_, weight)| *weight > 0);
            let keyed = |slots: &[([u8; 16], u32)]| -> Vec<Option<[u8; 16]>> {
                table(slots, 251).into_iter().map(|e| slots.get(usize::from(e)).map(|s| s.0)).collect()
            };
            prop_assert_eq!(keyed(&forward), keyed(&backward));
        }
    }
}
