//! Plain text for people: tables, bars and wrapped paragraphs. Pure; knows nothing of terminals.

/// A paragraph in lines of at most `width` characters, broken between words. A longer word keeps its own line.
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

/// A bar that is `width` characters long when `value` is `whole`.
pub fn bar(value: usize, whole: usize, width: usize) -> String {
    let length = if whole == 0 { 0 } else { (value * width).div_ceil(whole).min(width) };
    "█".repeat(length)
}

/// `part` of `whole` in percent.
pub fn percent(part: usize, whole: usize) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.0} %", part as f64 * 100.0 / whole as f64) }
}

/// A table with a line of titles. Columns are as wide as their widest cell; cells may be limited and are wrapped then.
pub struct Table {
    titles: Vec<String>,
    limits: Vec<usize>,
    numeric: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table. A title that starts with `>` is a column of numbers: aligned right.
    pub fn new(titles: &[&str]) -> Table {
        Table {
            titles: titles.iter().map(|title| title.trim_start_matches('>').to_owned()).collect(),
            limits: vec![usize::MAX; titles.len()],
            numeric: titles.iter().map(|title| title.starts_with('>')).collect(),
            rows: Vec::new(),
        }
    }

    /// The greatest width of each column.
    pub fn limits(mut self, limits: &[usize]) -> Table {
        self.limits = limits.to_vec();
        self
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// The lines of the table: titles, a rule, rows.
    pub fn lines(&self) -> Vec<String> {
        let wrapped: Vec<Vec<Vec<String>>> = self.rows.iter().map(|row| self.wrap_row(row)).collect();
        let mut widths: Vec<usize> = self.titles.iter().map(|title| length(title)).collect();
        for row in &wrapped {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.iter().map(|line| length(line)).fold(*width, usize::max);
            }
        }
        let rules: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
        let mut lines = vec![self.line(&self.titles, &widths), self.line(&rules, &widths)];
        for row in &wrapped {
            let height = row.iter().map(Vec::len).max().unwrap_or(0);
            for at in 0..height {
                let cells: Vec<String> = row.iter().map(|cell| cell.get(at).cloned().unwrap_or_default()).collect();
                lines.push(self.line(&cells, &widths));
            }
        }
        lines
    }

    fn wrap_row(&self, row: &[String]) -> Vec<Vec<String>> {
        row.iter()
            .zip(&self.limits)
            .map(|(cell, limit)| if length(cell) > *limit { wrap(cell, *limit) } else { vec![cell.clone()] })
            .collect()
    }

    fn line(&self, cells: &[String], widths: &[usize]) -> String {
        let mut line = String::new();
        for ((cell, width), numeric) in cells.iter().zip(widths).zip(&self.numeric) {
            let padding = " ".repeat(width - length(cell));
            line.push_str(&if *numeric { format!("{padding}{cell}  ") } else { format!("{cell}{padding}  ") });
        }
        line.trim_end().to_owned()
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_cells_and_numbers_stand_right() {
        let mut table = Table::new(&["egress IP", ">flows", ""]);
        table.row(["192.0.2.10", "7", "██"]);
        table.row(["192.0.2.9", "1234567", ""]);
        assert_eq!(
            table.lines(),
            ["egress IP     flows", "──────────  ───────  ──", "192.0.2.10        7  ██", "192.0.2.9   1234567",]
        );
    }

    #[test]
    fn long_cells_are_wrapped_beside_each_other() {
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
    fn bars_show_that_something_is_there() {
        assert_eq!(
            (bar(0, 10, 5), bar(1, 1000, 5), bar(10, 10, 5)),
            (String::new(), "█".to_owned(), "█████".to_owned())
        );
        assert_eq!((bar(3, 0, 5).as_str(), percent(1, 0).as_str(), percent(1, 3).as_str()), ("", "-", "33 %"));
    }
}
