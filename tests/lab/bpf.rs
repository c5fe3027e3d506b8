//! Measures the cost per packet of a pinned program with `BPF_PROG_TEST_RUN`, relative to a program that does nothing.
//!
//! A program changes its packet, so a second run on the result would measure another case. A small front program restores the
//! packet before each run, sets a tunnel key if the packet needs one, and tail-calls the measured program. The cost of the same
//! front program with an empty target is subtracted. This module uses raw system calls: the lab has no eBPF library.

pub(crate) mod code;

use std::ffi::CString;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use self::code::{
    ADD, Attr, CONTEXT, DATA, EXIT, FP, JUMP_IF_GREATER, JUMP_IF_NOT, LOAD_LONG, PSEUDO_MAP_FD, call, copy,
    instruction, load, load_word, mov, store,
};
use crate::netns::NetNs;

/// Commands of bpf(2).
const MAP_CREATE: u32 = 0;
const MAP_LOOKUP: u32 = 1;
const MAP_UPDATE: u32 = 2;
const MAP_NEXT_KEY: u32 = 4;
const OBJ_GET: u32 = 7;
pub(crate) const PROG_TEST_RUN: u32 = 10;
const PROG_FD_BY_ID: u32 = 13;
const INFO_BY_FD: u32 = 15;

const MAP_TYPE_PROG_ARRAY: u32 = 3;
/// Numbers of BPF helpers.
const KTIME_GET_NS: i32 = 5;
const TAIL_CALL: i32 = 12;
const GET_TUNNEL_KEY: i32 = 20;
const SET_TUNNEL_KEY: i32 = 21;
const ADJUST_ROOM: i32 = 50;
const CSUM_LEVEL: i32 = 135;
/// `BPF_F_ZERO_CSUM_TX`, `BPF_ADJ_ROOM_MAC`, `BPF_CSUM_LEVEL_DEC`.
const ZERO_CHECKSUM: i32 = 2;
const ROOM_MAC: i32 = 1;
const LEVEL_DOWN: i32 = 2;

/// Offsets in `struct __sk_buff`, and the number of its bytes that are passed to the kernel.
const SKB_IFINDEX: usize = 40;
const SKB_DATA: i16 = 76;
const SKB_DATA_END: i16 = 80;
const SKB_LEN: usize = 192;
/// The size of `struct bpf_tunnel_key`, and the offset of `local_ipv4` in it.
const KEY_LEN: usize = 44;
const KEY_LOCAL: usize = 28;
/// The number of helper calls that give the processor time to finish its writes: a read of a word that spans two
/// unfinished writes takes longer than a read of a packet that is already in the cache.
const DRAIN: usize = 4;
const ETHERNET: usize = 14;

/// The verdict of a program that forwards a packet (`TC_ACT_REDIRECT`).
pub const REDIRECT: u32 = 7;

/// The verdict of a program that leaves a packet to the next program (`TCX_NEXT`).
pub const NEXT: u32 = u32::MAX;

/// A packet, its metadata on arrival at the program, and the expected verdict.
#[derive(Clone, Debug)]
pub struct Shot {
    /// The frame.
    pub frame: Vec<u8>,
    /// The interface at which it arrives.
    pub ifindex: u32,
    /// The outer source address and the network identifier that a tunnel device has stripped.
    pub tunnel: Option<(Ipv4Addr, u32)>,
    /// The program's expected verdict: [`REDIRECT`] or [`NEXT`].
    pub verdict: u32,
}

/// The operation on a packet's tunnel header that a program requests from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// Reads the header that the tunnel device stripped.
    ReadKey,
    /// Sets the header that the tunnel device writes.
    SetKey,
    /// Makes room for the header (positive) or removes it (negative): the number of bytes, and the flags of `bpf_skb_adjust_room`.
    Room(i32, u64),
}

/// The time that a program takes for one packet, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// The excess over an empty program.
    pub whole: f64,
    /// The excess over a program that performs only the same operation on the tunnel header.
    pub without_header: Option<f64>,
}

/// A program that can be run.
#[derive(Debug)]
pub struct Program(OwnedFd);

impl Program {
    /// Returns the program of the link pinned at `pin`.
    pub fn of_link(pin: &Path) -> Result<Program> {
        let link = pinned(pin)?;
        // struct bpf_link_info begins with type, id and prog_id.
        let mut info = [0u32; 64];
        let mut attr = Attr::default();
        attr.u32(0, link.as_raw_fd().cast_unsigned());
        attr.u32(4, size_of_val(&info) as u32);
        attr.u64(8, info.as_mut_ptr() as u64);
        attr.call(INFO_BY_FD).context("cannot query the program of a link")?;
        let mut attr = Attr::default();
        attr.u32(0, info[2]);
        Ok(Program(attr.call_fd(PROG_FD_BY_ID).context("cannot open a link's program")?))
    }

    /// Measures the program's cost: medians over `samples` samples of `repeat` runs each, alternating with the programs
    /// that it is compared with. Fails if the last run of a sample does not end with the shot's verdict.
    pub fn cost(&self, ns: &NetNs, shot: &Shot, header: Option<Header>, repeat: u32, samples: usize) -> Result<Cost> {
        let (front, nothing) = (Front::new(shot, &self.0)?, Front::new(shot, &beside(shot, None)?)?);
        let header = header.map(|header| Front::new(shot, &beside(shot, Some(header))?)).transpose()?;
        ns.run(|| {
            let (mut whole, mut bare) = (Vec::with_capacity(samples), Vec::with_capacity(samples));
            for _ in 0..samples {
                let without = nothing.nanoseconds(repeat)?;
                let with = front.nanoseconds(repeat)?;
                whole.push(with - without);
                if let Some(header) = &header {
                    bare.push(with - header.nanoseconds(repeat).context("the comparison program")?);
                }
            }
            let median = |costs| crate::stats::Percentiles::of(costs).p50;
            Ok(Cost { whole: median(whole), without_header: header.is_some().then(|| median(bare)) })
        })
    }
}

/// Returns the bytes of memory of a pinned map, as the kernel accounts for it: a growing map counts with its present entries.
pub fn map_bytes(pin: &Path) -> Result<u64> {
    about(&pinned(pin)?, "memlock").with_context(|| format!("{}", pin.display()))
}

/// Returns the number of entries of a pinned map (not an array): an approximation if the map changes meanwhile.
pub fn map_entries(pin: &Path) -> Result<usize> {
    let map = pinned(pin)?;
    let size = about(&map, "key_size").with_context(|| format!("{}", pin.display()))? as usize;
    let (mut key, mut next) = (vec![0u8; size], vec![0u8; size]);
    let mut attr = Attr::default();
    attr.u32(0, map.as_raw_fd().cast_unsigned());
    attr.u64(16, next.as_mut_ptr() as u64);
    let mut count = 0;
    loop {
        match attr.call(MAP_NEXT_KEY) {
            Ok(_) => count += 1,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(count),
            Err(error) => return Err(error).with_context(|| format!("cannot walk {}", pin.display())),
        }
        key.copy_from_slice(&next);
        attr.u64(8, key.as_ptr() as u64);
    }
}

/// Puts `count` entries into a pinned hash map: distinct keys, zero values.
pub fn fill_map(pin: &Path, count: u32) -> Result<()> {
    let map = pinned(pin)?;
    let size = |what| about(&map, what).map(|size| vec![0u8; size as usize]);
    let (mut key, value) = (size("key_size")?, size("value_size")?);
    let mut attr = Attr::default();
    attr.u32(0, map.as_raw_fd().cast_unsigned());
    attr.u64(8, key.as_ptr() as u64);
    attr.u64(16, value.as_ptr() as u64);
    for number in 1..=count {
        key[..4].copy_from_slice(&number.to_ne_bytes());
        attr.call(MAP_UPDATE).with_context(|| format!("cannot fill {}", pin.display()))?;
    }
    Ok(())
}

/// Returns the first element of a pinned array of 64-bit numbers.
pub fn first_number(pin: &Path) -> Result<u64> {
    number(&pinned(pin)?).with_context(|| format!("cannot read {}", pin.display()))
}

/// Returns the first element of an array of 64-bit numbers.
pub(crate) fn number(map: &OwnedFd) -> Result<u64> {
    let (key, mut value) = (0u32, [0u64; 1]);
    let mut attr = Attr::default();
    attr.u32(0, map.as_raw_fd().cast_unsigned());
    attr.u64(8, (&raw const key) as u64);
    attr.u64(16, value.as_mut_ptr() as u64);
    attr.call(MAP_LOOKUP).context("a map cannot be read")?;
    // SAFETY: `value` is alive and aligned. The read is volatile because the compiler does not see that the kernel wrote to it.
    Ok(unsafe { value.as_ptr().read_volatile() })
}

/// Returns a number that the kernel reports about a map in the `fdinfo` of its descriptor.
fn about(map: &OwnedFd, what: &str) -> Result<u64> {
    let path = format!("/proc/self/fdinfo/{}", map.as_raw_fd());
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let value = text.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':')?.trim().parse().ok());
    value.with_context(|| format!("no {what} in the fdinfo of a map: {text}"))
}

fn pinned(pin: &Path) -> Result<OwnedFd> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let mut attr = Attr::default();
    attr.u64(0, path.as_ptr() as u64);
    attr.call_fd(OBJ_GET).with_context(|| format!("cannot open the pin {}", pin.display()))
}

/// The front program for one packet and one measured program.
struct Front {
    program: OwnedFd,
    /// Keeps the measured program loaded.
    _targets: OwnedFd,
    frame: Vec<u8>,
    context: [u8; SKB_LEN],
    verdict: u32,
}

impl Front {
    fn new(shot: &Shot, target: &OwnedFd) -> Result<Front> {
        let targets = program_array(target)?;
        let program = load(&front(shot, &targets)?)?;
        let mut context = [0; SKB_LEN];
        context[SKB_IFINDEX..SKB_IFINDEX + 4].copy_from_slice(&shot.ifindex.to_ne_bytes());
        Ok(Front { program, _targets: targets, frame: shot.frame.clone(), context, verdict: shot.verdict })
    }

    /// Runs the program. Returns the last verdict and the nanoseconds per run.
    fn run(&self, repeat: u32) -> Result<(u32, u32)> {
        let mut attr = Attr::default();
        attr.u32(0, self.program.as_raw_fd().cast_unsigned());
        attr.u32(8, self.frame.len() as u32);
        attr.u64(16, self.frame.as_ptr() as u64);
        attr.u32(32, repeat);
        attr.u32(40, SKB_LEN as u32);
        attr.u64(48, self.context.as_ptr() as u64);
        attr.call(PROG_TEST_RUN).context("BPF_PROG_TEST_RUN")?;
        Ok((attr.read(4), attr.read(36)))
    }

    /// Returns the nanoseconds per run. Fails if the last verdict is not the expected one.
    fn nanoseconds(&self, repeat: u32) -> Result<f64> {
        let (verdict, time) = self.run(repeat)?;
        ensure!(verdict == self.verdict, "the program's verdict is {verdict}, not {}", self.verdict);
        Ok(time.into())
    }
}

/// Loads a program that returns the shot's verdict and performs only this operation on the tunnel header.
fn beside(shot: &Shot, header: Option<Header>) -> Result<OwnedFd> {
    let mut code = vec![copy(CONTEXT, 1)];
    let at = -(KEY_LEN as i16) - 4;
    let key = [copy(2, FP), instruction(ADD, 2, 0, 0, i32::from(at)), mov(3, KEY_LEN as i32)];
    let mut then = Vec::new();
    match header {
        None => code.push(mov(0, 0)),
        Some(Header::ReadKey) => {
            code.extend(key);
            code.extend([mov(4, 0), call(GET_TUNNEL_KEY)]);
        }
        Some(Header::SetKey) => {
            code.extend(store(FP, at, &[0; KEY_LEN]));
            code.extend(key);
            code.extend([mov(4, ZERO_CHECKSUM), call(SET_TUNNEL_KEY)]);
        }
        Some(Header::Room(bytes, flags)) => {
            let [low, high] = [flags as u32, (flags >> 32) as u32].map(u32::cast_signed);
            code.extend([mov(2, bytes), mov(3, ROOM_MAC)]);
            code.extend([instruction(LOAD_LONG, 4, 0, 0, low), instruction(0, 0, 0, 0, high), call(ADJUST_ROOM)]);
            if bytes < 0 {
                // The network card's result for the outer checksum is removed with the header.
                then.extend([copy(1, CONTEXT), mov(2, LEVEL_DOWN), call(CSUM_LEVEL)]);
            }
        }
    }
    // If the helper fails, its error is the verdict.
    then.push(mov(0, shot.verdict as i32));
    code.push(instruction(JUMP_IF_NOT, 0, 0, then.len() as i16, 0));
    code.extend(then);
    code.push(EXIT);
    load(&code)
}

fn front(shot: &Shot, targets: &OwnedFd) -> Result<Vec<u64>> {
    let length = i16::try_from(shot.frame.len()).context("the frame is too long to restore")?;
    ensure!(length >= ETHERNET as i16, "the frame has no Ethernet header");
    let mut restore = vec![copy(CONTEXT, 1), load_word(DATA, 1, SKB_DATA), load_word(3, 1, SKB_DATA_END)];
    let bytes: Vec<u64> =
        store(DATA, 0, &shot.frame[..ETHERNET]).chain(store(DATA, ETHERNET as i16, &shot.frame[ETHERNET..])).collect();
    restore.extend([copy(4, DATA), instruction(ADD, 4, 0, 0, i32::from(length))]);
    restore.push(instruction(JUMP_IF_GREATER, 4, 3, bytes.len() as i16, 0));
    restore.extend(bytes);
    let mut code = restore;
    if let Some((source, id)) = shot.tunnel {
        let mut key = [0; KEY_LEN];
        key[..4].copy_from_slice(&id.to_ne_bytes());
        // The outer source is `remote_ipv4` in a received packet's key, but `local_ipv4` in the key of a packet to be sent.
        key[KEY_LOCAL..KEY_LOCAL + 4].copy_from_slice(&source.to_bits().to_ne_bytes());
        let at = -(KEY_LEN as i16) - 4;
        code.extend(store(FP, at, &key));
        code.extend([copy(1, CONTEXT), copy(2, FP), instruction(ADD, 2, 0, 0, i32::from(at))]);
        code.extend([mov(3, KEY_LEN as i32), mov(4, 0), call(SET_TUNNEL_KEY)]);
    }
    code.extend([call(KTIME_GET_NS); DRAIN]);
    let map = targets.as_raw_fd();
    code.extend([copy(1, CONTEXT), instruction(LOAD_LONG, 2, PSEUDO_MAP_FD, 0, map), 0, mov(3, 0), call(TAIL_CALL)]);
    code.extend([mov(0, 0), EXIT]);
    Ok(code)
}

fn program_array(target: &OwnedFd) -> Result<OwnedFd> {
    let mut attr = Attr::default();
    for (at, value) in [(0, MAP_TYPE_PROG_ARRAY), (4, 4), (8, 4), (12, 1)] {
        attr.u32(at, value);
    }
    let map = attr.call_fd(MAP_CREATE).context("cannot create a program array")?;
    let (key, value) = (0u32, target.as_raw_fd());
    let mut attr = Attr::default();
    attr.u32(0, map.as_raw_fd().cast_unsigned());
    attr.u64(8, (&raw const key) as u64);
    attr.u64(16, (&raw const value) as u64);
    attr.call(MAP_UPDATE).context("cannot put a program into a program array")?;
    Ok(map)
}
