//! Builds all programs and tests, and lists the test binaries.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};
use serde::Deserialize;

use super::plan::CHART;
use crate::progress::{self, Step};
use crate::{process, workspace};

/// The kind of a test binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Tests of functions and modules.
    Unit,
    /// Tests of the real binaries in network namespaces: the `[[test]]` targets of the package `tests`.
    EndToEnd,
}

/// A binary that cargo built for testing.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Binary {
    /// The kind; it comes first, so that unit tests sort first.
    pub kind: Kind,
    /// The name: `crate` or `crate/target`.
    pub name: String,
    /// The program.
    executable: PathBuf,
    /// Its crate's folder.
    folder: PathBuf,
}

impl Binary {
    #[cfg(test)]
    pub fn named(kind: Kind, name: &str) -> Self {
        Self { kind, name: name.to_owned(), executable: PathBuf::new(), folder: PathBuf::new() }
    }

    /// Returns the path of the program.
    pub fn path(&self) -> &Path {
        &self.executable
    }

    /// Returns the command that runs it as `cargo test` would.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }
}

/// The relevant fields of a line of cargo's JSON output.
#[derive(Deserialize)]
struct Message {
    reason: String,
    #[serde(default)]
    manifest_path: PathBuf,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds the programs and all their tests with one command, so that nothing is compiled twice. Of the examples, links only the one that
/// the checks run, and the unit tests of those that have any. Returns the test binaries, unit tests first.
pub fn build() -> Result<Vec<Binary>> {
    let title = "build everything";
    let (step, log) = (Step::start(title), progress::log_file(title)?);
    let mut command = workspace::cargo("build");
    command.args(workspace::PACKAGES).args(["--lib", "--bins", "--tests", "--example", "codegen"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    let mut binaries = Vec::new();
    let mut messages = Vec::new();
    let status = process::run(&mut command, &log, None, |stream, line| match stream {
        process::Stream::Out => binaries.extend(parse(line)),
        process::Stream::Err => {
            step.at(line);
            messages.push(line.to_owned());
        }
    })?;
    if status.is_none_or(|status| !status.success()) {
        step.end("✗", "failed");
        eprintln!("{}", messages.join("\n"));
        bail!("the build failed; see above");
    }
    step.end("✓", "");
    binaries.sort();
    Ok(binaries)
}

fn parse(line: &str) -> Option<Binary> {
    let message: Message = serde_json::from_str(line).ok()?;
    if message.reason != "compiler-artifact" || !message.profile?.test {
        return None;
    }
    let (target, folder) = (message.target?, message.manifest_path.parent()?.to_path_buf());
    let package = folder.file_name()?.to_str()?.to_owned();
    let is_lib = target.kind.iter().any(|kind| kind.ends_with("lib"));
    let is_test = package == "tests" && target.kind.iter().any(|kind| kind == "test");
    let name = if is_lib { package } else { format!("{package}/{}", target.name) };
    // The chart's tests need no lab.
    let kind = if is_test && name != CHART { Kind::EndToEnd } else { Kind::Unit };
    Some(Binary { kind, name, executable: message.executable?, folder })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_binaries_are_told_from_other_artifacts() {
        let line = |package: &str, kind: &str, name: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/x/{package}/Cargo.toml","target":{{"kind":["{kind}"],
                "name":"{name}"}},"profile":{{"test":{test}}},"executable":"/t/{name}","fresh":true}}"#
            )
        };
        let found = |text: String| parse(&text).map(|binary| (binary.kind, binary.name));
        assert_eq!(found(line("tests", "test", "spread", true)), Some((Kind::EndToEnd, "tests/spread".to_owned())));
        assert_eq!(found(line("tests", "test", "chart", true)), Some((Kind::Unit, CHART.to_owned())));
        assert_eq!(found(line("tests", "example", "bench", true)), Some((Kind::Unit, "tests/bench".to_owned())));
        assert_eq!(found(line("tests", "lib", "lab", true)), Some((Kind::Unit, "tests".to_owned())));
        assert_eq!(found(line("xtask", "bin", "xtask", true)), Some((Kind::Unit, "xtask/xtask".to_owned())));
        assert_eq!(found(line("xtask", "bin", "xtask", false)), None);
        assert_eq!(found(r#"{"reason":"build-finished","success":true}"#.to_owned()), None);
    }
}
