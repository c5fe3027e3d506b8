//! Limits the log lines of an operation that is retried and may fail repeatedly for the same reason.

/// The reason of the last failure. A reason is logged once, until the operation succeeds or fails for another reason.
#[derive(Debug, Default)]
pub struct Failing(Option<String>);

impl Failing {
    /// Records a failure. Returns whether its reason must be logged.
    pub fn is_news(&mut self, why: &str) -> bool {
        let is_news = self.0.as_deref() != Some(why);
        self.0 = Some(why.to_owned());
        is_news
    }

    /// Records a success.
    pub fn is_over(&mut self) {
        self.0 = None;
    }
}
