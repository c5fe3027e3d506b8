//! `kubectl spillway connectivity test`: whether packets of pods leave the cluster as its policies promise, seen by a server outside of it.
//!
//! [`serve`] is that server: it tells everybody which source address it sees. [`ask`] asks it from a pod. [`trial`] says which pods to
//! start for which policies and judges what they were told; it is pure. The plugin starts the pods.

mod ask;
mod serve;
pub mod trial;

pub use ask::{Asked, ask};
pub use serve::{Server, ServerError};

/// The port of the server if nobody names another one.
pub const PORT: u16 = 8474;
/// What a question by UDP begins with. It is as long as the longest answer, so that nobody uses the server to send more than he has sent.
const QUESTION: &[u8; 64] = b"spillway: which source address do you see?                      ";
