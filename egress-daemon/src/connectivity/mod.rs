//! `kubectl spillway connectivity test`: whether packets of pods leave the cluster as its policies promise, as seen by a server outside it.
//!
//! [`serve`] is that server: it tells each client which source address it sees. [`ask`] queries it from a pod. [`trial`] decides which
//! pods to start for which policies, and judges the answers; it is pure. The plugin starts the pods.

mod ask;
mod serve;
pub mod trial;

pub use ask::{Asked, ask};
pub use serve::{Server, ServerError};

/// The default port of the server.
pub const PORT: u16 = 8474;
/// What a UDP query begins with. It is as long as the longest answer, so that the server cannot be used for amplification.
const QUESTION: &[u8; 64] = b"spillway: which source address do you see?                      ";
