//! Prints results: as a table for users, as JSON and YAML for programs.

use clap::ValueEnum;
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    io::{self, Write as _},
};

/// The width of tables if the terminal does not report its own.
const WIDTH: u16 = 100;

/// The output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table or sentences, for users.
    #[default]
    Table,
    /// One JSON document; field names are stable.
    Json,
    /// The same as YAML.
    Yaml,
}

/// A result of a command.
pub trait Printable: Serialize {
    /// Formats the result for users, with a line feed at the end.
    fn text(&self) -> String;
}

/// A result that cannot be written as JSON or YAML.
#[derive(Debug, thiserror::Error)]
#[error("the result cannot be printed: {0}")]
pub struct PrintError(String);

/// Prints a result, with a line feed at the end.
pub fn print<V: Printable>(view: &V, output: Output) -> Result<String, PrintError> {
    let error = |e: &dyn std::fmt::Display| PrintError(e.to_string());
    let text = match output {
        Output::Table => view.text(),
        Output::Json => serde_json::to_string_pretty(view).map_err(|e| error(&e))? + "\n",
        Output::Yaml => {
            // Converted through JSON, so that both formats have the same shape.
            let value = serde_json::to_value(view).map_err(|e| error(&e))?;
            serde_saphyr::to_string(&value).map_err(|e| error(&e))?
        }
    };
    Ok(harmless(&text))
}

/// Replaces control characters, which a terminal would obey: anyone who may write an object can choose names.
pub(crate) fn harmless(text: &str) -> String {
    text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', "\u{fffd}")
}

/// Returns whether a write failed because the reader closed the pipe (`egressctl flows | head`).
pub fn has_seen_enough(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
}

/// Writes to standard output. A pipe that the reader has closed is not an error.
pub fn show(text: &str) -> io::Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if has_seen_enough(&error) => Ok(()),
        other => other,
    }
}

/// One line of a table.
pub trait Row: Serialize {
    /// The columns' names, with units.
    const HEADER: &'static [&'static str];
    /// The text in place of an empty table.
    const NONE: &'static str;
    /// Returns the text of each column.
    fn cells(&self) -> Vec<String>;
    /// Returns the subject and the text of a sentence below the table.
    fn note(&self) -> Option<(&str, &str)> {
        None
    }
}

/// Formats rows as columns separated by blanks, wrapped to the terminal's width, or to 100 columns.
pub fn table<'a, R: Row + 'a>(rows: impl IntoIterator<Item = &'a R>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    let width = if table.is_tty() { table.width() } else { None };
    table.set_width(width.unwrap_or(WIDTH).max(80));
    table.set_header(R::HEADER.iter().copied());
    let mut empty = true;
    for row in rows {
        table.add_row(row.cells());
        empty = false;
    }
    if empty {
        return format!("{}\n", R::NONE);
    }
    // No padding at the margins.
    let last = R::HEADER.len() - 1;
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, if index == last { 0 } else { 2 }));
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// The rows of one command, and their node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct List<R> {
    /// The node's name; null if no agent has reported it yet.
    pub node: Option<String>,
    /// Whether the agent has answered. If not, fields that only the agent knows are null.
    pub agent_answered: bool,
    /// The rows, sorted.
    pub items: Vec<R>,
}

impl<R: Row> Printable for List<R> {
    fn text(&self) -> String {
        let mut text = table(&self.items);
        let mut notes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (subject, note) in self.items.iter().filter_map(Row::note) {
            notes.entry(note).or_default().push(subject);
        }
        for (n, (note, subjects)) in notes.iter().enumerate() {
            let gap = if n == 0 { "\n" } else { "" };
            text += &format!("{gap}{}: {note}\n", subjects.join(", "));
        }
        text
    }
}

/// Formats a value, or `-` if it is unknown.
pub fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Formats a list for one cell.
pub fn joined<T: ToString>(values: &[T]) -> String {
    if values.is_empty() { "-".to_owned() } else { values.iter().map(T::to_string).collect::<Vec<_>>().join(", ") }
}

/// Formats the first `most` names, and the number of the others.
pub fn first_of(names: &[String], most: usize) -> String {
    let first = names.iter().take(most).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > most { format!("{first} and {} more", names.len() - most) } else { first }
}

/// Returns `yes` or `no`.
pub fn yes(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Serialize)]
    struct Line(String, u32);
    impl Row for Line {
        const HEADER: &'static [&'static str] = &["NAME", "AGE (s)"];
        const NONE: &'static str = "no lines";
        fn cells(&self) -> Vec<String> {
            vec![self.0.clone(), self.1.to_string()]
        }
        fn note(&self) -> Option<(&str, &str)> {
            (self.1 > 9).then_some((&self.0, "old"))
        }
    }

    #[test]
    fn equal_notes_are_printed_once() {
        let items = [("a", 1), ("b", 10), ("c", 11)].map(|(name, age)| Line(name.into(), age)).to_vec();
        let text = List { node: None, agent_answered: true, items }.text();
        assert!(text.ends_with("11\n\nb, c: old\n"), "{text}");
    }

    #[test]
    fn a_table_is_aligned_and_fits() {
        let text = table(&[Line("a".into(), 1), Line("x ".repeat(90), 22)]);
        assert!(text.starts_with("NAME"), "{text}");
        assert!(text.lines().all(|line| line.len() <= 100 && !line.ends_with(' ')), "{text}");
        assert!(text.lines().count() > 3, "{text}");
        assert_eq!(table::<Line>(&[]), "no lines\n");
    }

    #[test]
    fn no_format_has_control_characters() {
        let items = vec![Line("a\u{1b}[2J\u{7f}\u{9b}2J".into(), 1)];
        let list = List { node: None, agent_answered: true, items };
        for output in [Output::Table, Output::Json, Output::Yaml] {
            let shown = print(&list, output).unwrap();
            assert!(!shown.contains(|c: char| c.is_control() && c != '\n'), "{shown:?}");
        }
    }

    #[test]
    fn every_format_has_the_same_fields() {
        let list = List { node: Some("w".into()), agent_answered: false, items: vec![Line("a".into(), 1)] };
        let json: serde_json::Value = serde_json::from_str(&print(&list, Output::Json).unwrap()).unwrap();
        let yaml: serde_json::Value = serde_saphyr::from_str(&print(&list, Output::Yaml).unwrap()).unwrap();
        assert_eq!(json, yaml);
        assert_eq!(json["agentAnswered"], false);
        assert!(print(&list, Output::Table).unwrap().contains("AGE (s)"));
    }
}
