//! Checks that the YAML in Markdown files can be parsed.

use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag, TagEnd};
use serde_json::Value;

use super::{Finding, Tree};

/// Checks every block of Markdown files that is marked as YAML.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (file, text) in tree.iter().filter(|(file, _)| file.extension().is_some_and(|ending| ending == "md")) {
        let mut block: Option<(usize, String)> = None;
        for (event, range) in Parser::new(text).into_offset_iter() {
            match event {
                Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) if &*language == "yaml" => {
                    block = Some((text[..range.start].matches('\n').count() + 1, String::new()));
                }
                Event::Text(code) => block.iter_mut().for_each(|(_, yaml)| yaml.push_str(&code)),
                Event::End(TagEnd::CodeBlock) => {
                    let Some((line, yaml)) = block.take() else { continue };
                    let documents: Result<Vec<Value>, _> = serde_saphyr::from_slice_multiple(yaml.as_bytes());
                    if let Err(error) = documents {
                        let first = error.to_string().lines().next().unwrap_or_default().to_owned();
                        let message = format!("the block is not YAML: {first}");
                        findings.push(Finding { path: file.clone(), line, message });
                    }
                }
                _ => {}
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn broken_yaml_is_found_and_other_code_is_left_alone() {
        let good = "```yaml\na: [1]   # one\n---\nb: {c: 2}\n```\n";
        let broken = "```yaml\na: {b: 1}\n    c: 2\n```\n";
        let text = format!("{good}\n{broken}\n```console\n$ a: b: {{\n```\n");
        let tree = [(PathBuf::from("docs/a.md"), text), (PathBuf::from("a.rs"), broken.to_owned())].into();
        let lines: Vec<usize> = check(&tree).into_iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [7]);
    }
}
