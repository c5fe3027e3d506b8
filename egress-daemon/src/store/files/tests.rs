//! The store in a directory, as its users see it.
