//! Lists the programs that TCX runs at an interface, by id only: opening a program takes CAP_SYS_ADMIN, which the agent does not have.

use super::syscall::bpf;
use aya::programs::TcAttachType;
use std::io;

/// The command of `bpf(2)`.
const BPF_PROG_QUERY: i64 = 16;
/// `enum bpf_attach_type`.
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
/// The maximum number of programs at one hook (`BPF_MPROG_MAX`).
const MOST: usize = 64;

/// `union bpf_attr` of [`BPF_PROG_QUERY`].
#[repr(C)]
#[derive(Default)]
struct Query {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    reserved: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// Returns the ids of the programs in one direction of an interface, in order. `EINVAL` before Linux 6.6.
pub fn programs(index: u32, direction: TcAttachType) -> io::Result<Vec<u32>> {
    let mut ids = vec![0_u32; MOST];
    let mut query = Query {
        target_ifindex: index,
        attach_type: if matches!(direction, TcAttachType::Egress) { BPF_TCX_EGRESS } else { BPF_TCX_INGRESS },
        prog_ids: ids.as_mut_ptr() as u64,
        prog_cnt: MOST as u32,
        ..Query::default()
    };
    // SAFETY: the kernel writes to the query, and at most `prog_cnt` ids to the buffer.
    unsafe { bpf(BPF_PROG_QUERY, &mut query) }?;
    ids.truncate(query.prog_cnt as usize);
    Ok(ids)
}
