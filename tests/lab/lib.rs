//! Topologies, captures and traffic that demo, tests and benchmark share.
