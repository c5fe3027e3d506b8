//! A Rust file as the rules see it: tokens without comments, the comments, the paths that it names, its `mod` lines.
//!
//! This is a lexer, not a parser: it knows strings, comments and `use` trees, and nothing of types or macros.

use std::ops::RangeInclusive;

/// A token with its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// What it is.
    pub kind: Kind,
    /// Line, from 1.
    pub line: usize,
}

/// What a token is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An identifier, a keyword or a number.
    Word(String),
    /// The content of a string, unescaped.
    Text(String),
    /// Any other character.
    Mark(char),
}

/// A `mod name;` line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// The module's name.
    pub name: String,
    /// The value of `#[path = ".."]`.
    pub path: Option<String>,
    /// Whether it has `#[cfg(test)]`.
    pub test: bool,
}

/// A file.
pub struct Source {
    /// The number of lines.
    pub lines: usize,
    /// Whether the file's text starts with `//!`.
    pub documented: bool,
    /// Everything but comments and blanks.
    pub tokens: Vec<Token>,
    /// Comments, each with the line on which it starts.
    pub comments: Vec<(usize, String)>,
}

impl Source {
    /// Takes a file's text apart.
    pub fn parse(text: &str) -> Self {
        let mut lexer = Lexer { rest: text, line: 1, tokens: Vec::new(), comments: Vec::new() };
        while lexer.step() {}
        let documented = text.trim_start().starts_with("//!");
        Self { lines: text.lines().count(), documented, tokens: lexer.tokens, comments: lexer.comments }
    }

    /// The modules that this file takes from other files.
    pub fn modules(&self) -> Vec<Module> {
        let mut modules = Vec::new();
        for at in 0..self.tokens.len() {
            if self.word(at) != Some("mod") || !self.is_mark(at + 2, ';') {
                continue;
            }
            if let Some(name) = self.word(at + 1) {
                let attributes = self.attributes_before(at);
                let value = attributes.iter().position(|kind| *kind == Kind::Word("path".to_owned()));
                let path = value.and_then(|value| match attributes.get(value + 2) {
                    Some(Kind::Text(path)) => Some(path.clone()),
                    _ => None,
                });
                modules.push(Module { name: name.to_owned(), path, test: is_cfg_test(&attributes) });
            }
        }
        modules
    }

    /// The lines of the blocks that only tests compile.
    pub fn test_lines(&self) -> Vec<RangeInclusive<usize>> {
        let mut ranges = Vec::new();
        for at in 0..self.tokens.len() {
            if self.word(at) == Some("mod") && self.is_mark(at + 2, '{') && is_cfg_test(&self.attributes_before(at)) {
                ranges.push(self.tokens[at].line..=self.end_of_block(at + 2));
            }
        }
        ranges
    }

    fn end_of_block(&self, open: usize) -> usize {
        let mut depth = 0_usize;
        for token in &self.tokens[open..] {
            match token.kind {
                Kind::Mark('{') => depth += 1,
                Kind::Mark('}') => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return token.line;
            }
        }
        self.lines
    }

    /// The tokens of the attributes in front of an item, from behind the item before it.
    fn attributes_before(&self, item: usize) -> Vec<Kind> {
        let is_end = |token: &Token| matches!(token.kind, Kind::Mark(';' | '{' | '}'));
        let start = self.tokens[..item].iter().rposition(is_end).map_or(0, |end| end + 1);
        self.tokens[start..item].iter().map(|token| token.kind.clone()).collect()
    }

    /// The word at a position.
    pub fn word(&self, at: usize) -> Option<&str> {
        match &self.tokens.get(at)?.kind {
            Kind::Word(word) => Some(word),
            _ => None,
        }
    }

    /// Whether a mark is at a position.
    pub fn is_mark(&self, at: usize, mark: char) -> bool {
        self.tokens.get(at).is_some_and(|token| token.kind == Kind::Mark(mark))
    }
}

fn is_cfg_test(attributes: &[Kind]) -> bool {
    let is = |kind: &Kind, word: &str| *kind == Kind::Word(word.to_owned());
    attributes.iter().any(|kind| is(kind, "cfg")) && attributes.iter().any(|kind| is(kind, "test"))
}

struct Lexer<'a> {
    rest: &'a str,
    line: usize,
    tokens: Vec<Token>,
    comments: Vec<(usize, String)>,
}

impl Lexer<'_> {
    /// Takes one token, comment or blank; false at the end.
    fn step(&mut self) -> bool {
        let Some(first) = self.rest.chars().next() else { return false };
        let second = self.rest.chars().nth(1);
        match first {
            '/' if second == Some('/') => {
                let text = self.take(self.rest.find('\n').unwrap_or(self.rest.len()));
                self.comments.push((self.line, text));
            }
            '/' if second == Some('*') => self.block_comment(),
            '"' => self.string(1, 0, true),
            '\'' => self.quote(),
            _ if is_word(first) => self.word(),
            _ => {
                if !first.is_whitespace() {
                    self.push(Kind::Mark(first));
                }
                self.take(first.len_utf8());
            }
        }
        true
    }

    fn take(&mut self, length: usize) -> String {
        let (taken, rest) = self.rest.split_at(length);
        self.rest = rest;
        self.line += taken.matches('\n').count();
        taken.to_owned()
    }

    fn push(&mut self, kind: Kind) {
        self.tokens.push(Token { kind, line: self.line });
    }

    fn block_comment(&mut self) {
        let (start, mut depth, mut end) = (self.line, 0_usize, 0);
        while end < self.rest.len() {
            let rest = &self.rest[end..];
            if rest.starts_with("/*") {
                (depth, end) = (depth + 1, end + 2);
            } else if rest.starts_with("*/") {
                (depth, end) = (depth - 1, end + 2);
                if depth == 0 {
                    break;
                }
            } else {
                end += rest.chars().next().map_or(1, char::len_utf8);
            }
        }
        let text = self.take(end);
        self.comments.push((start, text));
    }

    /// A string whose opening quote is the last of `open` characters, and which `hashes` hash signs close.
    fn string(&mut self, open: usize, hashes: usize, escapes: bool) {
        let close = format!("\"{}", "#".repeat(hashes));
        let mut end = open;
        while end < self.rest.len() && !self.rest[end..].starts_with(&close) {
            let escaped = escapes && self.rest[end..].starts_with('\\');
            let skipped = self.rest[end..].chars().take(1 + usize::from(escaped));
            end += skipped.map(char::len_utf8).sum::<usize>();
        }
        let content = self.rest[open..end].to_owned();
        self.push(Kind::Text(content));
        self.take((end + close.len()).min(self.rest.len()));
    }

    /// A character or a lifetime.
    fn quote(&mut self) {
        let mut chars = self.rest.chars().skip(1);
        let (first, second) = (chars.next(), chars.next());
        if first == Some('\\') {
            // The character after the backslash may itself be a quote.
            let behind: usize = self.rest.chars().take(3).map(char::len_utf8).sum();
            let end = self.rest[behind..].find('\'').map_or(self.rest.len(), |end| behind + end + 1);
            self.take(end);
        } else if second == Some('\'') {
            self.take(2 + first.map_or(0, char::len_utf8));
        } else {
            self.take(1);
        }
    }

    /// A word, or the string whose prefix it is.
    fn word(&mut self) {
        let end = self.rest.find(|c| !is_word(c)).unwrap_or(self.rest.len());
        let (word, behind) = self.rest.split_at(end);
        let hashes = behind.len() - behind.trim_start_matches('#').len();
        let raw = matches!(word, "r" | "br" | "cr");
        if raw && behind[hashes..].starts_with('"') {
            self.string(end + hashes + 1, hashes, false);
        } else if matches!(word, "b" | "c") && behind.starts_with('"') {
            self.string(end + 1, 0, true);
        } else {
            let word = word.to_owned();
            self.push(Kind::Word(word));
            self.take(end);
        }
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_the_file() {
        let source = Source::parse("//! Doc.\n\nuse a::b;\nconst X: &str = \"x\ny\";\nfn f() { c::d() }\n");
        assert!(source.documented);
        assert_eq!(source.comments, [(1, "//! Doc.".to_owned())]);
    }

    #[test]
    fn modules_and_test_blocks_are_found() {
        let text = "mod a;\n#[path = \"../x.rs\"]\npub mod b;\n#[cfg(test)]\nmod c;\n#[cfg(test)]\nmod tests {\n fn f() { {} }\n}\n";
        let source = Source::parse(text);
        let names: Vec<_> =
            source.modules().into_iter().map(|module| (module.name, module.path, module.test)).collect();
        assert_eq!(
            names,
            [
                ("a".to_owned(), None, false),
                ("b".to_owned(), Some("../x.rs".to_owned()), false),
                ("c".to_owned(), None, true)
            ]
        );
        assert_eq!(source.test_lines(), [7..=9]);
    }
}
