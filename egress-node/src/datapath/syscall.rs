//! `bpf(2)` for commands that aya does not offer.

use std::{io, ptr};

/// Calls the kernel with a command and the command's part of `union bpf_attr`, which the kernel may write to.
///
/// # Safety
/// Pointers in the attributes must point to memory of the length that the command assumes.
pub unsafe fn bpf<T>(command: i64, attributes: &mut T) -> io::Result<()> {
    // SAFETY: the attributes have the given length; the caller guarantees the rest.
    match unsafe { libc::syscall(libc::SYS_bpf, command, ptr::from_mut(attributes), size_of::<T>()) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
