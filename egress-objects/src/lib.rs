//! Kubernetes objects, between users and the planner: Spillway's kinds and the other systems' kinds that it reads ([`api`]), their
//! meaning in the planner's terms ([`translate`]), and the conversion of all of them together, in both directions ([`snapshot`]).

pub mod api;
pub mod snapshot;
pub mod translate;
