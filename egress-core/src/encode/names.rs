//! Names in the map `NAMES`.

use crate::model::PolicyId;
use egress_common::abi::Name;
use std::collections::BTreeSet;

/// Returns the text of a name.
pub fn name_text(name: &Name) -> String {
    let end = name.bytes.iter().position(|b| *b == 0).unwrap_or(name.bytes.len());
    String::from_utf8_lossy(&name.bytes[..end]).into_owned()
}

/// Returns the record of a text, truncated if it is too long.
pub fn name_record(text: &str) -> Name {
    let mut bytes = [0; egress_common::abi::NAME_LEN];
    let n = text.len().min(bytes.len());
    bytes[..n].copy_from_slice(&text.as_bytes()[..n]);
    Name { bytes }
}

/// Returns the name of a class in the maps: a hash, because a set of policies may be too long for a name.
pub(super) fn class_name(class: &BTreeSet<PolicyId>) -> String {
    use siphasher::sip128::{Hasher128 as _, SipHasher13};
    use std::hash::Hasher as _;
    let mut hasher = SipHasher13::new_with_keys(0, 0);
    // Names contain no line breaks.
    class.iter().for_each(|policy| hasher.write(format!("{policy}\n").as_bytes()));
    format!("{:032x}", hasher.finish128().as_u128())
}

/// Returns a hash of a text.
pub(super) fn hash_of(text: &str) -> u32 {
    use siphasher::sip::SipHasher13;
    use std::hash::Hasher as _;
    let mut hasher = SipHasher13::new_with_keys(0, 0);
    hasher.write(text.as_bytes());
    hasher.finish() as u32
}
