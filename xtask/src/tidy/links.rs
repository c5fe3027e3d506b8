//! Checks that links in Markdown files point to existing files.

use std::path::{Component, Path, PathBuf};

use pulldown_cmark::{Event, Parser, Tag};

use super::{Finding, Tree};

/// Checks every Markdown file.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (file, text) in tree.iter().filter(|(file, _)| file.extension().is_some_and(|ending| ending == "md")) {
        let folder = file.parent().unwrap_or_else(|| Path::new(""));
        for (event, range) in Parser::new(text).into_offset_iter() {
            let Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) = event else { continue };
            let path = dest_url.split('#').next().unwrap_or_default();
            let external = dest_url.contains("://") || dest_url.starts_with("mailto:");
            let there = |path: PathBuf| tree.keys().any(|known| known.starts_with(&path));
            if !external && !path.is_empty() && !normal(&folder.join(path)).is_some_and(there) {
                let line = text[..range.start].matches('\n').count() + 1;
                let message = format!("the link to {dest_url} points to nothing");
                findings.push(Finding { path: file.clone(), line, message });
            }
        }
    }
    findings
}

/// Resolves `.` and `..`. Returns `None` if the path leaves the clone.
pub fn normal(path: &Path) -> Option<PathBuf> {
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
                    [f](../README.md) [g](../../outside) [h][ref]\n\n[ref]: gone.md";
        let files = [("docs/a.md", text), ("docs/b.md", ""), ("README.md", "[docs](docs)")];
        let tree = files.map(|(path, text)| (PathBuf::from(path), text.to_owned())).into();
        let found: Vec<_> = check(&tree).into_iter().map(|finding| (finding.line, finding.message)).collect();
        let dead = |line, link| (line, format!("the link to {link} points to nothing"));
        assert_eq!(found, [dead(1, "gone.md#there"), dead(6, "../../outside"), dead(6, "gone.md")]);
    }
}
