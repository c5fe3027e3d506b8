//! Finds the logs of this node, or copies of logs of other nodes.

use crate::flowlog::{self, Kind};
use crate::lock::RunFiles;
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// The names of the two logs' directories.
const LEASES: &str = "leases";
const FLOWS: &str = "flows";

/// The logs that exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Logs {
    /// The directory that was searched.
    pub(super) directory: PathBuf,
    /// The directories of lease logs.
    pub(super) leases: Vec<PathBuf>,
    /// The directories of flow logs.
    pub(super) flows: Vec<PathBuf>,
}

impl Logs {
    /// Returns the logs of the agent with these pins.
    pub(super) fn of(bpffs: &Path) -> Self {
        let files = RunFiles::of(bpffs);
        let there = |path: PathBuf| Some(path).into_iter().filter(|path| path.is_dir()).collect();
        Self { directory: files.logs(), leases: there(files.log()), flows: there(files.flows()) }
    }

    /// Returns the logs in a copied directory. It may hold both directories of an agent, one of them, or the directories of several agents.
    pub(super) fn below(directory: &Path) -> Result<Self> {
        let mut logs = Self { directory: directory.to_owned(), ..Self::default() };
        let context = || format!("{} cannot be read: name a directory with logs with --log", directory.display());
        let mut inner = Vec::new();
        for entry in fs::read_dir(directory).with_context(context)? {
            inner.push(entry.with_context(context)?.path());
        }
        inner.sort();
        logs.take(directory)?;
        for path in inner.iter().filter(|path| path.is_dir()) {
            logs.take(path)?;
            logs.take(&path.join(LEASES))?;
            logs.take(&path.join(FLOWS))?;
        }
        if logs.leases.is_empty() && logs.flows.is_empty() {
            bail!("{} has no logs: name a directory with logs with --log", directory.display());
        }
        Ok(logs)
    }

    /// Adds a directory if it has the files of a log, or if it is empty and has the name of a log.
    fn take(&mut self, path: &Path) -> Result<()> {
        if !path.is_dir() {
            return Ok(());
        }
        let of_name = || match path.file_name().and_then(|name| name.to_str()) {
            Some(LEASES) => Some(Kind::Leases),
            Some(FLOWS) => Some(Kind::Flows),
            _ => None,
        };
        let kind = match flowlog::kind(path) {
            Ok(kind) => kind.or_else(of_name),
            Err(error) => Some(of_name().ok_or(error)?),
        };
        match kind {
            Some(Kind::Leases) => self.leases.push(path.to_owned()),
            Some(Kind::Flows) => self.flows.push(path.to_owned()),
            None => {}
        }
        Ok(())
    }
}
