//! Links in Markdown files point to files that exist.

use std::path::{Component, Path, PathBuf};

use super::Finding;
use super::files::Tree;

/// Checks every Markdown file.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (file, text) in tree.texts.iter().filter(|(file, _)| file.extension().is_some_and(|ending| ending == "md")) {
        let folder = file.parent().unwrap_or_else(|| Path::new(""));
        for (line, target) in targets(text) {
            let path = target.split('#').next().unwrap_or_default();
            let external = target.contains("://") || target.starts_with("mailto:");
            if external || path.is_empty() {
                continue;
            }
            if normal(&folder.join(path)).is_none_or(|path| !tree.paths.contains(&path) && path != Path::new("")) {
                let message = format!("the link to {target} points to nothing");
                findings.push(Finding { path: file.clone(), line, message });
            }
        }
    }
    findings
}

/// The targets of `[text](target)` and `[text]: target`, with their lines, outside of code.
fn targets(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut fenced = false;
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        // Every second part is between back quotes.
        let prose: String = line.split('`').step_by(2).collect();
        for part in prose.split("](").skip(1) {
            let target = part.split([')', ' ']).next().unwrap_or_default();
            found.push((number + 1, target.to_owned()));
        }
        if let Some((name, target)) = prose.split_once("]: ").filter(|(name, _)| name.starts_with('[')) {
            let footnote = name.starts_with("[^");
            found.extend((!footnote).then(|| (number + 1, target.trim().to_owned())));
        }
    }
    found
}

/// Resolves `.` and `..`; `None` when the path leaves the clone.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => normal.push(name),
            Component::ParentDir if normal.pop() => {}
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(normal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_links_are_found_and_code_is_left_alone() {
        let text = "[a](b.md) [x](gone.md#there) [w](https://gone)\n```\n[c](code.md)\n```\n`[d](quoted.md)` [e](#here)\n\
                    [f](../README.md) [g](../../outside)\n[ref]: gone.md";
        let tree = Tree::of(&[("docs/a.md", text), ("docs/b.md", ""), ("README.md", "[docs](docs)")]);
        let found: Vec<_> = check(&tree).into_iter().map(|finding| (finding.line, finding.message)).collect();
        assert_eq!(
            found,
            [
                (1, "the link to gone.md#there points to nothing".to_owned()),
                (6, "the link to ../../outside points to nothing".to_owned()),
                (7, "the link to gone.md points to nothing".to_owned()),
            ]
        );
    }
}
