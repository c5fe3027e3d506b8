//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624), on words as they lie in the packet.

/// Folds a sum of 16-bit words into 16 bits.
#[inline(always)]
pub const fn fold(mut sum: u32) -> u16 {
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// Returns the checksum after one 16-bit word of the covered data changes from `old` to `new` (RFC 1624, equation 3).
#[inline(always)]
pub const fn update16(check: u16, old: u16, new: u16) -> u16 {
    !fold((!check) as u32 + (!old) as u32 + new as u32)
}

/// Returns the checksum after one 32-bit word of the covered data changes from `old` to `new`.
#[inline(always)]
pub const fn update32(check: u16, old: u32, new: u32) -> u16 {
    let old = !old;
    !fold((!check) as u32 + (old & 0xffff) + (old >> 16) + (new & 0xffff) + (new >> 16))
}

/// Returns the sum of the 16-bit halves of `words`, not folded.
#[inline(always)]
pub const fn sum_words(words: &[u32]) -> u32 {
    let mut sum = 0u32;
    let mut i = 0;
    while i < words.len() {
        sum += (words[i] & 0xffff) + (words[i] >> 16);
        i += 1;
    }
    sum
}

/// Returns the folded value to add to a sum of 16-bit words when its words `old` are replaced by `new`.
#[inline(always)]
pub fn difference(old: &[u32], new: &[u32]) -> u32 {
    let mut sum = 0u64;
    for (old, new) in old.iter().zip(new) {
        sum += !old as u64 + *new as u64;
    }
    fold((sum & 0xffff) as u32 + (sum >> 16 & 0xffff) as u32 + (sum >> 32) as u32) as u32
}

/// Returns the value to add in order to subtract the folded `sum`.
#[inline(always)]
pub const fn negative(sum: u32) -> u32 {
    !sum & 0xffff
}

#[cfg(test)]
mod tests {
    use super::*;
    extern crate std;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn full(words: &[u16]) -> u16 {
        !fold(words.iter().map(|w| *w as u32).sum::<u32>())
    }

    proptest! {
        #[test]
        fn an_update_equals_a_recomputation(mut words in proptest::collection::vec(any::<u16>(), 2..30), at: usize, new: u16) {
            let at = at % words.len();
            let before = full(&words);
            let old = core::mem::replace(&mut words[at], new);
            let updated = update16(before, old, new);
            // 0x0000 and 0xffff stand for the same sum in ones' complement.
            prop_assert!(updated == full(&words) || (updated ^ full(&words)) == 0xffff && (updated == 0 || updated == 0xffff));
        }
        #[test]
        fn a_32_bit_update_is_two_16_bit_updates(check: u16, old: u32, new: u32) {
            let two = update16(update16(check, old as u16, new as u16), (old >> 16) as u16, (new >> 16) as u16);
            let one = update32(check, old, new);
            prop_assert!(one == two || (one ^ two) == 0xffff);
        }
        #[test]
        fn difference_can_be_added_to_and_subtracted_from_a_sum(before: [u32; 4], after: [u32; 4], rest: u16) {
            let total = |words: &[u32]| fold(sum_words(words) + rest as u32) as u32 % 0xffff;
            let difference = difference(&before, &after);
            prop_assert_eq!(fold(total(&before) + difference) as u32 % 0xffff, total(&after));
            prop_assert_eq!(fold(total(&after) + negative(difference)) as u32 % 0xffff, total(&before));
        }
        #[test]
        fn a_word_adds_up_to_the_sum_of_its_halves(words in proptest::collection::vec(any::<u32>(), 1..5)) {
            let halves: Vec<u16> = words.iter().flat_map(|w| [*w as u16, (*w >> 16) as u16]).collect();
            prop_assert_eq!(fold(sum_words(&words)), !full(&halves));
        }
    }
}
