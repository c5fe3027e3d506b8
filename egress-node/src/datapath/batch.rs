//! Reads and writes many entries of a map with one call: a walk over a million flows with two calls for each entry takes seconds.

use super::syscall::bpf;
use aya::maps::MapData;
use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
};

/// The most entries in one call.
const BATCH: u32 = 4096;

/// The entries of a hash map, a longest-prefix map or an array, in batches: a sequence of keys, and a sequence of their values. Entries
/// that programs add or remove meanwhile may or may not be included.
pub struct Batches<'map> {
    map: &'map MapData,
    key_size: usize,
    value_size: usize,
    room: usize,
    /// Where the next call continues: a number or a key.
    from: Option<Vec<u8>>,
    is_done: bool,
}

impl<'map> Batches<'map> {
    /// All entries of the map.
    pub fn of(map: &'map MapData) -> io::Result<Self> {
        let info = map.info().map_err(io::Error::other)?;
        let (key_size, value_size) = (info.key_size() as usize, info.value_size() as usize);
        let room = info.max_entries().min(BATCH) as usize;
        Ok(Self { map, key_size, value_size, room, from: None, is_done: false })
    }
}

impl Iterator for Batches<'_> {
    type Item = io::Result<(Vec<u8>, Vec<u8>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done {
            return None;
        }
        let (mut keys, mut values) = (vec![0; self.key_size * self.room], vec![0; self.value_size * self.room]);
        let mut to = vec![0; self.key_size.max(size_of::<u32>())];
        let mut attributes = Attributes {
            in_batch: self.from.as_mut().map_or(0, |from| from.as_mut_ptr() as u64),
            out_batch: to.as_mut_ptr() as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            ..Attributes::of(self.map, self.room)
        };
        let looked_up = call(BPF_MAP_LOOKUP_BATCH, &mut attributes);
        self.is_done = looked_up.is_err();
        // `ENOENT` comes with the last batch.
        if let Err(error) = looked_up
            && error.raw_os_error() != Some(libc::ENOENT)
        {
            return Some(Err(error));
        }
        self.from = Some(to);
        keys.truncate(attributes.count as usize * self.key_size);
        values.truncate(attributes.count as usize * self.value_size);
        Some(Ok((keys, values)))
    }
}

/// Writes entries, given the sequence of their keys and that of their values.
pub fn put(map: &MapData, keys: &[u8], values: &[u8]) -> io::Result<()> {
    let key = map.info().map_err(io::Error::other)?.key_size() as usize;
    if keys.is_empty() {
        return Ok(());
    }
    let (from, to) = (keys.as_ptr() as u64, values.as_ptr() as u64);
    let mut attributes = Attributes { keys: from, values: to, ..Attributes::of(map, keys.len() / key) };
    call(BPF_MAP_UPDATE_BATCH, &mut attributes)
}

/// Commands of `bpf(2)` (linux/bpf.h).
const BPF_MAP_LOOKUP_BATCH: i64 = 24;
const BPF_MAP_UPDATE_BATCH: i64 = 26;

/// The attributes of both commands (`union bpf_attr`, `batch`).
#[repr(C)]
#[derive(Default)]
struct Attributes {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

impl Attributes {
    fn of(map: &MapData, count: usize) -> Self {
        Self { count: count as u32, map_fd: map.fd().as_fd().as_raw_fd() as u32, ..Self::default() }
    }
}

fn call(command: i64, attributes: &mut Attributes) -> io::Result<()> {
    // SAFETY: the buffers that the attributes point to hold `count` keys and values of the map.
    unsafe { bpf(command, attributes) }
}
