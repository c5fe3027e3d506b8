//! Bringing the maps from what is in them to what is wanted: first everything that is added or changed, from the things
//! that are named to the things that name them; then, in the opposite order, everything that is to go. So at no moment
//! does an entry name something that is not there, and nothing that stays is ever missing.

use super::{
    maps::{FamilyMaps, Maps, MapsError, Prefixes, Slots, Table},
    tables::{FamilyTables, Tables},
};
use aya::Pod;
use egress_common::{
    config::Config,
    egress::{BlockList, EgressIp, LeaseTable, Node},
    endpoint::RouteKey,
    flow::{FlowKey, Reverse},
    limits::MAGLEV_CHUNK,
    port_block,
};
use std::collections::BTreeMap;

/// The maps with what is in them.
pub struct Writer {
    maps: Maps,
    present: Tables,
    generation: u32,
}

const NO_NODE: Node = Node { addr: [0; 4], present: 0, tunnel_v4: 0 };
const NO_BLOCKS: BlockList = BlockList { count: 0, blocks: [0; port_block::COUNT as usize] };
const NO_LEASES: LeaseTable = LeaseTable { node: [0; port_block::ROWS] };

fn filled<V: Pod + PartialEq>(slots: &Slots<V>, empty: &V) -> Result<BTreeMap<u32, V>, MapsError> {
    let mut all = BTreeMap::new();
    for i in 0..slots.len() {
        let v = slots.get(i)?;
        if v != *empty {
            all.insert(i, v);
        }
    }
    Ok(all)
}

fn upsert<K: Pod + Ord, V: Pod + PartialEq>(
    map: &mut Table<K, V>,
    present: &BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
) -> Result<bool, MapsError> {
    let mut changed = false;
    for (k, v) in wanted.iter().filter(|(k, v)| present.get(k) != Some(v)) {
        map.set(k, v)?;
        changed = true;
    }
    Ok(changed)
}

fn prune<K: Pod + Ord, V: Pod>(
    map: &mut Table<K, V>,
    present: &BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
) -> Result<bool, MapsError> {
    let mut changed = false;
    for k in present.keys().filter(|k| !wanted.contains_key(k)) {
        map.remove(k)?;
        changed = true;
    }
    Ok(changed)
}

type PrefixTable<K> = BTreeMap<(K, u32), u32>;

fn upsert_prefixes<K: Pod + Ord>(
    map: &mut Prefixes<K>,
    present: &PrefixTable<K>,
    wanted: &PrefixTable<K>,
) -> Result<bool, MapsError> {
    let mut changed = false;
    for (k, v) in wanted.iter().filter(|(k, v)| present.get(k) != Some(v)) {
        map.set(k, v)?;
        changed = true;
    }
    Ok(changed)
}

fn prune_prefixes<K: Pod + Ord>(
    map: &mut Prefixes<K>,
    present: &PrefixTable<K>,
    wanted: &PrefixTable<K>,
) -> Result<bool, MapsError> {
    let mut changed = false;
    for k in present.keys().filter(|k| !wanted.contains_key(k)) {
        map.remove(k)?;
        changed = true;
    }
    Ok(changed)
}

fn fill<V: Pod + PartialEq>(
    slots: &mut Slots<V>,
    present: &BTreeMap<u32, V>,
    wanted: &BTreeMap<u32, V>,
) -> Result<(), MapsError> {
    for (i, v) in wanted.iter().filter(|(i, v)| present.get(i) != Some(v)) {
        slots.set(*i, *v)?;
    }
    Ok(())
}

fn clear<V: Pod>(
    slots: &mut Slots<V>,
    present: &BTreeMap<u32, V>,
    wanted: &BTreeMap<u32, V>,
    empty: V,
) -> Result<(), MapsError> {
    for i in present.keys().filter(|i| !wanted.contains_key(i)) {
        slots.set(*i, empty)?;
    }
    Ok(())
}

fn read_family<A: Pod + Ord>(maps: &FamilyMaps<A>) -> Result<FamilyTables<A>, MapsError>
where
    FlowKey<A>: Pod + Ord,
    Reverse<A>: Pod,
    RouteKey<A>: Pod + Ord,
{
    Ok(FamilyTables {
        endpoints: maps.endpoints.entries()?,
        routes: maps.routes.entries()?,
        excepts: maps.excepts.entries()?,
        egress_index: maps.egress_index.entries()?,
    })
}

fn add_family<A: Pod + Ord>(
    maps: &mut FamilyMaps<A>,
    present: &FamilyTables<A>,
    wanted: &FamilyTables<A>,
) -> Result<bool, MapsError>
where
    FlowKey<A>: Pod + Ord,
    Reverse<A>: Pod,
    RouteKey<A>: Pod + Ord,
{
    Ok(upsert_prefixes(&mut maps.excepts, &present.excepts, &wanted.excepts)?
        | upsert_prefixes(&mut maps.routes, &present.routes, &wanted.routes)?
        | upsert(&mut maps.endpoints, &present.endpoints, &wanted.endpoints)?)
}

fn remove_family<A: Pod + Ord>(
    maps: &mut FamilyMaps<A>,
    present: &FamilyTables<A>,
    wanted: &FamilyTables<A>,
) -> Result<bool, MapsError>
where
    FlowKey<A>: Pod + Ord,
    Reverse<A>: Pod,
    RouteKey<A>: Pod + Ord,
{
    Ok(prune(&mut maps.endpoints, &present.endpoints, &wanted.endpoints)?
        | prune_prefixes(&mut maps.routes, &present.routes, &wanted.routes)?
        | prune_prefixes(&mut maps.excepts, &present.excepts, &wanted.excepts)?)
}

impl Writer {
    /// Reads what an earlier agent left in the maps.
    pub fn open(maps: Maps) -> Result<Self, MapsError> {
        let config = maps.config.get(0)?;
        let present = Tables {
            v4: read_family(&maps.v4)?,
            v6: read_family(&maps.v6)?,
            policies: maps.policies.entries()?,
            members: maps.members.entries()?,
            assignments: maps.assignments.entries()?,
            maglev: filled(&maps.maglev, &egress_common::endpoint::MaglevChunk { egress: [0; MAGLEV_CHUNK] })?,
            egress_ips: filled(&maps.egress_ips, &EgressIp::EMPTY)?,
            blocks: filled(&maps.blocks, &NO_BLOCKS)?,
            leases: filled(&maps.leases, &NO_LEASES)?,
            nodes: filled(&maps.nodes, &NO_NODE)?,
            node_index: maps.node_index.entries()?,
            uplinks: maps.uplinks.entries()?,
            names: maps.names.entries()?,
            config: (config != egress_common::config::UNSET).then_some(config),
        };
        Ok(Self { maps, present, generation: config.generation })
    }

    /// What is in the maps.
    pub fn present(&self) -> &Tables {
        &self.present
    }

    /// The maps, for reading.
    pub fn maps(&self) -> &Maps {
        &self.maps
    }

    /// Until when (`CLOCK_MONOTONIC`, ns) this node answers ARP and NDP.
    pub fn set_deadline(&mut self, until: u64) -> Result<(), MapsError> {
        self.maps.deadline.set(0, until)
    }

    /// Writes `wanted`. After an error the maps hold a part of the change, in the safe order, and what is in them is read
    /// anew.
    pub fn write(&mut self, wanted: Tables) -> Result<(), MapsError> {
        let result = self.replace(&wanted);
        match result {
            Ok(config) => {
                self.present = Tables { config, ..wanted };
                Ok(())
            }
            Err(e) => {
                self.present.v4 = read_family(&self.maps.v4)?;
                self.present.v6 = read_family(&self.maps.v6)?;
                self.present.policies = self.maps.policies.entries()?;
                self.present.members = self.maps.members.entries()?;
                self.present.assignments = self.maps.assignments.entries()?;
                self.present.names = self.maps.names.entries()?;
                Err(e)
            }
        }
    }

    fn replace(&mut self, wanted: &Tables) -> Result<Option<Config>, MapsError> {
        let (maps, present) = (&mut self.maps, &self.present);
        upsert(&mut maps.names, &present.names, &wanted.names)?;
        fill(&mut maps.nodes, &present.nodes, &wanted.nodes)?;
        upsert(&mut maps.node_index, &present.node_index, &wanted.node_index)?;
        upsert(&mut maps.uplinks, &present.uplinks, &wanted.uplinks)?;
        fill(&mut maps.leases, &present.leases, &wanted.leases)?;
        fill(&mut maps.egress_ips, &present.egress_ips, &wanted.egress_ips)?;
        upsert(&mut maps.v4.egress_index, &present.v4.egress_index, &wanted.v4.egress_index)?;
        upsert(&mut maps.v6.egress_index, &present.v6.egress_index, &wanted.v6.egress_index)?;
        fill(&mut maps.blocks, &present.blocks, &wanted.blocks)?;
        let mut changed = upsert(&mut maps.members, &present.members, &wanted.members)?;
        fill(&mut maps.maglev, &present.maglev, &wanted.maglev)?;
        upsert(&mut maps.policies, &present.policies, &wanted.policies)?;
        upsert(&mut maps.assignments, &present.assignments, &wanted.assignments)?;
        // The settings come before the endpoints: a pod that is known needs a tunnel to send to.
        let config = self.configure(wanted.config, false)?;
        let (maps, present) = (&mut self.maps, &self.present);
        changed |= add_family(&mut maps.v4, &present.v4, &wanted.v4)?;
        changed |= add_family(&mut maps.v6, &present.v6, &wanted.v6)?;

        changed |= remove_family(&mut maps.v4, &present.v4, &wanted.v4)?;
        changed |= remove_family(&mut maps.v6, &present.v6, &wanted.v6)?;
        prune(&mut maps.assignments, &present.assignments, &wanted.assignments)?;
        prune(&mut maps.policies, &present.policies, &wanted.policies)?;
        changed |= prune(&mut maps.members, &present.members, &wanted.members)?;
        prune(&mut maps.v4.egress_index, &present.v4.egress_index, &wanted.v4.egress_index)?;
        prune(&mut maps.v6.egress_index, &present.v6.egress_index, &wanted.v6.egress_index)?;
        clear(&mut maps.blocks, &present.blocks, &wanted.blocks, NO_BLOCKS)?;
        clear(&mut maps.leases, &present.leases, &wanted.leases, NO_LEASES)?;
        prune(&mut maps.uplinks, &present.uplinks, &wanted.uplinks)?;
        prune(&mut maps.node_index, &present.node_index, &wanted.node_index)?;
        clear(&mut maps.nodes, &present.nodes, &wanted.nodes, NO_NODE)?;
        prune(&mut maps.names, &present.names, &wanted.names)?;
        if changed { self.configure(wanted.config, true) } else { Ok(config) }
    }

    /// Writes the settings, with a new generation if flows are to be checked again. `None` leaves them as they are.
    fn configure(&mut self, config: Option<Config>, recheck: bool) -> Result<Option<Config>, MapsError> {
        let Some(config) = config else { return Ok(self.present.config) };
        if recheck {
            self.generation = self.generation.wrapping_add(1);
        }
        let config = Config { generation: self.generation, ..config };
        if recheck || self.present.config != Some(config) {
            self.maps.config.set(0, config)?;
        }
        Ok(Some(config))
    }
}
