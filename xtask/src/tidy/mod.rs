//! `cargo xtask tidy`: checks the rules that neither the compiler nor clippy checks. Each rule returns findings and changes no file.

mod links;
mod rust;
mod yaml;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

use crate::progress::{self, Step};
use crate::workspace;

/// The clone's files by their paths relative to its root, with the contents of text files.
type Tree = BTreeMap<PathBuf, String>;

/// A violation of a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    path: PathBuf,
    /// The line; 0 if the finding concerns the whole file.
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

/// Checks all rules and the formatting.
pub fn run() -> Result<()> {
    rules()?;
    format()
}

/// Checks the formatting of all crates.
pub fn format() -> Result<()> {
    progress::run("formatting", workspace::cargo("fmt").args(["--all", "--check"]))
}

/// Checks all rules for all files.
pub fn rules() -> Result<()> {
    let step = Step::start("rules");
    let tree = files()?;
    let mut findings = rust::check(&tree);
    findings.extend(links::check(&tree));
    findings.extend(yaml::check(&tree));
    findings.sort();
    if findings.is_empty() {
        step.end("✓", &format!("{} files", tree.len()));
        return Ok(());
    }
    step.end("✗", "broken");
    let list: Vec<String> = findings.iter().map(|finding| format!("\n  {finding}")).collect();
    bail!("{} findings:{}", findings.len(), list.concat())
}

/// Returns the files that git tracks, and new files that it does not ignore. Non-text files are empty, and serve only as link targets.
fn files() -> Result<Tree> {
    let root = workspace::root();
    let mut command = Command::new("git");
    command.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(&root);
    let listed = lab::command::output(&mut command)?;
    let names = listed.split_terminator('\0').map(PathBuf::from).filter(|path| root.join(path).is_file());
    Ok(names.map(|path| (path.clone(), fs::read_to_string(root.join(path)).unwrap_or_default())).collect())
}
