//! The answers to this node's probes, which the eBPF programs write to a ring buffer.

use super::{Pins, maps::MapsError};
use aya::maps::{Map, MapData, RingBuf};
use egress_common::probe::{Probe, ProbeAnswer, REPLY, state};
use egress_core::agent::gateways::Answered;
use std::{io, mem::size_of};
use tokio::io::unix::AsyncFd;

/// The map's name.
const MAP: &str = "PROBES";

/// The ring buffer.
pub struct Answers {
    ring: AsyncFd<RingBuf<MapData>>,
}

impl Answers {
    /// Opens the pinned buffer. Answers that an earlier agent left unread match no probe and are skipped.
    pub fn open(pins: &Pins) -> Result<Self, MapsError> {
        let path = pins.map(MAP);
        let open = || MapData::from_pin(&path).and_then(Map::from_map_data).and_then(RingBuf::try_from);
        let ring = open().map_err(|source| MapsError::Open { path: path.clone(), source })?;
        // SAFETY: the descriptor stays open and unchanged for as long as the ring buffer lives.
        let ring = unsafe { AsyncFd::register(ring) }
            .map_err(|error| MapsError::Open { path, source: aya::maps::MapError::IoError(error.into()) })?;
        Ok(Self { ring })
    }

    /// Waits for the next answer. Cancel safe.
    pub async fn next(&mut self) -> io::Result<Answered> {
        loop {
            let mut ready = self.ring.readable_mut().await?;
            let Some(item) = ready.get_inner_mut().next() else {
                ready.clear_ready();
                continue;
            };
            if let Some(answered) = decode(&item) {
                return Ok(answered);
            }
        }
    }
}

fn decode(bytes: &[u8]) -> Option<Answered> {
    if bytes.len() < size_of::<ProbeAnswer>() {
        return None;
    }
    // SAFETY: the length was checked above, and every bit pattern is a valid ProbeAnswer.
    let ProbeAnswer { probe, family, .. } = unsafe { bytes.as_ptr().cast::<ProbeAnswer>().read_unaligned() };
    let Probe { kind, transport, reply_transport, state: probe_state, node_id, seq, leases, .. } = probe;
    (kind == REPLY).then(|| Answered {
        seq: u64::from_be_bytes(seq),
        node_id: u32::from_be_bytes(node_id),
        transport: transport.into(),
        back: reply_transport.into(),
        ipv6: family == 6,
        able: probe_state & state::UNABLE == 0,
        held: probe_state & state::HELD != 0,
        leases: u64::from_be_bytes(leases),
    })
}
