//! The demo's output while it runs: narration, tables, claims and spinners. With `--json`, a short form goes to
//! standard error, so that standard output holds only the JSON.

use std::cell::Cell;
use std::io::IsTerminal;

use anyhow::Result;

use super::claims::Claim;
use super::table::{Table, wrap};
use xtask::progress::Step;

const WIDTH: usize = 100;
const BOLD: &str = "1";
const DIM: &str = "2";
const RED: &str = "31";
const GREEN: &str = "32";

/// The destination of the narration.
pub struct Screen {
    quiet: bool,
    color: bool,
    scenes: Cell<usize>,
}

impl Screen {
    /// Writes to standard output, or almost nothing if `quiet`.
    pub fn new(quiet: bool) -> Screen {
        let color =
            std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Screen { quiet, color, scenes: Cell::new(0) }
    }

    /// Opens a numbered scene with its title and a text on what happens and what to look for.
    pub fn scene(&self, title: &str, text: &str) {
        self.scenes.set(self.scenes.get() + 1);
        let title = format!("{}. {title}", self.scenes.get());
        if self.quiet {
            eprintln!("{title}");
        } else {
            println!("\n{}", self.paint(BOLD, &title));
            self.say(text);
        }
    }

    /// Prints a paragraph.
    pub fn say(&self, text: &str) {
        if !self.quiet {
            wrap(text, WIDTH - 3).iter().for_each(|line| println!("   {line}"));
        }
    }

    /// Prints lines unchanged, but indented.
    pub fn lines(&self, lines: &[String]) {
        if !self.quiet {
            lines.iter().for_each(|line| println!("   {line}"));
        }
    }

    /// Prints a table with an empty line above and below.
    pub fn table(&self, table: &Table) {
        if self.quiet {
            return;
        }
        println!();
        for (at, line) in table.lines().iter().enumerate() {
            println!("   {}", if at < 2 { self.paint(DIM, line) } else { self.verdict(line) });
        }
        println!();
    }

    /// Prints a claim, directly after its evidence.
    pub fn claim(&self, claim: &Claim) {
        if self.quiet {
            return;
        }
        let mark = if claim.holds { self.paint(GREEN, "✓") } else { self.paint(RED, "✗") };
        let text = format!("{}: {}", claim.name, claim.measured);
        let text = if claim.holds { text } else { format!("{text} (expected: {})", claim.expected) };
        for (at, line) in wrap(&text, WIDTH - 5).iter().enumerate() {
            println!("   {} {line}", if at == 0 { &mark } else { " " });
        }
    }

    /// Shows a spinner during `work`, which may take a while. The spinner disappears at the end.
    pub fn wait<T>(&self, what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let step = Step::start(what);
        let result = work();
        step.drop_silently();
        result
    }

    fn verdict(&self, line: &str) -> String {
        for (word, color) in [("PASS", GREEN), ("FAIL", RED)] {
            if let Some(rest) = line.strip_prefix(word) {
                return format!("{}{rest}", self.paint(color, word));
            }
        }
        line.to_owned()
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}
