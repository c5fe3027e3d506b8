//! Starts processes without kernel features that older kernels lack.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Commands of bpf(2) that use TCX: `BPF_PROG_QUERY` and `BPF_LINK_CREATE`.
const QUERY: u32 = 16;
const CREATE: u32 = 28;
/// Offsets in `struct seccomp_data`: the system call's number, and the lower half of its first argument.
const NUMBER: u32 = 0;
const FIRST: u32 = if cfg!(target_endian = "little") { 16 } else { 20 };

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

const fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// Answers `EINVAL` to requests for TCX, as Linux before 6.6 does, and allows everything else.
static WITHOUT_TCX: [libc::sock_filter; 7] = [
    instruction(LOAD, 0, 0, NUMBER),
    instruction(IF_EQUAL, 0, 3, libc::SYS_bpf as u32),
    instruction(LOAD, 0, 0, FIRST),
    instruction(IF_EQUAL, 2, 0, QUERY),
    instruction(IF_EQUAL, 1, 0, CREATE),
    instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    instruction(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EINVAL as u32),
];

/// Makes a command run as on a kernel without TCX.
pub fn without_tcx(command: &mut Command) {
    let restrict = || {
        let program = libc::sock_fprog { len: WITHOUT_TCX.len() as u16, filter: WITHOUT_TCX.as_ptr().cast_mut() };
        // SAFETY: the kernel copies the instructions.
        match unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(restrict) };
}
