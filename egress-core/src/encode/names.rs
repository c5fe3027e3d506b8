//! Names in the map `NAMES`.

use egress_common::abi::Name;

/// The text of a name.
pub fn name_text(name: &Name) -> String {
    let end = name.bytes.iter().position(|b| *b == 0).unwrap_or(name.bytes.len());
    String::from_utf8_lossy(&name.bytes[..end]).into_owned()
}

/// The record of a text, cut if it is too long.
pub fn name_record(text: &str) -> Name {
    let mut bytes = [0; egress_common::abi::NAME_LEN];
    let n = text.len().min(bytes.len());
    bytes[..n].copy_from_slice(&text.as_bytes()[..n]);
    Name { bytes }
}
