//! The pages: docs/bench.md with every figure, the charts next to it, and the part of README.md between two marks.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use lab::Family;

use super::figures::{self, BEYOND_EMPTY, Figure, WITHOUT_HEADER, rounded};
use super::load::Metric;
use super::rounds::{Rounds, Spread};
use super::scaling::{Point, Series};
use super::targets::Reached;
use super::variant::Variant;
use super::{chart, failover, targets};

/// The marks in README.md.
const BEGIN: &str = "<!-- cargo xtask bench writes what follows -->";
const END: &str = "<!-- to here -->";

/// Everything that a run has found.
#[derive(Default)]
pub struct Findings {
    pub rounds: Rounds,
    pub figures: Vec<Figure>,
    /// What the death of a gateway does.
    pub failover: Vec<failover::Line>,
}

impl Findings {
    /// What this run says about the targets.
    pub fn targets(&self) -> Vec<Reached> {
        targets::judge(&self.rounds, &self.figures)
    }

    /// The whole page.
    pub fn page(&self) -> String {
        let mut page = String::from(
            "# The benchmark's last full run\n\nWritten by `cargo xtask bench`; do not edit. What is measured, how, and what \
             did not help: [performance.md](performance.md).\n\n",
        );
        let _ = writeln!(page, "{}\n", machine());
        let _ = writeln!(page, "Medians of {} interleaved rounds, with their range.\n", self.rounds.count());
        page += "![rates relative to plain routing](bench.svg)\n\n";
        page += &table(&self.figures);
        page += "\n## Round by round, relative to plain routing\n\n";
        page += &table(&figures::relative(&self.rounds, Variant::Plain));
        page += "\n## Round by round, relative to the stock kernel\n\n";
        page += &table(&figures::relative(&self.rounds, Variant::Stock));
        page += "\n## The death of a gateway: medians, and the worst\n\n";
        page += &failover::table(&self.failover);
        page += "\n## Targets\n\n| | target | measured |\n| --- | --- | --- |\n";
        for reached in self.targets() {
            let mark = if reached.holds { "reached" } else { "**missed**" };
            let _ = writeln!(page, "| {mark} | {} | {} |", reached.target, reached.measured);
        }
        page += "\nHow rates change as flows, policies, CIDRs and gateways grow in number: [scaling.md](scaling.md).\n";
        page
    }

    /// The part of README.md.
    fn summary(&self) -> String {
        let shown = [Metric::UdpSmall, Metric::Cpu, Metric::Connections, Metric::TcpOut, Metric::TripP50];
        let names: Vec<&str> = shown.iter().map(|metric| metric.title().0).collect();
        let short: Vec<Figure> = figures::absolute(&self.rounds)
            .into_iter()
            .filter(|figure| names.iter().any(|name| figure.name.strip_prefix(name) == Some(", IPv4")))
            .collect();
        format!("![rates relative to plain routing](docs/bench.svg)\n\n{}", table(&short))
    }

    /// Writes the pages: the whole into `docs` and the summary into `readme`.
    pub fn write(&self, docs: &Path, readme: Option<&Path>) -> Result<()> {
        write_page(docs, "bench.md", &self.page())?;
        write_page(docs, "bench.svg", &chart::bars(&self.rounds))?;
        let Some(readme) = readme else { return Ok(()) };
        let text = fs::read_to_string(readme).with_context(|| format!("cannot read {}", readme.display()))?;
        fs::write(readme, replaced(&text, &self.summary())?)
            .with_context(|| format!("cannot write {}", readme.display()))
    }
}

fn write_page(docs: &Path, name: &str, text: &str) -> Result<()> {
    fs::create_dir_all(docs).with_context(|| format!("cannot make {}", docs.display()))?;
    let path = docs.join(name);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes the curves and their page.
pub fn write_curves(docs: &Path, variant: Variant, points: &[Point]) -> Result<()> {
    let page = format!(
        "# Rates when a cluster grows\n\nWritten by `cargo xtask bench` and `cargo xtask bench --curves`; do not edit. What is \
         measured, and how: [performance.md](performance.md).\n\n{}\n\n`transport: {}`. Relative to a lab with one of \
         everything, measured in turns: medians of the rounds' ratios, with their range. No curve may lose more than 15 % at its \
         far end. The plain-routing columns show the loss that the lab itself causes: the generator's memory, and all gateways' namespaces \
         sharing one processor.\n\n\
         ![scaling](scaling.svg)\n\n{}",
        machine(),
        variant.name(),
        scaling(points)
    );
    write_page(docs, "scaling.md", &page)?;
    write_page(docs, "scaling.svg", &chart::curves(points))
}

/// A page with what is between the marks replaced.
fn replaced(text: &str, by: &str) -> Result<String> {
    let (Some((before, rest)), Some((_, after))) = (text.split_once(BEGIN), text.split_once(END)) else {
        bail!("README.md has lost its marks: write {BEGIN} and {END} where the figures belong");
    };
    if !rest.contains(END) {
        bail!("the marks in README.md stand in the wrong order");
    }
    Ok(format!("{before}{BEGIN}\n{by}{END}{after}"))
}

/// A Markdown table of figures.
pub fn table(figures: &[Figure]) -> String {
    let titles: Vec<&str> = Variant::ALL.iter().map(|variant| variant.title()).collect();
    let mut text = format!("| | | {} |\n| --- | --- |{}\n", titles.join(" | "), " --: |".repeat(titles.len()));
    for figure in figures.iter().filter(|figure| !figure.values.is_empty()) {
        let cells: Vec<String> =
            Variant::ALL.iter().map(|variant| figure.values.get(variant).map_or("–".to_owned(), cell)).collect();
        let _ = writeln!(text, "| {} | {} | {} |", figure.name, figure.unit, cells.join(" | "));
    }
    text
}

fn cell(spread: &Spread) -> String {
    if spread.min == spread.max {
        return number(spread.median);
    }
    format!("{} ({}–{})", number(spread.median), number(spread.min), number(spread.max))
}

/// Three significant digits, with thousands separated.
pub fn number(value: f64) -> String {
    let value = rounded(value);
    match value.abs() {
        0.0..0.995 => format!("{value:.2}"),
        0.995..9.95 => format!("{value:.2}"),
        9.95..99.5 => format!("{value:.1}"),
        _ => {
            let digits = format!("{value:.0}");
            let head = digits.len() % 3;
            let (first, rest) = digits.split_at(head);
            let groups = rest.as_bytes().chunks(3).map(|chunk| String::from_utf8_lossy(chunk).into_owned());
            let first = (!first.is_empty()).then(|| first.to_owned());
            first.into_iter().chain(groups).collect::<Vec<_>>().join(",")
        }
    }
}

fn scaling(points: &[Point]) -> String {
    let all = Series::ALL;
    let titles: Vec<&str> = all.iter().map(|series| series.title()).collect();
    let mut text = format!("| | | {} |\n| --- | --: |{}\n", titles.join(" | "), " --: |".repeat(all.len()));
    for point in points {
        let value = |series| point.relative.iter().find(|(one, _)| *one == series).map(|(_, spread)| cell(spread));
        let cells: Vec<String> = all.iter().map(|series| value(*series).unwrap_or("–".to_owned())).collect();
        let _ =
            writeln!(text, "| {} | {} | {} |", point.axis.title(), chart::thousands(point.count), cells.join(" | "));
    }
    text
}

/// The machine, in one line.
pub fn machine() -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let model = model.trim_start_matches([' ', '\t', ':']).to_owned();
    let count = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let output = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).current_dir(crate::workspace::root()).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
    };
    format!(
        "{count} CPUs ({model}), Linux {}, commit {}, {}.",
        output("uname", &["-r"]),
        output("git", &["rev-parse", "--short", "HEAD"]),
        output("date", &["-u", "+%Y-%m-%d"])
    )
}

/// A few lines for a terminal.
pub fn terminal(findings: &Findings) -> String {
    let mut text = String::new();
    let logged = |variant: &Variant| findings.figures.iter().any(|figure| figure.values.contains_key(variant));
    let variants: Vec<Variant> = Variant::EVERY.into_iter().filter(|v| Variant::ALL.contains(v) || logged(v)).collect();
    let of_rounds = Metric::ALL.into_iter().flat_map(|metric| Family::BOTH.map(|family| (metric, family)));
    let measured = |key| variants.iter().any(|variant| findings.rounds.spread(key, *variant).is_some());
    for key in of_rounds.filter(|key| measured(*key)) {
        let ((name, unit), family) = (key.0.title(), figures::family_name(key.1));
        let mut line = |name: String, value: &dyn Fn(Variant) -> Option<Spread>| {
            let _ = write!(text, "{name:<58}");
            for &variant in &variants {
                let _ = write!(text, "{:>10}", value(variant).map_or("–".to_owned(), |spread| number(spread.median)));
            }
            text.push('\n');
        };
        line(format!("{name}, {family} ({unit})"), &|variant| findings.rounds.spread(key, variant));
        line("    of plain routing".to_owned(), &|variant| findings.rounds.ratio(key, variant, Variant::Plain));
        if variants.contains(&Variant::Logged) {
            line("    of direct".to_owned(), &|variant| findings.rounds.ratio(key, variant, Variant::Direct));
        }
    }
    for figure in
        findings.figures.iter().filter(|figure| !Metric::ALL.iter().any(|m| figure.name.starts_with(m.title().0)))
    {
        let _ = write!(
            text,
            "{:<58}",
            format!(
                "{} ({})",
                figure.name.replace(BEYOND_EMPTY, "").replace(WITHOUT_HEADER, ", no header"),
                figure.unit
            )
        );
        for variant in &variants {
            let value = figure.values.get(variant);
            let _ = write!(text, "{:>10}", value.map_or("–".to_owned(), |spread| number(spread.median)));
        }
        text.push('\n');
    }
    let head: String = variants.iter().map(|variant| format!("{:>10}", variant.name())).collect();
    format!("{:<58}{head}\n{text}", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_marks_is_replaced() {
        let page = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        assert_eq!(replaced(&page, "new\n").unwrap(), format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
        assert!(replaced("no marks", "new").is_err());
        assert!(replaced(&format!("{END} {BEGIN}"), "new").is_err());
    }

    #[test]
    fn numbers_are_short_and_readable() {
        assert_eq!(
            [0.054, 0.999, 4.711, 23.456, 486.4, 37_512.0, 1_000_000.0].map(number),
            ["0.05", "1.00", "4.71", "23.5", "486", "37,510", "1,000,000"]
        );
    }
}
