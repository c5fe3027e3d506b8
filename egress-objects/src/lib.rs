//! Kubernetes' objects, between people and the planner: Spillway's kinds and those of others that it reads ([`api`]), what they mean in the
//! planner's words ([`translate`]), and all of them at once, in both directions ([`snapshot`]).

pub mod api;
pub mod snapshot;
pub mod translate;
