//! Test support, also for the crates above: loaded programs, packets to run them with, tables to fill, and the expected results.
#![allow(missing_docs, clippy::unwrap_used, reason = "only tests use it")]

pub mod frames;
pub mod nat;
pub mod reused;
pub mod rig;
pub mod scenes;
pub mod tables;

use super::Pins;
use std::{fs, io, path::PathBuf};

/// A directory for one test on a BPF file system. Dropping it removes the directory with everything that is pinned in it.
pub struct BpfDir {
    /// The pins below it.
    pub pins: Pins,
    /// The mount point of a file system that was mounted for it.
    mounted: Option<PathBuf>,
}

impl BpfDir {
    /// Creates the directory. Returns `None`, and reports that the test is skipped, if this process lacks the permission.
    pub fn new(test: &str) -> Option<Self> {
        Self::named(test, test)
    }

    /// Does the same for a directory that several tests use.
    pub fn named(test: &str, name: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            crate::testing::skip(test, "root to load programs");
            return None;
        }
        let name = format!("spillway-test-{name}-{}", std::process::id());
        let (parent, mounted) = match PathBuf::from("/sys/fs/bpf") {
            shared if is_bpffs(&shared) => (shared, None),
            _ => {
                let own = std::env::temp_dir().join(format!("{name}-bpffs"));
                fs::create_dir_all(&own).unwrap();
                let flags = nix::mount::MsFlags::empty();
                nix::mount::mount(Some("bpf"), &own, Some("bpf"), flags, None::<&str>).unwrap();
                (own.clone(), Some(own))
            }
        };
        let dir = parent.join(name);
        fs::create_dir(&dir).unwrap();
        Some(Self { pins: Pins::new(&dir), mounted })
    }
}

fn is_bpffs(path: &std::path::Path) -> bool {
    nix::sys::statfs::statfs(path).is_ok_and(|s| s.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC)
}

impl Drop for BpfDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.pins.root());
        if let Some(own) = &self.mounted {
            let _ = nix::mount::umount(own);
            let _ = fs::remove_dir(own);
        }
    }
}

/// `BPF_MAP_UPDATE_ELEM` (linux/bpf.h).
pub const BPF_MAP_UPDATE_ELEM: i64 = 2;

/// Calls `bpf(2)`; `words` are the attributes from their beginning.
pub fn bpf(command: i64, words: &[u64]) -> io::Result<()> {
    let mut attr = [0u64; 16];
    attr[..words.len()].copy_from_slice(words);
    // SAFETY: callers pass pointers to the memory that the command expects.
    unsafe { super::syscall::bpf(command, &mut attr) }
}

/// Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (2014).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % n as u64) as usize
    }

    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}
