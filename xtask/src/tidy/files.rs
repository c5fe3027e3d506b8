//! The files of the clone that the rules look at, read once.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::source::Source;

/// Folders whose names start with a dot and that hold files of ours.
const HIDDEN: [&str; 2] = [".ci", ".cargo"];

/// The clone's files; all paths are relative to its root.
pub struct Tree {
    /// Rust sources.
    pub rust: BTreeMap<PathBuf, Source>,
    /// Other texts that carry rules: Markdown, TOML, YAML, shell.
    pub texts: BTreeMap<PathBuf, String>,
    /// Every file and folder.
    pub paths: BTreeSet<PathBuf>,
}

impl Tree {
    /// Reads everything below `root` but cargo's target folders and hidden folders that are not ours.
    pub fn read(root: &Path) -> Result<Self> {
        let mut tree = Self { rust: BTreeMap::new(), texts: BTreeMap::new(), paths: BTreeSet::new() };
        tree.read_folder(root, Path::new(""))?;
        Ok(tree)
    }

    #[cfg(test)]
    pub fn of(files: &[(&str, &str)]) -> Self {
        let mut tree = Self { rust: BTreeMap::new(), texts: BTreeMap::new(), paths: BTreeSet::new() };
        for (path, text) in files {
            tree.add(PathBuf::from(path), (*text).to_owned());
        }
        tree
    }

    fn read_folder(&mut self, root: &Path, folder: &Path) -> Result<()> {
        let absolute = root.join(folder);
        for entry in fs::read_dir(&absolute).with_context(|| format!("cannot read {}", absolute.display()))? {
            let entry = entry?;
            let name = entry.file_name();
            let path = folder.join(&name);
            let hidden = name.to_str().is_some_and(|name| name.starts_with('.') && !HIDDEN.contains(&name));
            if entry.file_type()?.is_dir() {
                if !hidden && !entry.path().join("CACHEDIR.TAG").exists() {
                    self.paths.insert(path.clone());
                    self.read_folder(root, &path)?;
                }
                continue;
            }
            match fs::read_to_string(entry.path()) {
                Ok(text) => self.add(path, text),
                // Not a text: it only counts as a link's target.
                Err(_) => drop(self.paths.insert(path)),
            }
        }
        Ok(())
    }

    fn add(&mut self, path: PathBuf, text: String) {
        self.paths.extend(path.ancestors().filter(|path| *path != Path::new("")).map(Path::to_path_buf));
        if path.extension().is_some_and(|extension| extension == "rs") {
            self.rust.insert(path, Source::parse(&text));
        } else {
            self.texts.insert(path, text);
        }
    }
}
