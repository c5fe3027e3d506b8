//! Plain text for human readers: tables, bars and wrapped paragraphs. Free of side effects, and independent of terminals.

use comfy_table::{CellAlignment, ColumnConstraint, LineStyle, TableStyle, Width};

/// Wraps a paragraph into lines of at most `width` characters. A longer word keeps its own line.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().filter(|line| line.is_empty() || length(line) + 1 + length(word) <= width);
        match line {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Returns a bar that is `width` characters long if `value` is `whole`.
pub fn bar(value: usize, whole: usize, width: usize) -> String {
    let length = if whole == 0 { 0 } else { (value * width).div_ceil(whole).min(width) };
    "█".repeat(length)
}

/// Formats `part` of `whole` in percent.
pub fn percent(part: usize, whole: usize) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.0} %", part as f64 * 100.0 / whole as f64) }
}

/// A table with a title line. Columns are as wide as their widest cell; cells may have a limit, and are then wrapped.
pub struct Table(comfy_table::Table);

/// The number of blanks after each cell, in addition to the one between two columns.
const GAP: u16 = 1;

impl Table {
    /// Creates an empty table. A title that starts with `>` makes a column of numbers, aligned right.
    pub fn new(titles: &[&str]) -> Table {
        let mut table = comfy_table::Table::new();
        table.load_style(TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─')));
        table.set_header(titles.iter().map(|title| title.trim_start_matches('>')));
        for (column, title) in table.column_iter_mut().zip(titles) {
            column.set_padding((0, GAP));
            if title.starts_with('>') {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        Table(table)
    }

    /// Limits the width of each column.
    pub fn limits(mut self, limits: &[u16]) -> Table {
        self.0.set_constraints(limits.iter().map(|limit| ColumnConstraint::UpperBoundary(Width::Fixed(limit + GAP))));
        self
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.0.add_row(cells.into_iter().map(Into::<String>::into));
    }

    /// Returns the lines of the table: titles, a rule, rows.
    pub fn lines(&self) -> Vec<String> {
        self.0.lines().map(|line| line.trim_end().to_owned()).collect()
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_their_cells_and_numbers_align_right() {
        let mut table = Table::new(&["egress IP", ">flows", ""]);
        table.row(["192.0.2.10", "7", "██"]);
        table.row(["192.0.2.9", "1234567", ""]);
        assert_eq!(
            table.lines(),
            ["egress IP     flows", "────────────────────────", "192.0.2.10        7  ██", "192.0.2.9   1234567"]
        );
    }

    #[test]
    fn long_cells_wrap_within_their_column() {
        let mut table = Table::new(&["a", "b"]).limits(&[5, 9]);
        table.row(["one two three", "x"]);
        assert_eq!(table.lines()[2..], ["one    x", "two", "three"]);
    }

    #[test]
    fn paragraphs_break_between_words() {
        assert_eq!(wrap("a bb  ccc\n d", 4), ["a bb", "ccc", "d"]);
        assert_eq!(wrap("abcdef g", 3), ["abcdef", "g"]);
    }

    #[test]
    fn nonzero_values_have_visible_bars() {
        assert_eq!(
            (bar(0, 10, 5), bar(1, 1000, 5), bar(10, 10, 5)),
            (String::new(), "█".to_owned(), "█████".to_owned())
        );
        assert_eq!((bar(3, 0, 5).as_str(), percent(1, 0).as_str(), percent(1, 3).as_str()), ("", "-", "33 %"));
    }
}
