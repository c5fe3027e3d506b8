//! Rules for Rust files: each file states its purpose, has one subject, is reached by its crate, and contains no unfinished work.
//!
//! The rules depend on the formatting of `cargo fmt`: a `mod` and each of its attributes are on separate lines, and the closing brace of a
//! block is indented like its beginning.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::links::normal;
use super::{Finding, Tree};

/// The maximum number of lines. A longer file probably has more than one subject.
const MAX_LINES: usize = 500;

/// The only file in which tests may poll a condition.
const SLEEPER: &str = "tests/lab/wait.rs";

/// The programs among the tests, which may sleep.
const PROGRAMS: [&str; 3] = ["tests/bench", "tests/demo", "tests/soak"];

/// The words that mark unfinished work. They are concatenated here so that this file passes its own rule.
const UNDONE: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];

/// Checks every Rust file, and other texts for unfinished work.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let reach = Reach::of(tree);
    let mut findings = Vec::new();
    for (file, text) in tree {
        let mut find = |line: usize, message: &str| {
            findings.push(Finding { path: file.clone(), line, message: message.to_owned() });
        };
        if is_rust(file) {
            if !text.starts_with("//!") {
                find(1, "starts without `//!`: say what the module is for and what it may know");
            }
            let lines = text.lines().count();
            if lines > MAX_LINES {
                find(0, &format!("{lines} lines, and {MAX_LINES} are allowed: does it still have one subject?"));
            }
            if !reach.files.contains(file) {
                find(0, "no `mod` line and no Cargo.toml reaches this file, so nothing in it is compiled or run");
            }
            check_tests(file, text, reach.tests.contains(file), &mut find);
        }
        for (at, line) in text.lines().enumerate().filter(|_| is_ours(file)) {
            for word in UNDONE.iter().filter(|undone| line.split(|c: char| !c.is_alphanumeric()).any(|w| w == **undone))
            {
                find(at + 1, &format!("{word}: finish it, or write an issue"));
            }
        }
    }
    findings
}

fn is_rust(file: &Path) -> bool {
    file.extension().is_some_and(|ending| ending == "rs")
}

/// Returns whether a file is a text of this project, by its extension: not a licence or a lock file.
fn is_ours(file: &Path) -> bool {
    let ending = file.extension().and_then(|ending| ending.to_str());
    matches!(ending, Some("rs" | "md" | "toml" | "yaml" | "yml" | "sh")) || file.starts_with(".ci")
}

/// Checks that no test is ignored and none sleeps.
fn check_tests(file: &Path, text: &str, is_test: bool, find: &mut impl FnMut(usize, &str)) {
    let mut inside: Option<String> = None;
    let mut before = "";
    for (at, line) in text.lines().enumerate() {
        let code = line.trim();
        if code.starts_with("#[ignore") {
            find(at + 1, "an ignored test: run it, or report why it cannot run here through SPILLWAY_SKIPS");
        }
        if is_cfg_test(before) && code.starts_with("mod ") && code.ends_with('{') {
            inside = Some(format!("{}}}", &line[..line.len() - code.len()]));
        }
        if inside.as_deref() == Some(line) {
            inside = None;
        }
        if (is_test || inside.is_some()) && sleeps(code) && file != Path::new(SLEEPER) {
            find(at + 1, "a sleep in a test: wait for the condition instead");
        }
        before = code;
    }
}

fn is_cfg_test(line: &str) -> bool {
    line.starts_with("#[cfg(") && line.contains("test")
}

/// Returns whether a line calls a function named `sleep`.
fn sleeps(code: &str) -> bool {
    let calls = |(at, _): (usize, &str)| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '"');
    !code.starts_with("//") && code.match_indices("sleep(").any(calls)
}

/// The files that a crate compiles.
#[derive(Default)]
struct Reach {
    files: BTreeSet<PathBuf>,
    /// The files that only tests compile.
    tests: BTreeSet<PathBuf>,
}

impl Reach {
    fn of(tree: &Tree) -> Self {
        let mut reach = Self::default();
        for file in tree.keys().filter(|file| is_rust(file) && is_root(tree, file)) {
            let is_test = file.components().any(|part| part.as_os_str() == "tests")
                && !PROGRAMS.iter().any(|folder| file.starts_with(folder));
            reach.follow(tree, file, true, is_test);
        }
        reach
    }

    fn follow(&mut self, tree: &Tree, file: &Path, is_root: bool, is_test: bool) {
        let Some(text) = tree.get(file) else { return };
        if !self.files.insert(file.to_path_buf()) {
            return;
        }
        if is_test {
            self.tests.insert(file.to_path_buf());
        }
        let mut attributes = Vec::new();
        for line in text.lines().map(str::trim) {
            if line.starts_with("#[") {
                attributes.push(line);
                continue;
            }
            let name = line.split_once("mod ").filter(|(before, _)| before.is_empty() || before.starts_with("pub"));
            if let Some(name) = name.and_then(|(_, rest)| rest.strip_suffix(';')) {
                let path = attributes.iter().find_map(|line| line.strip_prefix("#[path = \"")?.strip_suffix("\"]"));
                let only_test = is_test || attributes.iter().any(|line| is_cfg_test(line));
                for place in places(file, is_root, name, path) {
                    self.follow(tree, &place, false, only_test);
                }
            }
            attributes.clear();
        }
    }
}

/// Returns the possible paths of a `mod` line's file.
fn places(file: &Path, is_root: bool, name: &str, path: Option<&str>) -> Vec<PathBuf> {
    let folder = file.parent().unwrap_or_else(|| Path::new(""));
    if let Some(path) = path {
        return normal(&folder.join(path)).into_iter().collect();
    }
    let owns_folder = is_root || file.file_name().is_some_and(|name| name == "mod.rs");
    let folder = if owns_folder { folder.to_path_buf() } else { file.with_extension("") };
    vec![folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs")]
}

/// Returns whether a file is the root of a target, because its Cargo.toml names it or by cargo's conventions.
fn is_root(tree: &Tree, file: &Path) -> bool {
    let mut crates = file.ancestors().skip(1).filter_map(|folder| {
        let manifest = tree.get(&folder.join("Cargo.toml"))?;
        Some((file.strip_prefix(folder).ok()?.to_str()?, manifest))
    });
    crates.next().is_some_and(|(inside, manifest)| {
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
        let tree = files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect();
        check(&tree).iter().map(|finding| format!("{}:{}", finding.path.display(), finding.line)).collect()
    }

    #[test]
    fn modules_need_docs_and_have_no_long_files_todos_or_sleeps() {
        let long = format!("//! Long.\n{}", "\n".repeat(MAX_LINES));
        let undone = format!("//! Undone.\n// {}: later\n#[{}]\nfn g() {{}}\n", UNDONE[0], "ignore");
        let call = ["sleep", "(1)"].concat();
        let sleepy = format!(
            "//! Sleepy.\nfn f() {{ {call} }}\n#[cfg(test)]\nmod tests {{\n    fn f() {{ t::{call} }}\n}}\nfn g() {{ {call} }}\n"
        );
        let files = [
            ("a/Cargo.toml", ""),
            ("a/src/lib.rs", "//! Root.\nmod bare;\npub mod long;\npub(crate) mod sleepy;\nmod tests;\nmod undone;"),
            ("a/src/bare.rs", "fn f() {}\n"),
            ("a/src/long.rs", &long),
            ("a/src/sleepy.rs", &sleepy),
            ("a/src/tests.rs", "//! Fine.\n"),
            ("a/src/undone.rs", &undone),
            ("docs/a.md", &format!("{} {}S", UNDONE[1], UNDONE[1])),
        ];
        let expected = ["bare.rs:1", "long.rs:0", "sleepy.rs:5", "undone.rs:3", "undone.rs:2"];
        let expected = expected.map(|place| format!("a/src/{place}")).into_iter().chain(["docs/a.md:1".to_owned()]);
        assert_eq!(findings(&files), expected.collect::<Vec<_>>());
    }

    #[test]
    fn files_that_no_crate_reaches_are_found() {
        let doc = "//! Doc.\n";
        let checks = format!("//! Checks.\nfn f() {{ tokio::time::{}d) }}", "sleep(");
        let files = [
            ("a/Cargo.toml", "autotests = false\n[lib]\npath = \"lab/lib.rs\"\n[[test]]\npath = \"spread.rs\"\n"),
            ("a/lab/lib.rs", "//! Lab.\nmod net;\n#[cfg(test)]\nmod checks;"),
            ("a/lab/net/mod.rs", "//! Net.\nmod links;"),
            ("a/lab/net/links.rs", "//! Links.\nmod veth;\n#[path = \"../../shared.rs\"]\nmod shared;"),
            ("a/lab/net/links/veth.rs", doc),
            ("a/shared.rs", doc),
            ("a/lab/checks.rs", &checks),
            ("a/spread.rs", doc),
            ("a/forgotten.rs", doc),
            ("a/lab/orphan.rs", doc),
        ];
        assert_eq!(findings(&files), ["a/forgotten.rs:0", "a/lab/checks.rs:2", "a/lab/orphan.rs:0"]);
    }
}
