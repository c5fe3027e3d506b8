//! `cargo xtask tidy`: the rules that no compiler checks. Each rule takes the files and returns findings; none changes one.

mod files;
mod links;
mod rust;
mod source;

use std::fmt;
use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::progress::{self, Step};
use crate::workspace;

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
    let tree = files::Tree::read(&workspace::root())?;
    let mut findings = rust::check(&tree);
    findings.extend(links::check(&tree));
    findings.sort();
    if findings.is_empty() {
        step.end("✓", &format!("{} Rust files", tree.rust.len()));
        return Ok(());
    }
    step.end("✗", "broken");
    let list: Vec<String> = findings.iter().map(|finding| format!("\n  {finding}")).collect();
    bail!("{} findings:{}", findings.len(), list.concat())
}
