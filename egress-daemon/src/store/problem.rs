//! Problems of the source of the objects, in terms that a user can act on.

use super::ObjectRef;
use std::fmt;
use std::path::PathBuf;

/// A mistake in the source of objects. The last good version of the object stays in force.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StoreProblem {
    /// The file, relative to the directory of the store; empty if the source is not a directory.
    pub file: PathBuf,
    /// The number of the YAML document in the file, from 1.
    pub document: Option<usize>,
    /// The object, if its kind and name could be read.
    pub object: Option<ObjectRef>,
    /// The path of the field, such as `spec.destinationCIDRs[1]`.
    pub field: Option<String>,
    /// The problem.
    pub message: String,
    /// The remedy.
    pub remedy: String,
}

impl fmt::Display for StoreProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = (!self.file.as_os_str().is_empty()).then(|| self.file.display().to_string());
        let document = self.document.map(|document| format!("document {document}"));
        let object = self.object.as_ref().map(ToString::to_string);
        let place: Vec<String> = [file, document, object, self.field.clone()].into_iter().flatten().collect();
        write!(f, "{}: {}", place.join(", "), self.message)?;
        if self.remedy.is_empty() { Ok(()) } else { write!(f, ": {}", self.remedy) }
    }
}
