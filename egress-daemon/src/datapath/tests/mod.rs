//! Tests of the datapath: of the pure parts with arbitrary views, of the rest with the programs in this machine's
//! kernel.

mod clsact;
mod collector;
mod datagrams;
mod encode;
mod ended;
mod events;
mod exit;
mod explain;
mod frames;
mod fuzz;
mod garbage;
mod gate;
mod gateway;
mod grown;
mod halves;
mod inbound;
mod load;
mod model;
mod moves;
mod nat;
mod native;
mod native_devices;
mod native_model;
mod native_vlan;
mod packets;
mod pieces;
mod races;
mod reuse;
mod rig;
mod scenes;
mod tables;
mod talk;
mod trace;
mod traffic;
mod transports;
mod wire;
mod write;

/// For tests of other modules.
pub(crate) mod testing {
    pub use super::rig::{Rig, scene};
}

use super::Pins;
use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    path::PathBuf,
};

/// A directory of its own on a BPF file system; removed when dropped, with everything that is pinned in it.
struct BpfDir {
    pins: Pins,
    /// Where a file system was mounted for it.
    mounted: Option<PathBuf>,
}

impl BpfDir {
    /// `None`, and a line that says so, if this process may not do that.
    fn new(test: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            let line = format!("SKIP {test}: needs root to load programs\n");
            eprint!("{line}");
            if let Some(path) = std::env::var_os("SPILLWAY_SKIPS") {
                OpenOptions::new().append(true).create(true).open(path).unwrap().write_all(line.as_bytes()).unwrap();
            }
            return None;
        }
        let name = format!("spillway-test-{test}-{}", std::process::id());
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
