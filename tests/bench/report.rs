//! The pages: docs/bench.md with every figure, the charts next to it, and the section of README.md between two marks.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::figures::{self, BEYOND_EMPTY, Column, Figure, WITHOUT_HEADER, number, range};
use super::load::{METRICS, Metric};
use super::rounds::Rounds;
use super::scaling::{Point, SERIES};
use super::targets::Reached;
use super::variant::Variant;
use super::{chart, failover, targets};

/// The marks in README.md.
const BEGIN: &str = "<!-- cargo xtask bench writes what follows -->";
const END: &str = "<!-- to here -->";

/// All findings of a run.
#[derive(Default)]
pub struct Findings {
    pub rounds: Rounds,
    pub figures: Vec<Figure>,
    /// The effects of a gateway's death.
    pub failover: Vec<Figure<failover::System>>,
}

impl Findings {
    /// Returns the variants of the tables, and those that were measured because they were named.
    pub fn columns(&self) -> Vec<Variant> {
        let measured = |variant: &Variant| self.figures.iter().any(|figure| figure.values.contains_key(variant));
        Variant::every().filter(|one| Variant::ALL.contains(one) || measured(one)).collect()
    }

    /// Returns the results for the targets.
    pub fn targets(&self) -> Vec<Reached> {
        targets::judge(&self.rounds, &self.figures)
    }

    /// Returns the whole page.
    pub fn page(&self) -> String {
        let mut page = String::from(
            "# The benchmark's last full run\n\nWritten by `cargo xtask bench`; do not edit. What is measured, how, and what \
             did not help: [performance.md](performance.md).\n\n",
        );
        let _ = writeln!(page, "{}\n", machine());
        let _ = writeln!(page, "Medians of {} interleaved rounds, with their range.\n", self.rounds.count());
        page += "![rates relative to plain routing](bench.svg)\n\n";
        page += &variants(&self.figures);
        for (to, what) in [(Variant::Plain, "plain routing"), (Variant::Stock, "the stock kernel")] {
            let relative = |figure: &Figure| figure.relative(to, &format!("of {what}"));
            let _ = writeln!(page, "\n## Round by round, relative to {what}\n");
            page += &variants(&self.rounds.figures().map(relative).collect::<Vec<_>>());
        }
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

    /// Returns the section of README.md.
    fn summary(&self) -> String {
        let shown = [Metric::UdpSmall, Metric::Cpu, Metric::Connections, Metric::TcpOut, Metric::TripP50];
        let names: Vec<&str> = shown.iter().map(|metric| metric.title().0).collect();
        let is_shown = |figure: &&Figure| names.iter().any(|name| figure.name.strip_prefix(name) == Some(", IPv4"));
        let short: Vec<Figure> = self.rounds.figures().filter(is_shown).cloned().collect();
        format!("![rates relative to plain routing](docs/bench.svg)\n\n{}", variants(&short))
    }

    /// Writes the pages: the full page into `docs`, the summary into `readme`.
    pub fn write(&self, docs: &Path, readme: Option<&Path>) -> Result<()> {
        write_page(docs, "bench.md", &self.page())?;
        write_page(docs, "bench.svg", &chart::bars(&self.rounds))?;
        let Some(readme) = readme else { return Ok(()) };
        let text = fs::read_to_string(readme).with_context(|| format!("cannot read {}", readme.display()))?;
        fs::write(readme, replaced(&text, &self.summary())?)
            .with_context(|| format!("cannot write {}", readme.display()))
    }
}

fn variants(figures: &[Figure]) -> String {
    figures::table(figures, &Variant::ALL, range)
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
        figures::table(
            &points.iter().map(|point| point.relative.clone()).collect::<Vec<_>>(),
            &SERIES.map(|(series, ..)| series),
            range
        )
    );
    write_page(docs, "scaling.md", &page)?;
    write_page(docs, "scaling.svg", &chart::curves(points))
}

/// Returns a page with the text between the marks replaced.
fn replaced(text: &str, by: &str) -> Result<String> {
    let (Some((before, rest)), Some((_, after))) = (text.split_once(BEGIN), text.split_once(END)) else {
        bail!("README.md has lost its marks: write {BEGIN} and {END} where the figures belong");
    };
    if !rest.contains(END) {
        bail!("the marks in README.md are in the wrong order");
    }
    Ok(format!("{before}{BEGIN}\n{by}{END}{after}"))
}

/// Describes the machine in one line.
pub fn machine() -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let model = model.trim_start_matches([' ', '\t', ':']).to_owned();
    let count = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let output = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).current_dir(xtask::workspace::root()).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
    };
    format!(
        "{count} CPUs ({model}), Linux {}, commit {}, {}.",
        output("uname", &["-r"]),
        output("git", &["rev-parse", "--short", "HEAD"]),
        output("date", &["-u", "+%Y-%m-%d"])
    )
}

/// Formats the findings for a terminal.
pub fn terminal(findings: &Findings) -> String {
    let columns = findings.columns();
    let line = |name: &str, figure: &Figure| {
        let cell = |variant: &Variant| figure.spread(*variant).map_or("–".to_owned(), |spread| number(spread.p50));
        format!("{name:<58}{}\n", columns.iter().map(|column| format!("{:>10}", cell(column))).collect::<String>())
    };
    let head: String = columns.iter().map(|variant| format!("{:>10}", variant.name())).collect();
    let mut text = format!("{:<58}{head}\n", "");
    for figure in findings.figures.iter().filter(|figure| !figure.values.is_empty()) {
        let name = figure.name.replace(BEYOND_EMPTY, "").replace(WITHOUT_HEADER, ", no header");
        text += &line(&format!("{name} ({})", figure.unit), figure);
        if !METRICS.iter().any(|(_, name, ..)| figure.name.starts_with(name)) {
            continue;
        }
        text += &line("    of plain routing", &figure.relative(Variant::Plain, ""));
        if columns.contains(&Variant::Logged) {
            text += &line("    of direct", &figure.relative(Variant::Direct, ""));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_text_between_the_marks_is_replaced() {
        let page = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        assert_eq!(replaced(&page, "new\n").unwrap(), format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
        assert!(replaced("no marks", "new").is_err());
        assert!(replaced(&format!("{END} {BEGIN}"), "new").is_err());
    }
}
