//! Counts what passed, failed and was skipped, and prints the summary.

/// The counts of a run, with the name and the reason of everything that did not pass.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tally {
    passed: usize,
    failed: Vec<(String, String)>,
    skipped: Vec<(String, String)>,
    second_try: Vec<String>,
    notes: Vec<String>,
}

impl Tally {
    /// Adds the counts of another tally.
    pub fn add(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed.extend(other.failed);
        self.skipped.extend(other.skipped);
        self.second_try.extend(other.second_try);
        self.notes.extend(other.notes);
    }

    /// Counts successes.
    pub fn pass(&mut self, count: usize) {
        self.passed += count;
    }

    /// Counts a failure.
    pub fn fail(&mut self, name: &str, why: &str) {
        self.failed.push((name.to_owned(), why.to_owned()));
    }

    /// Counts a test or check that could not run here.
    pub fn skip(&mut self, name: &str, why: &str) {
        self.skipped.push((name.to_owned(), why.to_owned()));
    }

    /// Records a test that passed only at the second try.
    pub fn second_try(&mut self, name: &str) {
        self.second_try.push(name.to_owned());
    }

    /// Records a remark that is not a failure.
    pub fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }

    /// Returns whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether anything failed.
    pub fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Prints what was skipped, what failed and what was remarked, then the counts on a separate line.
    pub fn print(&self) {
        for (title, list) in [("skipped", &self.skipped), ("failed", &self.failed)] {
            if !list.is_empty() {
                println!("\n{title}:");
            }
            for (name, why) in list {
                println!("  {name}: {why}");
            }
        }
        if !self.second_try.is_empty() {
            println!("\npassed at the second try, alone:");
            self.second_try.iter().for_each(|name| println!("  {name}"));
        }
        if !self.notes.is_empty() {
            println!("\nto look at:");
            self.notes.iter().for_each(|note| println!("  {note}"));
        }
        println!("\n{}", self.line());
    }

    /// Returns `N passed, N failed, N skipped`.
    pub fn line(&self) -> String {
        format!("{} passed, {} failed, {} skipped", self.passed, self.failed.len(), self.skipped.len())
    }
}
