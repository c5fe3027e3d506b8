//! Rules for Rust files: each says what it is for, has one subject, is reached by its crate, and leaves nothing undone.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use super::Finding;
use super::files::Tree;
use super::source::{Module, Source};

/// More lines than this need a reason in `LONG`.
const MAX_LINES: usize = 500;

/// Files that may be longer, each with the reason.
const LONG: [(&str, &str); 0] = [];

/// Test code that may sleep, each file with the reason.
const SLEEPERS: [(&str, &str); 1] =
    [("tests/lab/wait.rs", "the one place where tests wait for a condition, by looking at it again and again")];

/// Words that say that something is not done. They are put together here so that this file passes its own rule.
const UNDONE: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];

/// Checks every Rust file, and other texts for unfinished work.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let reach = Reach::of(tree);
    let mut findings = Vec::new();
    for (file, source) in &tree.rust {
        let mut find = |line: usize, message: &str| {
            findings.push(Finding { path: file.clone(), line, message: message.to_owned() });
        };
        if !source.documented {
            find(1, "starts without `//!`: say what the module is for and what it may know");
        }
        check_length(file, source, &mut find);
        if !reach.files.contains(file) {
            find(0, "no `mod` line and no Cargo.toml reaches this file, so nothing in it is compiled or run");
        }
        for (line, text) in &source.comments {
            check_comment(*line, text, &mut find);
        }
        check_tokens(source, &mut find);
        check_sleeps(file, source, reach.tests.contains(file), &mut find);
    }
    for (file, text) in tree.texts.iter().filter(|(file, _)| is_ours(file)) {
        for (number, line) in text.lines().enumerate() {
            check_comment(number + 1, line, &mut |line, message| {
                findings.push(Finding { path: file.clone(), line, message: message.to_owned() });
            });
        }
    }
    findings.extend(stale_exceptions(tree));
    findings
}

/// Texts that we write, by their endings: not licences, not lock files.
fn is_ours(file: &Path) -> bool {
    let ending = file.extension().and_then(|ending| ending.to_str());
    matches!(ending, Some("md" | "toml" | "yaml" | "yml" | "sh")) || file.starts_with(".ci")
}

fn excepted(list: &[(&str, &str)], file: &Path) -> bool {
    list.iter().any(|(path, _)| Path::new(path) == file)
}

fn check_length(file: &Path, source: &Source, find: &mut impl FnMut(usize, &str)) {
    if source.lines > MAX_LINES && !excepted(&LONG, file) {
        find(0, &format!("{} lines, and {MAX_LINES} are allowed: does it still have one subject?", source.lines));
    }
}

/// An exception that is not needed any more would hide the next one.
fn stale_exceptions(tree: &Tree) -> Vec<Finding> {
    let stale = |list: &'static [(&str, &str)], needed: fn(&Source) -> bool| {
        list.iter().map(|(file, _)| PathBuf::from(file)).filter(move |file| {
            let source = tree.rust.get(file);
            source.is_some_and(|source| !needed(source))
        })
    };
    let long = stale(&LONG, |source| source.lines > MAX_LINES);
    let sleepers = stale(&SLEEPERS, |source| sleeps(source).next().is_some());
    let message = "has an exception in xtask/src/tidy/rust.rs that it does not need";
    long.chain(sleepers).map(|path| Finding { path, line: 0, message: message.to_owned() }).collect()
}

fn check_comment(line: usize, text: &str, find: &mut impl FnMut(usize, &str)) {
    for word in UNDONE {
        if text.split(|c: char| !c.is_alphanumeric()).any(|part| part == word) {
            find(line, &format!("{word}: finish it, or write an issue"));
        }
    }
}

fn check_tokens(source: &Source, find: &mut impl FnMut(usize, &str)) {
    for (at, token) in source.tokens.iter().enumerate() {
        let word = source.word(at);
        if matches!(word, Some("todo" | "unimplemented")) && source.is_mark(at + 1, '!') {
            find(token.line, "unfinished code");
        }
        if word == Some("ignore") && at >= 2 && source.is_mark(at - 1, '[') && source.is_mark(at - 2, '#') {
            find(token.line, "an ignored test: run it, or report why it cannot run here through SPILLWAY_SKIPS");
        }
    }
}

fn check_sleeps(file: &Path, source: &Source, is_test: bool, find: &mut impl FnMut(usize, &str)) {
    let test_lines = source.test_lines();
    for line in sleeps(source).filter(|_| !excepted(&SLEEPERS, file)) {
        if is_test || test_lines.iter().any(|lines| lines.contains(&line)) {
            find(line, "a sleep in a test: wait for the condition instead");
        }
    }
}

/// The lines that call something named `sleep`.
fn sleeps(source: &Source) -> impl Iterator<Item = usize> {
    let calls = (0..source.tokens.len()).filter(|at| source.word(*at) == Some("sleep") && source.is_mark(at + 1, '('));
    calls.map(|at| source.tokens[at].line)
}

/// The files that some crate compiles.
struct Reach {
    files: BTreeSet<PathBuf>,
    /// Those of them that only tests compile.
    tests: BTreeSet<PathBuf>,
}

impl Reach {
    fn of(tree: &Tree) -> Self {
        let mut reach = Self { files: BTreeSet::new(), tests: BTreeSet::new() };
        for file in tree.rust.keys().filter(|file| is_root(tree, file)) {
            let is_test = file.components().any(|part| part.as_os_str() == "tests");
            reach.follow(tree, file, true, is_test);
        }
        reach
    }

    fn follow(&mut self, tree: &Tree, file: &Path, is_root: bool, is_test: bool) {
        let Some(source) = tree.rust.get(file) else { return };
        if !self.files.insert(file.to_path_buf()) {
            return;
        }
        if is_test {
            self.tests.insert(file.to_path_buf());
        }
        for module in source.modules() {
            for place in places(file, is_root, &module) {
                self.follow(tree, &place, false, is_test || module.test);
            }
        }
    }
}

/// Where the file of a `mod` line may be.
fn places(file: &Path, is_root: bool, module: &Module) -> Vec<PathBuf> {
    let folder = file.parent().unwrap_or_else(|| Path::new(""));
    if let Some(path) = &module.path {
        return vec![resolve(&folder.join(path))];
    }
    let owns_folder = is_root || file.file_name().is_some_and(|name| name == "mod.rs");
    let folder = if owns_folder { folder.to_path_buf() } else { file.with_extension("") };
    vec![folder.join(format!("{}.rs", module.name)), folder.join(&module.name).join("mod.rs")]
}

fn resolve(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |resolved, part| match part {
        Component::ParentDir => resolved.parent().map(Path::to_path_buf).unwrap_or_default(),
        part => resolved.join(part),
    })
}

/// Whether a Cargo.toml takes a file as the root of a target, by name or by cargo's conventions.
fn is_root(tree: &Tree, file: &Path) -> bool {
    let crates = file.ancestors().skip(1).filter_map(|folder| {
        let manifest = tree.texts.get(&folder.join("Cargo.toml"))?;
        Some((file.strip_prefix(folder).ok()?.to_str()?, manifest))
    });
    crates.take(1).any(|(inside, manifest)| {
        let folder = inside.rsplit_once('/').map_or("", |(folder, _)| folder);
        matches!(inside, "build.rs" | "src/main.rs" | "src/lib.rs")
            || matches!(folder, "src/bin" | "examples" | "benches")
            || folder.starts_with("src/bin/") && inside.ends_with("/main.rs")
            || folder == "tests" && !manifest.contains("autotests = false")
            || manifest.contains(&format!("path = \"{inside}\""))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        check(&Tree::of(files)).iter().map(|finding| format!("{}:{}", finding.path.display(), finding.line)).collect()
    }

    #[test]
    fn modules_are_documented_short_finished_and_awake() {
        let long = format!("//! Long.\n{}", "\n".repeat(MAX_LINES));
        let undone =
            format!("//! Undone.\n// {}: later\nfn f() {{ {}!() }}\n#[{}]\nfn g() {{}}\n", UNDONE[0], "todo", "ignore");
        let sleepy = "//! Sleepy.\nfn f() { sleep(1) }\n#[cfg(test)]\nmod tests {\n fn f() { thread::sleep(1) }\n}\n";
        let files = [
            ("a/Cargo.toml", ""),
            ("a/src/lib.rs", "//! Root.\nmod long; mod undone; mod sleepy; mod bare; mod tests;"),
            ("a/src/bare.rs", "fn f() {}\n"),
            ("a/src/long.rs", &long),
            ("a/src/sleepy.rs", sleepy),
            ("a/src/tests.rs", "//! Fine.\n"),
            ("a/src/undone.rs", &undone),
            ("docs/a.md", &format!("{} {}S", UNDONE[1], UNDONE[1])),
        ];
        assert_eq!(
            findings(&files),
            [
                "a/src/bare.rs:1",
                "a/src/long.rs:0",
                "a/src/sleepy.rs:5",
                "a/src/undone.rs:2",
                "a/src/undone.rs:3",
                "a/src/undone.rs:4",
                "docs/a.md:1"
            ]
        );
    }

    #[test]
    fn files_that_no_crate_reaches_are_found() {
        let doc = "//! Doc.\n";
        let files = [
            ("a/Cargo.toml", "autotests = false\n[lib]\npath = \"lab/lib.rs\"\n[[test]]\npath = \"spread.rs\"\n"),
            ("a/lab/lib.rs", "//! Lab.\nmod net; #[cfg(test)] mod checks;"),
            ("a/lab/net/mod.rs", "//! Net.\nmod links;"),
            ("a/lab/net/links.rs", "//! Links.\nmod veth; #[path = \"../../shared.rs\"] mod shared;"),
            ("a/lab/net/links/veth.rs", doc),
            ("a/shared.rs", doc),
            ("a/lab/checks.rs", "//! Checks.\nfn f() { tokio::time::sleep(d) }"),
            ("a/spread.rs", doc),
            ("a/forgotten.rs", doc),
            ("a/lab/orphan.rs", doc),
        ];
        assert_eq!(findings(&files), ["a/forgotten.rs:0", "a/lab/checks.rs:2", "a/lab/orphan.rs:0"]);
    }
}
