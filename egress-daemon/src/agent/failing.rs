//! Something that is tried again and again, and may fail each time for the same reason.

/// Each reason is logged once, until it succeeds or fails for another one.
#[derive(Debug, Default)]
pub struct Failing(Option<String>);

impl Failing {
    /// It has failed. Returns whether this reason is to be logged.
    pub fn is_news(&mut self, why: &str) -> bool {
        let is_news = self.0.as_deref() != Some(why);
        self.0 = Some(why.to_owned());
        is_news
    }

    /// It has succeeded.
    pub fn is_over(&mut self) {
        self.0 = None;
    }
}
