//! Types and pure functions that the kernel programs and the daemon share.
