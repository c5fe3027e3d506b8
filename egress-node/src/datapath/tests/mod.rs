//! Tests of the datapath: the encoder with arbitrary views, and the rest with the programs in this machine's kernel.

mod clsact;
mod collector;
mod datagrams;
mod encode;
mod ended;
mod exit;
mod fuzz;
mod gate;
mod gateway;
mod grown;
mod halves;
mod inbound;
mod load;
mod model;
mod moves;
mod native;
mod native_devices;
mod native_model;
mod native_vlan;
mod packets;
mod pieces;
mod questions;
mod races;
mod reuse;
mod talk;
mod trace;
mod traffic;
mod transports;
mod wire;
mod write;

use super::testing::{BPF_MAP_UPDATE_ELEM, BpfDir, Random, bpf, frames, nat, reused, rig, scenes, tables};
