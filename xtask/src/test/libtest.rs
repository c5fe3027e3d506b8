//! Runs a test binary and parses the output of Rust's test harness.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::tally::Tally;
use crate::process;
use crate::process::Stream;
use crate::progress::{self, Step};

/// The number of last lines that are shown of a binary that ended without a result.
const TAIL_LINES: usize = 100;

/// The parsed output of a harness.
#[derive(Debug, Default, PartialEq, Eq)]
struct Output {
    passed: usize,
    failed: usize,
    /// The tests that have ended, with their outcomes.
    ended: BTreeMap<String, String>,
    /// The number of result lines; a binary that crashes or hangs prints none.
    results: usize,
    /// The output of the failed tests.
    failures: Vec<String>,
    in_failures: bool,
    /// The `SKIP` lines of a guest's tests, which cannot write to the host's file.
    skips: Vec<String>,
}

impl Output {
    /// Parses one line of standard output.
    fn line(&mut self, line: &str) {
        if let Some(result) = line.split("test result: ").nth(1) {
            let count = |what: &str| {
                let before = result.split(what).next().and_then(|text| text.split_whitespace().next_back());
                before.and_then(|number| number.parse::<usize>().ok()).unwrap_or(0)
            };
            self.passed += count(" passed");
            self.failed += count(" failed");
            self.results += 1;
            self.in_failures = false;
        } else if line.starts_with("SKIP ") {
            self.skips.push(line.to_owned());
        } else if self.in_failures || line == "failures:" {
            self.in_failures = true;
            self.failures.push(line.to_owned());
        } else if let Some((name, outcome)) = line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ")) {
            self.ended.insert(name.to_owned(), outcome.to_owned());
        }
    }

    fn failed_tests(&self) -> Vec<&str> {
        self.ended.iter().filter(|(_, outcome)| *outcome == "FAILED").map(|(name, _)| name.as_str()).collect()
    }
}

/// The options for running a binary.
pub struct Run<'a> {
    /// The arguments that select its tests, with which unfinished tests are listed.
    pub filters: &'a [&'a str],
    /// The time after which it counts as hanging.
    pub timeout: Duration,
    /// Whether a failed test is run once more, with exclusive use of the machine (`lab::machine`), because it may depend on real time on a
    /// shared machine. If it then passes, it counts as passed and is named in the summary.
    pub second_try: bool,
}

/// Runs a binary and adds its results to `tally`.
pub fn run(name: &str, mut command: Command, how: &Run<'_>, tally: &mut Tally) -> Result<()> {
    let Run { filters, timeout, second_try } = *how;
    let (step, log) = (Step::start(name), progress::log_file(name)?);
    let skips = log.with_extension("skips");
    std::fs::write(&skips, "").with_context(|| format!("cannot write {}", skips.display()))?;
    command.env("SPILLWAY_SKIPS", &skips);
    let mut output = Output::default();
    let status = process::run(&mut command, &log, Some(timeout), |stream, line| {
        if stream == Stream::Out {
            // A guest's output comes over a serial line and has CR LF.
            output.line(line.trim_end_matches('\r'));
        }
        step.at(line);
    })?;

    let mut again = Vec::new();
    if second_try && output.failed_tests().len() == output.failed {
        again = output.failed_tests().into_iter().map(ToOwned::to_owned).collect();
        again.retain(|test| passes_alone(&command, test, &log, timeout));
    }
    if !again.is_empty() {
        println!("{}", output.failures.join("\n"));
        for test in &again {
            output.ended.insert(test.clone(), "ok".to_owned());
            tally.second_try(&format!("{name} {test}"));
        }
        output.failed -= again.len();
        output.passed += again.len();
    }
    if status.is_none() || output.results == 0 {
        // The harness prints counts last. Without them, count the lines of tests that have ended.
        let failed = output.failed_tests().len();
        output.passed = output.passed.max(output.ended.len() - failed);
        output.failed = output.failed.max(failed);
    }
    let skipped = read_skips(&skips, &output)?;
    let passed = output.passed.saturating_sub(skipped.len());
    let mut failed = output.failed;
    let mut why = String::new();
    if status.is_none() {
        let running = unfinished(&command, filters, &output);
        why = format!("did not end within {} s; not finished: {}", timeout.as_secs(), running.join(", "));
    } else if let Some(status) = status.filter(|status| !status.success())
        && (output.failed == 0 && again.is_empty() || output.results == 0)
    {
        why = format!("ended with {status}");
    } else if output.results == 0 {
        why = "ended without a result".to_owned();
    }
    if !why.is_empty() {
        failed += 1;
    }
    let counts = format!("{passed} passed, {failed} failed, {} skipped", skipped.len());
    match (failed, output.passed) {
        (0, 0) => step.drop_silently(),
        (0, _) => step.end("✓", &counts),
        _ => step.end("✗", &counts),
    }

    tally.pass(passed);
    for (test, reason) in &skipped {
        tally.skip(&format!("{name} {test}"), reason);
    }
    if output.failed > 0 {
        println!("{}", output.failures.join("\n"));
        record_failures(name, &output, tally);
    }
    if !why.is_empty() {
        show_tail(&log);
        tally.fail(name, &why);
    }
    Ok(())
}

/// Runs one test alone, and returns whether it passes.
fn passes_alone(command: &Command, test: &str, log: &Path, timeout: Duration) -> bool {
    let mut alone = process::without_arguments(command);
    alone.args([test, "--exact", "--test-threads", "1"]).env("SPILLWAY_TEST_ALONE", "1");
    let log = log.with_extension("again");
    process::run(&mut alone, &log, Some(timeout), |_, _| {}).is_ok_and(|status| status.is_some_and(|s| s.success()))
}

/// Records the failed tests, by name if their lines could be parsed.
fn record_failures(binary: &str, output: &Output, tally: &mut Tally) {
    let named = output.failed_tests();
    let why =
        if output.failures.is_empty() { "its output is lost: the run did not end" } else { "its output is above" };
    for test in &named {
        tally.fail(&format!("{binary} {test}"), why);
    }
    for _ in named.len()..output.failed {
        tally.fail(binary, "a test whose output is above");
    }
}

/// Returns the tests and reasons of `SKIP <test>: <reason>` lines. A test that failed nevertheless does not count as skipped.
fn read_skips(file: &Path, output: &Output) -> Result<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let failed: BTreeSet<&str> = output.failed_tests().into_iter().collect();
    let printed = output.skips.iter().map(String::as_str);
    let lines = text.lines().chain(printed).filter_map(|line| line.strip_prefix("SKIP ")?.split_once(": "));
    Ok(lines
        .filter(|(test, _)| !failed.iter().any(|failed| failed == test || failed.ends_with(&format!("::{test}"))))
        .map(|(test, reason)| (test.to_owned(), reason.to_owned()))
        .collect())
}

/// Returns the tests that had not ended when the binary was killed.
fn unfinished(command: &Command, filters: &[&str], output: &Output) -> Vec<String> {
    let mut list = Command::new(command.get_program());
    list.args(["--list", "--format", "terse"]).args(filters);
    let listed = list.output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let tests = listed.lines().filter_map(|line| line.strip_suffix(": test"));
    tests.filter(|test| !output.ended.contains_key(*test)).map(ToOwned::to_owned).collect()
}

fn show_tail(log: &Path) {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    println!("{}", lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n"));
    println!("(all of it is in {})", log.display());
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "running 4 tests\ntest a::one ... ok\ntest a::two ... FAILED\ntest b::three ... ok\n\
        test b::four ... ok\n\nfailures:\n\n---- a::two stdout ----\nassertion failed\n\nfailures:\n    a::two\n\n\
        test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.01s\n\n\
        running 2 tests\n..\ntest result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";

    fn read(text: &str) -> Output {
        let mut output = Output::default();
        text.lines().for_each(|line| output.line(line));
        output
    }

    #[test]
    fn results_are_added_up_and_failures_named() {
        let output = read(PRINTED);
        assert_eq!((output.passed, output.failed, output.results), (5, 1, 2));
        assert_eq!(output.failed_tests(), ["a::two"]);
        assert!(output.failures.contains(&"assertion failed".to_owned()));
        assert!(!output.failures.iter().any(|line| line.contains("running")));
    }

    /// Runs a shell script in place of a test binary.
    fn run_script(name: &str, script: &str, timeout: Duration) -> Tally {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut tally = Tally::default();
        run(name, command, &Run { filters: &[], timeout, second_try: false }, &mut tally).unwrap();
        tally
    }

    const PATIENT: Duration = Duration::from_secs(60);

    #[test]
    fn skips_are_subtracted_from_what_passed() {
        let script = format!(
            "printf 'SKIP three: no kernel\\nSKIP two: but it failed\\nSKIP three: no kernel\\n' >> $SPILLWAY_SKIPS\n\
             cat <<'END'\n{PRINTED}\nEND\nexit 101"
        );
        let tally = run_script("skips", &script, PATIENT);
        let mut expected = Tally::default();
        expected.pass(4);
        expected.skip("skips three", "no kernel");
        expected.fail("skips a::two", "its output is above");
        assert_eq!(tally, expected);
        assert_eq!(tally.line(), "4 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn a_test_that_passes_alone_counts_as_passed_and_is_named() {
        for (alone, line) in [(0, "2 passed, 0 failed, 0 skipped"), (1, "1 passed, 1 failed, 0 skipped")] {
            // The first call runs all tests, the second one only the failed test.
            let script = std::env::temp_dir().join(format!("spillway-harness-{}-{alone}", std::process::id()));
            let all = "test one ... ok\ntest two ... FAILED\ntest result: FAILED. 1 passed; 1 failed";
            let text = format!("#!/bin/sh\n[ \"$2\" = --exact ] && exit {alone}\necho '{all}'\nexit 101\n");
            std::fs::write(&script, text).unwrap();
            let mut mode = std::fs::metadata(&script).unwrap().permissions();
            std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o700);
            std::fs::set_permissions(&script, mode).unwrap();
            let (mut tally, how) = (Tally::default(), Run { filters: &[], timeout: PATIENT, second_try: true });
            run("again", Command::new(&script), &how, &mut tally).unwrap();
            std::fs::remove_file(&script).unwrap();
            assert_eq!(tally.line(), line);
        }
    }

    #[test]
    fn a_crash_and_a_hang_are_failures() {
        assert_eq!(
            run_script("crash", "echo 'running 1 test'; kill -9 $$", PATIENT).line(),
            "0 passed, 1 failed, 0 skipped"
        );
        assert_eq!(run_script("silent", "exit 0", PATIENT).line(), "0 passed, 1 failed, 0 skipped");
        let hang = run_script("hang", "exec tail -f /dev/null", Duration::from_millis(200));
        assert_eq!(hang.line(), "0 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn a_hang_does_not_hide_what_failed_before() {
        let said = "test a ... ok\\ntest b ... FAILED\\n";
        let script = format!("[ \"$1\" = --list ] && exit; printf '{said}'; exec tail -f /dev/null");
        let tally = run_script("hang with failures", &script, Duration::from_millis(500));
        let mut expected = Tally::default();
        expected.pass(1);
        expected.fail("hang with failures b", "its output is lost: the run did not end");
        expected.fail("hang with failures", "did not end within 0 s; not finished: ");
        assert_eq!(tally, expected);
    }
}
