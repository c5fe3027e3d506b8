//! The only hash of the control plane: nodes of different versions and processes must agree on it.

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

/// Computes SipHash-1-3 with fixed keys over `bytes`; `salt` gives independent functions.
pub fn hash(salt: u64, bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(0x5370_696c_6c77_6179, salt);
    hasher.write(bytes);
    hasher.finish()
}
