//! Values that the verifier is to know nothing about.
//!
//! The verifier follows each path through a program with what it knows of every value there, and joins two paths where it knows the same.
//! A parser leaves it with a path for each combination of constants: protocols, offsets, ports that are 0. Where these are hidden, one path
//! goes on. It pays where few questions follow: each splits the path again, also those that a constant had answered.

/// `word`, four bytes, as they are. `unknown` is any number that the verifier does not know.
#[inline(always)]
pub fn hidden<T: Copy>(word: T, unknown: u32) -> T {
    const { assert!(size_of::<T>() == size_of::<u32>()) };
    // SAFETY: of the same size, and every pattern is a number.
    let mut number = unsafe { core::mem::transmute_copy::<T, u32>(&word) } as u64;
    // In assembly, or LLVM would see that nothing changes.
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
