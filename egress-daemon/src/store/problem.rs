//! What is wrong with the source of the objects, in words that a person can act on.

use super::ObjectRef;
use std::fmt;
use std::path::PathBuf;

/// A mistake in a file of objects. The last good version of what it is about stays in force.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The file, relative to the directory of the store.
    pub file: PathBuf,
    /// Which of the file's YAML documents, the first is 1.
    pub document: Option<usize>,
    /// The object, when its kind and name could be read.
    pub object: Option<ObjectRef>,
    /// Path of the field, such as `spec.destinationCIDRs[1]`.
    pub field: Option<String>,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(document) = self.document {
            write!(f, ", document {document}")?;
        }
        if let Some(object) = &self.object {
            write!(f, ", {object}")?;
        }
        if let Some(field) = &self.field {
            write!(f, ", {field}")?;
        }
        write!(f, ": {}", self.message)?;
        if self.remedy.is_empty() { Ok(()) } else { write!(f, ": {}", self.remedy) }
    }
}
