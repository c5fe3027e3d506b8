//! Brings the maps from their present contents to the wanted ones. First adds and changes entries, each after the entries that it refers
//! to; then removes entries in the opposite order. So no entry ever names one that does not exist, and an entry that stays is never
//! missing.

use super::maps::{FamilyMaps, Maps, MapsError, Slots};
use aya::Pod;
use egress_common::{
    V4, V6,
    abi::{Name, NameKey},
    config::{self, DatapathConfig},
    egress::{BlockList, CarrierTable, EgressIp, LeaseTable, MacKey, Meter, NodeEntry, Uplink, deadline},
    endpoint::{AssignmentKey, Endpoint, MaglevChunk, Member, MemberKey, Policy, PolicyKey, RouteKey},
    flow::{FlowKey, Reverse},
    limits::MAGLEV_CHUNK,
    port_block,
    traffic::AccountKey,
};
use egress_core::encode::{
    spread,
    tables::{FamilyTables, Tables},
};
use std::collections::{BTreeMap, BTreeSet};

const NO_BLOCKS: BlockList = BlockList { count: 0, blocks: [0; port_block::COUNT as usize] };
const NO_LEASES: LeaseTable = LeaseTable { node: [0; port_block::ROWS] };

/// One of the maps, with its place in [`Tables`].
pub(super) trait MapKind {
    /// Its keys; indices of arrays.
    type Key: Ord + Copy;
    /// Its values.
    type Value: PartialEq + Copy;
    /// Returns the entries that it has, or should have.
    fn entries(tables: &Tables) -> &BTreeMap<Self::Key, Self::Value>;
    /// Returns the same entries, to be changed.
    #[cfg(test)]
    fn entries_mut(tables: &mut Tables) -> &mut BTreeMap<Self::Key, Self::Value>;
    /// Adds or replaces an entry of the kernel's map.
    fn set(maps: &mut Maps, key: &Self::Key, value: &Self::Value) -> Result<(), MapsError>;
    /// Removes an entry of the kernel's map.
    fn remove(maps: &mut Maps, key: &Self::Key) -> Result<(), MapsError>;
}

macro_rules! kinds {
    ($($kind:ident: $key:ty => $value:ty, $($field:ident).+ $(, array of $empty:expr)?;)*) => {$(
        pub(super) struct $kind;
        impl MapKind for $kind {
            type Key = $key;
            type Value = $value;
            fn entries(tables: &Tables) -> &BTreeMap<$key, $value> {
                &tables.$($field).+
            }
            #[cfg(test)]
            fn entries_mut(tables: &mut Tables) -> &mut BTreeMap<$key, $value> {
                &mut tables.$($field).+
            }
            fn set(maps: &mut Maps, key: &$key, value: &$value) -> Result<(), MapsError> {
                maps.$($field).+.set(key, value)
            }
            fn remove(maps: &mut Maps, key: &$key) -> Result<(), MapsError> {
                kinds!(@remove maps.$($field).+, key $(, $empty)?)
            }
        }
    )*};
    (@remove $map:expr, $key:ident) => { $map.remove($key) };
    (@remove $map:expr, $key:ident, $empty:expr) => { $map.set($key, &$empty) };
}

kinds! {
    Names: NameKey => Name, names;
    Nodes: u32 => NodeEntry, nodes, array of NodeEntry::EMPTY;
    NodeIndex: V6 => u32, node_index;
    MacIndex: MacKey => u32, mac_index;
    Uplinks: u32 => Uplink, uplinks;
    Leases: u32 => LeaseTable, leases, array of NO_LEASES;
    KnownLeases: u32 => u64, known_leases, array of 0;
    CarrierTables: u32 => CarrierTable, carriers, array of spread::NONE;
    EgressIps: u32 => EgressIp, egress_ips, array of EgressIp::EMPTY;
    EgressIndexV4: V4 => u32, v4.egress_index;
    EgressIndexV6: V6 => u32, v6.egress_index;
    Blocks: u32 => BlockList, blocks, array of NO_BLOCKS;
    Members: MemberKey => Member, members;
    Maglev: u32 => MaglevChunk, maglev, array of MaglevChunk { egress: [0; MAGLEV_CHUNK] };
    Policies: PolicyKey => Policy, policies;
    Assignments: AssignmentKey => u32, assignments;
    Accounts: AccountKey => u32, accounts;
    ExceptsV4: (V4, u32) => u32, v4.excepts;
    ExceptsV6: (V6, u32) => u32, v6.excepts;
    RoutesV4: (RouteKey<V4>, u32) => u32, v4.routes;
    RoutesV6: (RouteKey<V6>, u32) => u32, v6.routes;
    EndpointsV4: V4 => Endpoint, v4.endpoints;
    EndpointsV6: V6 => Endpoint, v6.endpoints;
}

/// The destination of writes: the kernel's maps.
pub(super) trait Sink {
    fn set<K: MapKind>(&mut self, key: &K::Key, value: &K::Value) -> Result<(), MapsError>;
    fn remove<K: MapKind>(&mut self, key: &K::Key) -> Result<(), MapsError>;
    fn configure(&mut self, config: DatapathConfig) -> Result<(), MapsError>;
}

impl Sink for Maps {
    fn set<K: MapKind>(&mut self, key: &K::Key, value: &K::Value) -> Result<(), MapsError> {
        K::set(self, key, value)
    }
    fn remove<K: MapKind>(&mut self, key: &K::Key) -> Result<(), MapsError> {
        K::remove(self, key)
    }
    fn configure(&mut self, config: DatapathConfig) -> Result<(), MapsError> {
        self.config.set(&0, &config)
    }
}

/// One change in progress.
pub(super) struct MapUpdate<'a, S: Sink> {
    pub sink: &'a mut S,
    pub present: &'a Tables,
    pub wanted: &'a Tables,
}

impl<S: Sink> MapUpdate<'_, S> {
    /// Adds and replaces the entries that differ and for which `which` holds. Returns whether there were any.
    fn add_some<K: MapKind>(&mut self, which: impl Fn(&K::Key) -> bool) -> Result<bool, MapsError> {
        let present = K::entries(self.present);
        let mut changed = false;
        for (k, v) in K::entries(self.wanted).iter().filter(|(k, v)| which(k) && present.get(k) != Some(v)) {
            self.sink.set::<K>(k, v)?;
            changed = true;
        }
        Ok(changed)
    }

    fn add<K: MapKind>(&mut self) -> Result<bool, MapsError> {
        self.add_some::<K>(|_| true)
    }

    /// Removes the entries that should not exist. Returns whether there were any.
    fn drop<K: MapKind>(&mut self) -> Result<bool, MapsError> {
        let wanted = K::entries(self.wanted);
        let mut changed = false;
        for k in K::entries(self.present).keys().filter(|k| !wanted.contains_key(k)) {
            self.sink.remove::<K>(k)?;
            changed = true;
        }
        Ok(changed)
    }

    /// Writes everything. Sets `recheck` as soon as an entry has changed by which flows were classified, and ends with a new `generation`
    /// if it is set.
    pub fn carry_out(&mut self, generation: &mut u32, recheck: &mut bool) -> Result<Option<DatapathConfig>, MapsError> {
        let wanted = self.wanted;
        let in_force: BTreeSet<u32> =
            wanted.v4.egress_index.values().chain(wanted.v6.egress_index.values()).copied().collect();
        self.add::<Names>()?;
        self.add::<Nodes>()?;
        self.add::<NodeIndex>()?;
        self.add::<MacIndex>()?;
        self.add::<Uplinks>()?;
        self.add::<Leases>()?;
        self.add::<KnownLeases>()?;
        self.add::<CarrierTables>()?;
        self.add_some::<EgressIps>(|i| in_force.contains(i))?;
        self.add::<EgressIndexV4>()?;
        self.add::<EgressIndexV6>()?;
        self.add::<Blocks>()?;
        self.add::<Accounts>()?;
        *recheck |= self.add::<Members>()?;
        self.add::<Maglev>()?;
        *recheck |= self.add::<Policies>()?;
        self.add::<Assignments>()?;
        // The settings come before the endpoints: a known pod needs a tunnel to send to.
        let config = self.configure(*generation)?;
        *recheck |= self.add::<ExceptsV4>()?;
        *recheck |= self.add::<ExceptsV6>()?;
        *recheck |= self.add::<RoutesV4>()?;
        *recheck |= self.add::<RoutesV6>()?;
        *recheck |= self.add::<EndpointsV4>()?;
        *recheck |= self.add::<EndpointsV6>()?;

        *recheck |= self.drop::<EndpointsV4>()?;
        *recheck |= self.drop::<EndpointsV6>()?;
        *recheck |= self.drop::<RoutesV4>()?;
        *recheck |= self.drop::<RoutesV6>()?;
        *recheck |= self.drop::<ExceptsV4>()?;
        *recheck |= self.drop::<ExceptsV6>()?;
        self.drop::<Assignments>()?;
        self.drop::<Accounts>()?;
        self.drop::<Policies>()?;
        *recheck |= self.drop::<Members>()?;
        self.drop::<EgressIndexV4>()?;
        self.drop::<EgressIndexV6>()?;
        self.drop::<Blocks>()?;
        self.add_some::<EgressIps>(|i| !in_force.contains(i))?;
        self.drop::<CarrierTables>()?;
        self.drop::<KnownLeases>()?;
        self.drop::<Leases>()?;
        self.drop::<Uplinks>()?;
        self.drop::<MacIndex>()?;
        self.drop::<NodeIndex>()?;
        self.drop::<Nodes>()?;
        self.drop::<Names>()?;
        let Some(config) = config else { return Ok(None) };
        if *recheck {
            *generation = generation.wrapping_add(1);
        }
        let last = DatapathConfig { generation: *generation, flags: wanted.config.unwrap_or(config).flags, ..config };
        if last != config {
            self.sink.configure(last)?;
        }
        *recheck = false;
        Ok(Some(last))
    }

    /// Writes the settings. Without wanted settings, the present ones stay. The hold stays until everything else is written, because the
    /// pod that caused it is not known yet.
    fn configure(&mut self, generation: u32) -> Result<Option<DatapathConfig>, MapsError> {
        let Some(config) = self.wanted.config else { return Ok(self.present.config) };
        let held = self.present.config.map_or(0, |present| present.flags & config::flags::HOLD);
        let config = DatapathConfig { generation, flags: config.flags | held, ..config };
        if self.present.config != Some(config) {
            self.sink.configure(config)?;
        }
        Ok(Some(config))
    }
}

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

/// Reads the Maglev tables that policies use. Leftovers of earlier tables are ignored.
fn read_maglev(maps: &Maps, policies: &BTreeMap<PolicyKey, Policy>) -> Result<BTreeMap<u32, MaglevChunk>, MapsError> {
    let chunks = policies.values().flat_map(|p| p.table..p.table + p.table_len.div_ceil(MAGLEV_CHUNK as u32));
    chunks.map(|i| Ok((i, maps.maglev.get(i)?))).collect()
}

/// Reads everything in the maps.
fn read(maps: &Maps) -> Result<Tables, MapsError> {
    let config = maps.config.get(0)?;
    let policies = maps.policies.entries()?;
    Ok(Tables {
        v4: read_family(&maps.v4)?,
        v6: read_family(&maps.v6)?,
        maglev: read_maglev(maps, &policies)?,
        policies,
        members: maps.members.entries()?,
        assignments: maps.assignments.entries()?,
        accounts: maps.accounts.entries()?,
        egress_ips: filled(&maps.egress_ips, &EgressIp::EMPTY)?,
        blocks: filled(&maps.blocks, &NO_BLOCKS)?,
        carriers: filled(&maps.carriers, &spread::NONE)?,
        leases: filled(&maps.leases, &NO_LEASES)?,
        known_leases: filled(&maps.known_leases, &0)?,
        nodes: filled(&maps.nodes, &NodeEntry::EMPTY)?,
        node_index: maps.node_index.entries()?,
        mac_index: maps.mac_index.entries()?,
        uplinks: maps.uplinks.entries()?,
        names: maps.names.entries()?,
        config: (config != config::UNSET).then_some(config),
    })
}

/// The maps with their contents.
pub struct MapWriter {
    maps: Maps,
    present: Tables,
    generation: u32,
    /// Whether flows must be checked again even if nothing differs from the maps: an earlier change was not completed, or an earlier agent
    /// may not have completed one.
    recheck: bool,
}

impl MapWriter {
    /// Reads the contents that an earlier agent left in the maps. The first write causes a new check of flows.
    pub fn open(maps: Maps) -> Result<Self, MapsError> {
        let present = read(&maps)?;
        let generation = maps.config.get(0)?.generation;
        Ok(Self { maps, present, generation, recheck: true })
    }

    /// Returns the contents of the maps.
    pub fn present(&self) -> &Tables {
        &self.present
    }

    /// Returns the maps, for reading.
    pub fn maps(&self) -> &Maps {
        &self.maps
    }

    /// Sets the time (`CLOCK_MONOTONIC`, ns) until which this node is able to carry egress IPs.
    pub fn set_deadline(&mut self, until: u64) -> Result<(), MapsError> {
        self.maps.deadline.set(&deadline::ABLE, &until)
    }

    /// Sets the time (`CLOCK_MONOTONIC`, ns) until which this node reports that it holds its lease.
    pub fn set_lease(&mut self, until: u64) -> Result<(), MapsError> {
        self.maps.deadline.set(&deadline::LEASE, &until)
    }

    /// Writes `wanted`. After an error the maps hold a part of the change, applied in the safe order, and are reread.
    pub fn write(&mut self, wanted: Tables) -> Result<(), MapsError> {
        // Accounts that are new, or had another meaning, start at zero.
        let used: BTreeSet<u32> = self.present.accounts.values().copied().collect();
        let fresh: BTreeSet<u32> = wanted.accounts.values().copied().filter(|number| !used.contains(number)).collect();
        fresh.iter().try_for_each(|number| self.maps.clear_traffic(*number))?;
        self.empty_meters(&wanted)?;
        let mut change = MapUpdate { sink: &mut self.maps, present: &self.present, wanted: &wanted };
        match change.carry_out(&mut self.generation, &mut self.recheck) {
            Ok(config) => {
                self.present = Tables { config, ..wanted };
                Ok(())
            }
            Err(e) => {
                self.present = read(&self.maps)?;
                Err(e)
            }
        }
    }

    /// Empties the meters of limits that are new or have another shaper: bytes that were lost with an earlier shaper do not wait.
    fn empty_meters(&mut self, wanted: &Tables) -> Result<(), MapsError> {
        let present = &self.present;
        let shaper = |config: DatapathConfig| config.shaper_ifindex;
        let is_kept = wanted.config.is_none() || present.config.map(shaper) == wanted.config.map(shaper);
        let was_limited = |index: &u32| present.egress_ips.get(index).is_some_and(|egress| egress.queue != 0);
        for (index, egress) in &wanted.egress_ips {
            if egress.queue != 0 && !(is_kept && was_limited(index)) {
                for meter in [2 * index, 2 * index + 1] {
                    self.maps.meters.set(&meter, &Meter { sent: 0, passed: 0, last: 0 })?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
