//! `kubectl spillway connectivity test`: tests with a server outside the cluster whether pods' packets leave as the policies promise.
//!
//! [`serve`] is that server, which tells each client the source address that it sees. [`ask`] queries it from a pod. [`trial`] decides
//! which pods to start for which policies, and judges the answers; it is pure. The plugin starts the pods.

mod ask;
mod serve;
pub mod trial;

pub use ask::{Asked, ask};
pub use serve::{Server, ServerError};

/// The default port of the server.
pub const PORT: u16 = 8474;
/// The content of a UDP query. It is as long as the longest answer, so that the server cannot be used for amplification.
const QUESTION: &[u8; 64] = b"spillway: which source address do you see?                      ";
