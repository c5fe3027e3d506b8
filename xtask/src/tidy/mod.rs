//! `cargo xtask tidy`: the rules that neither the compiler nor clippy checks. Each rule takes the files and returns findings; none changes one.

mod links;
mod rust;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

use crate::progress::{self, Step};
use crate::workspace;

/// The clone's text files, by their paths from its root.
type Tree = BTreeMap<PathBuf, String>;

/// A rule that is broken at a place.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    path: PathBuf,
    /// 0 when it concerns the whole file.
    line: usize,
    message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.path.display())?;
        if self.line > 0 {
            write!(f, "{}:", self.line)?;
        }
        write!(f, " {}", self.message)
    }
}

/// Checks everything, formatting included.
pub fn run() -> Result<()> {
    rules()?;
    format()
}

/// The formatting of all crates.
pub fn format() -> Result<()> {
    progress::run("formatting", workspace::cargo("fmt").args(["--all", "--check"]))
}

/// All rules over all files.
pub fn rules() -> Result<()> {
    let step = Step::start("rules");
    let tree = files()?;
    let mut findings = rust::check(&tree);
    findings.extend(links::check(&tree));
    findings.sort();
    if findings.is_empty() {
        step.end("✓", &format!("{} files", tree.len()));
        return Ok(());
    }
    step.end("✗", "broken");
    let list: Vec<String> = findings.iter().map(|finding| format!("\n  {finding}")).collect();
    bail!("{} findings:{}", findings.len(), list.concat())
}

/// The files that git tracks, and new ones that it does not ignore. Files that are not text are empty: they only count as link targets.
fn files() -> Result<Tree> {
    let root = workspace::root();
    let mut command = Command::new("git");
    command.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(&root);
    let listed = lab::command::output(&mut command)?;
    let names = listed.split_terminator('\0').map(PathBuf::from).filter(|path| root.join(path).is_file());
    Ok(names.map(|path| (path.clone(), fs::read_to_string(root.join(path)).unwrap_or_default())).collect())
}
