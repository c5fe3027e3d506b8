//! The agent, the controller and what egressctl needs.
