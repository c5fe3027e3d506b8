//! `bpf(2)` for what aya has no call for.

use std::{io, ptr};

/// Calls the kernel with a command and its part of `union bpf_attr`, which it may write to.
///
/// # Safety
/// Pointers in the attributes lead to memory that is as long as the command takes it to be.
pub unsafe fn bpf<T>(command: i64, attributes: &mut T) -> io::Result<()> {
    // SAFETY: the attributes are as long as is said; for the rest the caller answers.
    match unsafe { libc::syscall(libc::SYS_bpf, command, ptr::from_mut(attributes), size_of::<T>()) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
