//! Compares the number of instructions that a kernel's verifier processed for each program with the baseline.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use super::Kernel;
use crate::test::tally::Tally;
use crate::workspace;

/// The growth in percent above which a program is reported. The verifier's limit is a million instructions.
const GROWTH: u64 = 20;
/// The prefix of a line with a program's count in the output of a test.
const PREFIX: &str = "VERIFIED ";

/// The number of instructions by kernel and program.
type Counts = BTreeMap<(String, String), u64>;

fn baseline() -> PathBuf {
    workspace::root().join("tests/verified.txt")
}

/// Compares the counts in a guest's output with the baseline, and reports growth. With `bless`, writes the baseline.
pub fn compare(kernel: Kernel, output: &str, bless: bool, tally: &mut Tally) -> Result<()> {
    let path = baseline();
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut known = read(&text);
    let now = counted(kernel, output);
    if now.is_empty() {
        tally.fail(&format!("verifier of Linux {}", kernel.version()), "the guest reported no counts");
    }
    for ((version, program), count) in &now {
        let before = known.get(&(version.clone(), program.clone())).copied();
        let before_text = before.map_or_else(|| "no baseline".to_owned(), |before| format!("baseline {before}"));
        eprintln!("  Linux {version} verifies {program} in {count} instructions ({before_text})");
        if !bless && before.is_none_or(|before| *count > before + before * GROWTH / 100) {
            tally.note(&format!(
                "Linux {version} verifies {program} in {count} instructions ({before_text}): if that is intended, record it \
                 with `cargo xtask test --kernel {version} --bless`"
            ));
        }
    }
    if bless {
        known.retain(|(version, _), _| version != kernel.version());
        known.extend(now);
        fs::write(&path, write(&known)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Returns the counts that the tests of a guest have reported.
fn counted(kernel: Kernel, output: &str) -> Counts {
    let lines = output.lines().filter_map(|line| line.strip_prefix(PREFIX));
    read(&lines.map(|line| format!("{} {line}\n", kernel.version())).collect::<String>())
}

/// Parses lines of kernel, program and count. A line that begins with `#` is a comment.
fn read(text: &str) -> Counts {
    let lines = text.lines().filter(|line| !line.starts_with('#')).map(|line| line.split_whitespace());
    lines
        .filter_map(|mut words| {
            Some(((words.next()?.to_owned(), words.next()?.to_owned()), words.next()?.parse().ok()?))
        })
        .collect()
}

fn write(counts: &Counts) -> String {
    let mut text =
        "# Instructions that the verifier processes: kernel, program, count. Written by `cargo xtask test --bless`.\n"
            .to_owned();
    for ((version, program), count) in counts {
        let _ = writeln!(text, "{version} {program} {count}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_from_a_guest_and_survive_the_file() {
        let counts = counted(Kernel::V6_1, "test x ... ok\nVERIFIED pod_egress 12\nVERIFIED pod_ingress 3\nGUEST END");
        let key = |program: &str| ("6.1".to_owned(), program.to_owned());
        assert_eq!(counts, BTreeMap::from([(key("pod_egress"), 12), (key("pod_ingress"), 3)]));
        assert_eq!(read(&write(&counts)), counts);
    }
}
