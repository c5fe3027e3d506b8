//! Properties of plans, checked against slow and obvious oracles.

mod blocks;
mod carriers;
mod classes;
mod drain;
mod endpoints;
mod memo;
mod owners;
mod pools;
mod preview;
mod programmed;
mod scenes;
mod tenancy;
mod whole;
