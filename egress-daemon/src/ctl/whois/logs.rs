//! Finds the logs: this node's, or copies of those of other nodes.

use crate::lock::RunFiles;
use anyhow::{Context as _, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// The names of the two logs' directories.
const LEASES: &str = "leases";
const FLOWS: &str = "flows";

/// The logs that exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Logs {
    /// Where they were looked for.
    pub(super) directory: PathBuf,
    /// One of leases.
    pub(super) leases: Option<PathBuf>,
    /// Those of flows.
    pub(super) flows: Vec<PathBuf>,
}

impl Logs {
    /// Those of the agent with these pins.
    pub(super) fn of(bpffs: &Path) -> Self {
        let files = RunFiles::of(bpffs);
        let there = |path: PathBuf| Some(path).filter(|path| path.is_dir());
        Self { directory: files.logs(), leases: there(files.log()), flows: there(files.flows()).into_iter().collect() }
    }

    /// Those in a directory that was copied: the two directories of an agent, one of them, or the directories of several agents.
    pub(super) fn below(directory: &Path) -> Result<Self> {
        let mut logs = Self { directory: directory.to_owned(), ..Self::default() };
        logs.take(directory);
        let context = || format!("{} cannot be read: name a directory with logs with --log", directory.display());
        let mut inner = Vec::new();
        for entry in fs::read_dir(directory).with_context(context)? {
            inner.push(entry.with_context(context)?.path());
        }
        inner.sort();
        for path in inner.iter().filter(|path| path.is_dir()) {
            logs.take(path);
            logs.take(&path.join(LEASES));
            logs.take(&path.join(FLOWS));
        }
        if logs.leases.is_none() && logs.flows.is_empty() {
            logs.leases = Some(directory.to_owned());
        }
        Ok(logs)
    }

    /// Takes a directory if its name is that of a log.
    fn take(&mut self, path: &Path) {
        if !path.is_dir() {
            return;
        }
        match path.file_name().and_then(|name| name.to_str()) {
            Some(LEASES) if self.leases.is_none() => self.leases = Some(path.to_owned()),
            Some(FLOWS) => self.flows.push(path.to_owned()),
            _ => {}
        }
    }
}
