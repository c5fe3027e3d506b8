//! Objects that are kept for later. They are kept as text, since a tree of maps takes ten times as much memory.

use serde_json::Value;

/// A value as JSON without spaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packed(Box<str>);

impl Packed {
    pub(super) fn new(value: &Value) -> Self {
        Packed(value.to_string().into())
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }

    pub(super) fn value(&self) -> Value {
        // A printed value is valid JSON.
        serde_json::from_str(&self.0).unwrap_or_default()
    }
}
