//! All figures of a run in one form, from which the JSON output, the tables and the charts are made.

use std::collections::BTreeMap;
use std::fmt::Write;

use lab::Family;
use lab::stats::Percentiles;
use serde_json::{Map, Value, json};

use super::programs::Cost;
use super::variant::Variant;

/// A variant or system that figures compare.
pub trait Column: Copy + Ord {
    /// Returns the key in the JSON output.
    fn name(self) -> &'static str;

    /// Returns the title of its column.
    fn title(self) -> &'static str {
        self.name()
    }
}

/// One line of a table.
#[derive(Clone, Debug)]
pub struct Figure<C = Variant> {
    /// The name of the measurement.
    pub name: String,
    /// The unit.
    pub unit: String,
    /// The columns that have it, with a value for each round.
    pub values: BTreeMap<C, Vec<f64>>,
}

impl<C: Column> Figure<C> {
    /// Creates a figure with these values.
    pub fn new(name: &str, unit: &str, values: impl IntoIterator<Item = (C, Vec<f64>)>) -> Self {
        Figure { name: name.to_owned(), unit: unit.to_owned(), values: values.into_iter().collect() }
    }

    /// Creates a figure with one value for each column.
    pub fn single(name: &str, unit: &str, values: impl IntoIterator<Item = (C, f64)>) -> Self {
        Self::new(name, unit, values.into_iter().map(|(column, value)| (column, vec![value])))
    }

    /// Returns the distribution of a column's values.
    pub fn spread(&self, column: C) -> Option<Percentiles> {
        Some(Percentiles::of(self.values.get(&column)?.iter().copied())).filter(|spread| spread.count > 0)
    }

    /// Returns all columns relative to one of them, round by round.
    pub fn relative(&self, to: C, unit: &str) -> Self {
        let Some(base) = self.values.get(&to) else { return Self::new(&self.name, unit, []) };
        let ratios = |ours: &Vec<f64>| ours.iter().zip(base).map(|(a, b)| a / b).collect();
        Self::new(&self.name, unit, self.values.iter().map(|(column, ours)| (*column, ratios(ours))))
    }

    /// Returns one column relative to another, round by round.
    pub fn ratio(&self, column: C, to: C) -> Option<Percentiles> {
        self.relative(to, "").spread(column)
    }

    /// Returns `{"name", "unit", ..}` with a value for each column, null where there is none.
    pub fn json(&self, columns: &[C], cell: impl Fn(Percentiles) -> Value) -> Value {
        let cells = columns.iter().map(|column| (column.name().to_owned(), json!(self.spread(*column).map(&cell))));
        let head = [("name".to_owned(), json!(self.name)), ("unit".to_owned(), json!(self.unit))];
        Value::Object(head.into_iter().chain(cells).collect::<Map<_, _>>())
    }
}

/// Returns a Markdown table of the figures that have values.
pub fn table<C: Column>(figures: &[Figure<C>], columns: &[C], cell: impl Fn(Percentiles) -> String) -> String {
    let titles: Vec<&str> = columns.iter().map(|column| column.title()).collect();
    let mut text = format!("| | | {} |\n| --- | --- |{}\n", titles.join(" | "), " --: |".repeat(titles.len()));
    for figure in figures.iter().filter(|figure| !figure.values.is_empty()) {
        let cells = columns.iter().map(|column| figure.spread(*column).map_or("–".to_owned(), &cell));
        let _ = writeln!(text, "| {} | {} | {} |", figure.name, figure.unit, cells.collect::<Vec<_>>().join(" | "));
    }
    text
}

/// Formats a cell of a table: the median and the range.
pub fn range(spread: Percentiles) -> String {
    let Percentiles { p50, min, max, .. } = spread;
    if min == max { number(p50) } else { format!("{} ({}–{})", number(p50), number(min), number(max)) }
}

/// Returns a cell of the JSON output: the median.
pub fn median(spread: Percentiles) -> Value {
    json!(rounded(spread.p50))
}

/// Rounds to four significant digits: more are noise.
pub fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

/// Formats about three significant digits, with thousands separated.
pub fn number(value: f64) -> String {
    let value = rounded(value);
    match value.abs() {
        0.0..9.95 => format!("{value:.2}"),
        9.95..99.5 => format!("{value:.1}"),
        _ => {
            let digits = format!("{value:.0}");
            let groups = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
            groups.collect::<Vec<_>>().join(",")
        }
    }
}

/// Returns the family's name in tables.
pub fn family_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    }
}

/// The suffix of the names of programs' figures from which the cost of an empty program is subtracted.
pub const BEYOND_EMPTY: &str = " (test_run, beyond an empty program)";
/// The suffix of names of figures from which the cost of a program with the same operation on the tunnel header is subtracted.
pub const WITHOUT_HEADER: &str = " (test_run, without the tunnel's header)";

/// Returns the programs' costs: a figure for each program, protocol and family, and one without the tunnel header.
pub fn of_programs(costs: &BTreeMap<Variant, Vec<Cost>>) -> Vec<Figure> {
    let mut found: BTreeMap<(&str, Family, &str), BTreeMap<Variant, f64>> = BTreeMap::new();
    for (variant, costs) in costs {
        for cost in costs {
            let values = [(BEYOND_EMPTY, Some(cost.cost.whole)), (WITHOUT_HEADER, cost.cost.without_header)];
            for (beyond, value) in values.into_iter().filter_map(|(beyond, value)| Some((beyond, value?))) {
                found.entry((&cost.name, cost.family, beyond)).or_default().insert(*variant, value);
            }
        }
    }
    let figure = |((name, family, beyond), values)| {
        Figure::single(&format!("{name}, {}{beyond}", family_name(family)), "ns", values)
    };
    found.into_iter().map(figure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_every_column_with_null_for_missing_values() {
        let figure = Figure::single("UDP", "kpps", [(Variant::Plain, 486.4321), (Variant::Logged, 0.012345)]);
        assert_eq!(
            figure.json(&[Variant::Plain, Variant::Stock, Variant::Logged], median),
            json!({"name": "UDP", "unit": "kpps", "plain": 486.4, "stock": null, "logged": 0.01235})
        );
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        // The machine is twice as fast in the second round and four times as fast in the third.
        let values = [(Variant::Plain, vec![100.0, 200.0, 400.0]), (Variant::Device, vec![50.0, 90.0, 240.0])];
        let figure = Figure::new("UDP", "kpps", values);
        let ratio = figure.ratio(Variant::Device, Variant::Plain).unwrap();
        assert_eq!((ratio.p50, ratio.min, ratio.max), (0.5, 0.45, 0.6));
        assert_eq!(figure.spread(Variant::Device).unwrap().p50, 90.0);
        assert_eq!(figure.ratio(Variant::Direct, Variant::Plain), None);
        assert_eq!(figure.ratio(Variant::Plain, Variant::Direct), None);
        let lines = table(&[figure], &[Variant::Device, Variant::Stock], range);
        assert!(lines.ends_with("| --: | --: |\n| UDP | kpps | 90.0 (50.0–240) | – |\n"), "{lines}");
    }

    #[test]
    fn numbers_are_short_and_readable() {
        assert_eq!(
            [0.054, 0.999, 4.711, 23.456, 486.4, 37_512.0, 1_000_000.0].map(number),
            ["0.05", "1.00", "4.71", "23.5", "486", "37,510", "1,000,000"]
        );
    }
}
