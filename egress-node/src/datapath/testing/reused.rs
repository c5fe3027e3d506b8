//! Loaded programs that serve one test after another: the verifier takes most of the time of a test of single packets.

use super::{
    BpfDir, bpf,
    rig::{Rig, SIZES},
};
use crate::datapath::{Pins, batch};
use aya::maps::{Map, MapData, MapType, RingBuf};
use egress_core::encode::NodeView;
use nix::errno::Errno;
use std::{
    fs, io,
    ops::{Deref, DerefMut},
    os::fd::{AsFd as _, AsRawFd as _},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

/// The rigs that no test uses now.
static SPARE: Mutex<Vec<Rig>> = Mutex::new(Vec::new());
static MADE: AtomicUsize = AtomicUsize::new(0);

/// A rig that another test may reuse afterwards, with empty maps. A test that fails keeps its rig.
///
/// Only for tests that just run programs: attachments, pins, and programs loaded in place of the usual ones would stay.
pub struct Reused(Option<Rig>);

impl Reused {
    /// Returns `None`, and reports that the test is skipped, if this process may not load programs.
    pub fn new(test: &str, view: &NodeView) -> Option<Self> {
        let spare = SPARE.lock().unwrap().pop();
        let rig = match spare {
            Some(mut rig) => {
                empty(rig.pins()).unwrap();
                rig.restart(view);
                rig
            }
            None => {
                let number = MADE.fetch_add(1, Relaxed);
                if number == 0 {
                    // SAFETY: the function takes and returns nothing, and does not unwind.
                    unsafe { libc::atexit(remove_spare) };
                }
                Rig::in_dir(BpfDir::named(test, &format!("reused-{number}"))?, view, SIZES)
            }
        };
        Some(Self(Some(rig)))
    }
}

/// Removes the pins: the test harness ends the process without dropping statics.
extern "C" fn remove_spare() {
    if let Ok(mut spare) = SPARE.lock() {
        spare.clear();
    }
}

impl Deref for Reused {
    type Target = Rig;

    fn deref(&self) -> &Rig {
        self.0.as_ref().unwrap()
    }
}

impl DerefMut for Reused {
    fn deref_mut(&mut self) -> &mut Rig {
        self.0.as_mut().unwrap()
    }
}

impl Drop for Reused {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            SPARE.lock().unwrap().extend(self.0.take());
        }
    }
}

/// Empties all pinned maps. Writing the element of the collector's map cancels its timer.
fn empty(pins: &Pins) -> io::Result<()> {
    for entry in fs::read_dir(pins.maps())? {
        let map = MapData::from_pin(entry?.path()).map_err(io::Error::other)?;
        let info = map.info().map_err(io::Error::other)?;
        match info.map_type().map_err(io::Error::other)? {
            MapType::Array | MapType::PerCpuArray => fill_with_zeros(&map)?,
            MapType::Queue => {
                let mut popped = vec![0; info.value_size() as usize];
                while call(BPF_MAP_LOOKUP_AND_DELETE_ELEM, &map, None, Some(&mut popped))? {}
            }
            MapType::RingBuf => {
                let mut events = RingBuf::try_from(Map::RingBuf(map)).map_err(io::Error::other)?;
                while events.next().is_some() {}
            }
            _ => remove_all(&map)?,
        }
    }
    Ok(())
}

fn fill_with_zeros(map: &MapData) -> io::Result<()> {
    let info = map.info().map_err(io::Error::other)?;
    let value = match info.map_type().map_err(io::Error::other)? {
        MapType::PerCpuArray => {
            info.value_size().next_multiple_of(8) as usize * aya::util::nr_cpus().map_err(|e| e.1)?
        }
        _ => info.value_size() as usize,
    };
    let keys: Vec<u8> = (0..info.max_entries()).flat_map(u32::to_ne_bytes).collect();
    batch::put(map, &keys, &vec![0; info.max_entries() as usize * value])
}

fn remove_all(map: &MapData) -> io::Result<()> {
    keys(map)?.iter().try_for_each(|key| call(BPF_MAP_DELETE_ELEM, map, Some(key), None).map(drop))
}

/// Returns the keys of a map, whatever the type of its records.
pub fn keys(map: &MapData) -> io::Result<Vec<Vec<u8>>> {
    let mut next = vec![0; map.info().map_err(io::Error::other)?.key_size() as usize];
    let mut keys: Vec<Vec<u8>> = Vec::new();
    while call(BPF_MAP_GET_NEXT_KEY, map, keys.last().map(Vec::as_slice), Some(&mut next))? {
        keys.push(next.clone());
    }
    Ok(keys)
}

/// Calls `bpf(2)` with a key and room for the answer, if given. Returns whether the entry exists.
fn call(command: i64, map: &MapData, key: Option<&[u8]>, answer: Option<&mut [u8]>) -> io::Result<bool> {
    let (key, to) = (key.map_or(0, |key| key.as_ptr() as u64), answer.map_or(0, |room| room.as_mut_ptr() as u64));
    match bpf(command, &[map.fd().as_fd().as_raw_fd() as u64, key, to]) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(Errno::ENOENT as i32) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Commands of `bpf(2)` (linux/bpf.h).
const BPF_MAP_DELETE_ELEM: i64 = 3;
const BPF_MAP_GET_NEXT_KEY: i64 = 4;
const BPF_MAP_LOOKUP_AND_DELETE_ELEM: i64 = 21;
