//! The place of each policy's Maglev table in `MAGLEV`.

use super::tables::Tables;
use egress_common::{
    endpoint::{MaglevChunk, Policy, PolicyKey},
    limits::MAGLEV_CHUNK,
};
use std::collections::BTreeSet;

/// Places Maglev tables in the chunks of the map. A changed table never overwrites the one in use, because flows may be choosing from it.
pub struct Chunks {
    used: BTreeSet<u32>,
}

impl Chunks {
    /// Creates a placement that leaves chunks in use unchanged.
    pub fn new(present: &Tables) -> Self {
        Self { used: present.maglev.keys().copied().collect() }
    }

    /// Finds a place for a policy's table and enters its chunks. Returns the index of the first chunk, 0 for an empty table.
    pub fn place(&mut self, present: &Tables, key: &PolicyKey, table: &[u16], tables: &mut Tables) -> u32 {
        let chunks: Vec<MaglevChunk> = table
            .chunks(MAGLEV_CHUNK)
            .map(|part| {
                let mut chunk = MaglevChunk { egress: [0; MAGLEV_CHUNK] };
                chunk.egress[..part.len()].copy_from_slice(part);
                chunk
            })
            .collect();
        let n = chunks.len() as u32;
        if n == 0 {
            return 0;
        }
        let same = |old: &&Policy| {
            old.table_len as usize == table.len()
                && (0..n).all(|i| present.maglev.get(&(old.table + i)) == Some(&chunks[i as usize]))
        };
        let start = match present.policies.get(key).filter(same) {
            Some(old) => old.table,
            None => (0..).find(|s| (*s..*s + n).all(|c| !self.used.contains(&c))).unwrap_or(0),
        };
        for (i, chunk) in (start..).zip(chunks) {
            self.used.insert(i);
            tables.maglev.insert(i, chunk);
        }
        start
    }
}
