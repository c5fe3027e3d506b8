//! The disk that a whole run takes: asked for before the run, so that it does not fail in the middle.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use nix::sys::statvfs::statvfs;

use crate::workspace;

const GIGABYTE: u64 = 1 << 30;
/// What cargo's target folder grows to, with Kubernetes and the guests of other kernels.
const WHOLE_RUN: u64 = 16 * GIGABYTE;
/// What a run writes even if everything is built: images, guests' file systems, logs, the nodes of a cluster.
const BUILT: u64 = 3 * GIGABYTE;

/// Says how much space a whole run needs, and fails if there is less.
pub fn ensure() -> Result<()> {
    let scratch = workspace::scratch_dir()?;
    let target = scratch.parent().unwrap_or(&scratch);
    let system = statvfs(target).with_context(|| format!("cannot ask for the free space at {}", target.display()))?;
    let free = system.blocks_available() * system.fragment_size();
    eprintln!("disk: {}", judge(size(target), free, target)?);
    Ok(())
}

fn judge(used: u64, free: u64, target: &Path) -> Result<String> {
    let needed = WHOLE_RUN.saturating_sub(used).max(BUILT);
    let gigabytes = |bytes: u64| format!("{}.{} GB", bytes / GIGABYTE, bytes % GIGABYTE * 10 / GIGABYTE);
    let (needs, takes, has) = (gigabytes(needed), gigabytes(used), gigabytes(free));
    let sentence =
        format!("a whole run needs {needs} beside the {takes} that {} already takes; {has} are free", target.display());
    if free < needed {
        bail!("{sentence}. Remove files, or set CARGO_TARGET_DIR to a folder on a larger disk");
    }
    Ok(sentence)
}

/// The bytes of all files below a folder; what cannot be read counts as nothing.
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
    fn a_run_without_room_is_refused_with_figures_and_a_remedy() {
        let judge = |used: u64, free: u64| judge(used * GIGABYTE, free * GIGABYTE, Path::new("/t"));
        assert!(judge(0, 16).is_ok());
        let refused = judge(4, 11).unwrap_err().to_string();
        assert_eq!(
            refused,
            "a whole run needs 12.0 GB beside the 4.0 GB that /t already takes; 11.0 GB are free. Remove files, or set \
             CARGO_TARGET_DIR to a folder on a larger disk"
        );
        // A built tree needs little, and never nothing.
        assert!(judge(30, 3).is_ok());
        assert!(judge(30, 2).is_err());
    }
}
