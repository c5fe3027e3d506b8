//! What passed, what failed and what was skipped, and the line that says so.

/// The counts of a run, with a name and a reason for all that did not pass.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tally {
    passed: usize,
    failed: Vec<(String, String)>,
    skipped: Vec<(String, String)>,
    second_try: Vec<String>,
    notes: Vec<String>,
}

impl Tally {
    /// Adds what was counted elsewhere.
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

    /// Counts something that could not run here.
    pub fn skip(&mut self, name: &str, why: &str) {
        self.skipped.push((name.to_owned(), why.to_owned()));
    }

    /// Names a test that passed only at the second try.
    pub fn second_try(&mut self, name: &str) {
        self.second_try.push(name.to_owned());
    }

    /// Points something out that is no failure.
    pub fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }

    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether anything failed.
    pub fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Lists what was skipped and what failed, then the counts on a line of their own.
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

    /// `N passed, N failed, N skipped`.
    pub fn line(&self) -> String {
        format!("{} passed, {} failed, {} skipped", self.passed, self.failed.len(), self.skipped.len())
    }
}
