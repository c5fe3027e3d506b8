//! Hides values from the verifier.
//!
//! The verifier follows each path through a program with its knowledge of every value, and merges two paths if the knowledge is equal.
//! A parser leaves it with a path for each combination of constants: protocols, offsets, ports that are 0. If these are hidden, one
//! path goes on. It pays where few branches follow: each splits the path again, even one that a constant would have decided.

/// Returns `word`, four bytes, unchanged. `unknown` is any number that the verifier does not know.
#[inline(always)]
pub fn hidden<T: Copy>(word: T, unknown: u32) -> T {
    const { assert!(size_of::<T>() == size_of::<u32>()) };
    // SAFETY: the sizes are equal, and every bit pattern is a number.
    let mut number = unsafe { core::mem::transmute_copy::<T, u32>(&word) } as u64;
    // In assembly: otherwise LLVM would see that nothing changes.
    // SAFETY: arithmetic in registers.
    unsafe {
        core::arch::asm!(
            "{number} += {unknown}",
            "{number} -= {unknown}",
            number = inout(reg) number,
            unknown = in(reg) unknown as u64,
            options(pure, nomem, nostack),
        );
    }
    // SAFETY: the bytes of `word`.
    unsafe { core::mem::transmute_copy::<u32, T>(&(number as u32)) }
}
