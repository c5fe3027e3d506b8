//! Checks the disk space for a whole run before it starts, so that it does not fail in the middle.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use nix::sys::statvfs::statvfs;

use crate::{cluster, workspace};

const GIGABYTE: u64 = 1 << 30;
/// The final size of cargo's target folder.
const BUILT: u64 = 4 * GIGABYTE;
/// The space that Go takes while it builds Kubernetes.
const KUBERNETES: u64 = 5 * GIGABYTE;
/// The size of files that a run writes even if everything is built: images, guests' file systems, logs, the nodes of a cluster.
const RUN: u64 = GIGABYTE;

/// Prints how much space a whole run needs, and fails if less is free.
pub fn ensure() -> Result<()> {
    let scratch = workspace::scratch_dir()?;
    let target = scratch.parent().unwrap_or(&scratch);
    let system = statvfs(target).with_context(|| format!("cannot ask for the free space at {}", target.display()))?;
    let free = system.blocks_available() * system.fragment_size();
    eprintln!("disk: {}", judge(size(target), cluster::is_built()?, free, target)?);
    Ok(())
}

fn judge(used: u64, has_kubernetes: bool, free: u64, target: &Path) -> Result<String> {
    let needed = BUILT.saturating_sub(used) + if has_kubernetes { 0 } else { KUBERNETES } + RUN;
    let gigabytes = |bytes: u64| format!("{}.{} GB", bytes / GIGABYTE, bytes % GIGABYTE * 10 / GIGABYTE);
    let (needs, takes, has) = (gigabytes(needed), gigabytes(used), gigabytes(free));
    let sentence =
        format!("a whole run needs {needs} beside the {takes} that {} already takes; {has} are free", target.display());
    if free < needed {
        bail!("{sentence}. Remove files, or set CARGO_TARGET_DIR to a folder on a larger disk");
    }
    Ok(sentence)
}

/// Returns the total size of all files below a folder, in bytes. Ignores files that cannot be read.
fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let of = |entry: fs::DirEntry| match entry.metadata() {
        Ok(data) if data.is_dir() => size(&entry.path()),
        Ok(data) => data.len(),
        Err(_) => 0,
    };
    entries.map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_without_enough_disk_space_is_refused_with_sizes_and_a_remedy() {
        let judge = |used: u64, built: bool, free: u64| {
            judge(used * GIGABYTE, built, free * GIGABYTE, Path::new("/t")).map_err(|error| error.to_string())
        };
        assert!(judge(0, false, 10).is_ok());
        assert_eq!(
            judge(2, false, 7).unwrap_err(),
            "a whole run needs 8.0 GB beside the 2.0 GB that /t already takes; 7.0 GB are free. Remove files, or set \
             CARGO_TARGET_DIR to a folder on a larger disk"
        );
        // A built tree needs little space, but always some.
        assert!(judge(30, true, 1).is_ok());
        assert!(judge(30, true, 0).is_err());
    }
}
