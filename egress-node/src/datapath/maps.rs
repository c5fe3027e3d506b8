//! The pinned maps, typed. The agent writes through it; `egressctl` reads through it, whether or not an agent is alive.

use super::{Pins, batch::Batches};
use aya::{
    Pod,
    maps::{Array, HashMap, LpmTrie, MapData, MapError, PerCpuArray, PerCpuValues, lpm_trie::Key},
    sys::SyscallError,
    util::nr_cpus,
};
use egress_common::{
    V4, V6,
    abi::{Name, NameKey},
    config::DatapathConfig,
    egress::{BlockList, CarrierTable, EgressIp, LeaseTable, MacKey, Meter, NodeEntry, Uplink},
    endpoint::{AssignmentKey, Endpoint, MaglevChunk, Member, MemberKey, Policy, PolicyKey, RouteKey},
    flow::{Flow, FlowKey, Inbound, Reverse},
    traffic::{AccountKey, Traffic},
    verdict::Counter,
};
use std::{collections::BTreeMap, path::PathBuf};
use thiserror::Error;

/// Why a map cannot be read or written.
#[derive(Debug, Error)]
pub enum MapsError {
    /// The pin does not exist, or cannot be opened.
    #[error("{path}: {source}; no agent has run on this node with this --bpffs")]
    Open {
        /// The pin.
        path: PathBuf,
        /// The kernel's error.
        source: MapError,
    },
    /// The kernel refused an access.
    #[error("map {map}: {source}")]
    Access {
        /// The map's name.
        map: &'static str,
        /// The kernel's error.
        source: MapError,
    },
}

/// A hash map, with its name for messages.
pub struct Table<K: Pod, V: Pod> {
    name: &'static str,
    map: HashMap<MapData, K, V>,
    /// The same map, for batches.
    all: MapData,
}

impl<K: Pod + Ord, V: Pod> Table<K, V> {
    pub(super) fn open(pins: &Pins, name: &'static str) -> Result<Self, MapsError> {
        Ok(Self { name, map: typed(pins, name)?, all: opened(pins, name)? })
    }
    fn error(&self, source: MapError) -> MapsError {
        MapsError::Access { map: self.name, source }
    }
    /// Returns the value of `key`.
    pub fn get(&self, key: &K) -> Result<Option<V>, MapsError> {
        match self.map.get(key, 0) {
            Ok(v) => Ok(Some(v)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(e) => Err(self.error(e)),
        }
    }
    /// Returns all entries, in order. Entries that programs add or remove meanwhile may or may not be included.
    pub fn entries(&self) -> Result<BTreeMap<K, V>, MapsError> {
        self.iter().collect()
    }
    /// Iterates over the entries in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = Result<(K, V), MapsError>> {
        let (batches, failed) = match Batches::of(&self.all) {
            Ok(batches) => (Some(batches), None),
            Err(error) => (None, Some(Err(error))),
        };
        batches.into_iter().flatten().chain(failed).flat_map(|batch| match batch {
            Ok((keys, values)) => each(&keys).zip(each(&values)).map(Ok).collect(),
            Err(io_error) => {
                let call = "bpf_map_lookup_batch";
                vec![Err(self.error(MapError::SyscallError(SyscallError { call, io_error })))]
            }
        })
    }
    /// Adds or replaces an entry.
    pub fn set(&mut self, key: &K, value: &V) -> Result<(), MapsError> {
        self.map.insert(key, value, 0).map_err(|source| MapsError::Access { map: self.name, source })
    }
    /// Removes an entry, if it is there.
    pub fn remove(&mut self, key: &K) -> Result<(), MapsError> {
        match self.map.remove(key) {
            Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
            Err(MapError::SyscallError(e)) if e.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(MapsError::Access { map: self.name, source }),
        }
    }
}

/// Iterates over the records in a sequence of bytes.
fn each<T: Pod>(bytes: &[u8]) -> impl Iterator<Item = T> {
    // SAFETY: every bit pattern is a valid record, and each chunk has a record's length.
    bytes.chunks_exact(size_of::<T>()).map(|bytes| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// A longest-prefix map.
pub struct Prefixes<K: Pod> {
    name: &'static str,
    map: LpmTrie<MapData, K, u32>,
}

impl<K: Pod + Ord> Prefixes<K> {
    fn open(pins: &Pins, name: &'static str) -> Result<Self, MapsError> {
        Ok(Self { name, map: typed(pins, name)? })
    }
    /// Returns all entries by (key, prefix length).
    pub fn entries(&self) -> Result<BTreeMap<(K, u32), u32>, MapsError> {
        let mut all = BTreeMap::new();
        for entry in self.map.iter() {
            let (k, v) = entry.map_err(|source| MapsError::Access { map: self.name, source })?;
            all.insert((k.data(), k.prefix_len()), v);
        }
        Ok(all)
    }
    /// Adds or replaces an entry.
    pub fn set(&mut self, (key, len): &(K, u32), value: &u32) -> Result<(), MapsError> {
        let key = Key::new(*len, *key);
        self.map.insert(&key, value, 0).map_err(|source| MapsError::Access { map: self.name, source })
    }
    /// Removes an entry, if it is there.
    pub fn remove(&mut self, (key, len): &(K, u32)) -> Result<(), MapsError> {
        match self.map.remove(&Key::new(*len, *key)) {
            Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
            Err(MapError::SyscallError(e)) if e.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(MapsError::Access { map: self.name, source }),
        }
    }
}

/// An array.
pub struct Slots<V: Pod> {
    name: &'static str,
    map: Array<MapData, V>,
}

impl<V: Pod> Slots<V> {
    fn open(pins: &Pins, name: &'static str) -> Result<Self, MapsError> {
        Ok(Self { name, map: typed(pins, name)? })
    }
    /// Returns the number of elements.
    pub fn len(&self) -> u32 {
        self.map.len()
    }
    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Returns one element.
    pub fn get(&self, index: u32) -> Result<V, MapsError> {
        self.map.get(&index, 0).map_err(|source| MapsError::Access { map: self.name, source })
    }
    /// Replaces one element.
    pub fn set(&mut self, index: &u32, value: &V) -> Result<(), MapsError> {
        self.map.set(*index, value, 0).map_err(|source| MapsError::Access { map: self.name, source })
    }
}

fn opened(pins: &Pins, name: &'static str) -> Result<MapData, MapsError> {
    let path = pins.map(name);
    MapData::from_pin(&path).map_err(|source| MapsError::Open { path, source })
}

pub(super) fn typed<M: TryFrom<aya::maps::Map, Error = MapError>>(
    pins: &Pins,
    name: &'static str,
) -> Result<M, MapsError> {
    let map = aya::maps::Map::from_map_data(opened(pins, name)?).and_then(M::try_from);
    map.map_err(|source| MapsError::Open { path: pins.map(name), source })
}

/// The maps of one address family.
pub struct FamilyMaps<A: Pod + Ord>
where
    FlowKey<A>: Pod,
    Reverse<A>: Pod,
    RouteKey<A>: Pod,
{
    /// Flows by the pod's 5-tuple.
    pub flows: Table<FlowKey<A>, Flow>,
    /// Flows by the 5-tuple that the outside sees.
    pub reverse: Table<FlowKey<A>, Reverse<A>>,
    /// Connections that the outside opened, by the 5-tuple of the pod's packets.
    pub inbound: Table<FlowKey<A>, Inbound>,
    /// Pods of this node.
    pub endpoints: Table<A, Endpoint>,
    /// Policy by class and destination.
    pub routes: Prefixes<RouteKey<A>>,
    /// Destinations that no policy touches.
    pub excepts: Prefixes<A>,
    /// Index in `egress_ips` by address.
    pub egress_index: Table<A, u32>,
}

/// All maps that user space reads or writes.
pub struct Maps {
    /// IPv4.
    pub v4: FamilyMaps<V4>,
    /// IPv6.
    pub v6: FamilyMaps<V6>,
    /// Policies by index and family.
    pub policies: Table<PolicyKey, Policy>,
    /// Slots.
    pub members: Table<MemberKey, Member>,
    /// `PerEndpoint` assignments.
    pub assignments: Table<AssignmentKey, u32>,
    /// The accounts that count the packets of a namespace, policy and egress IP.
    pub accounts: Table<AccountKey, u32>,
    /// Maglev tables.
    pub maglev: Slots<MaglevChunk>,
    /// Egress IPs.
    pub egress_ips: Slots<EgressIp>,
    /// This node's blocks by egress IP.
    pub blocks: Slots<BlockList>,
    /// Bytes in and out of the shaper, two for each egress IP.
    pub meters: Slots<Meter>,
    /// The carriers that flows go to, by egress IP.
    pub carriers: Slots<CarrierTable>,
    /// Every node's blocks by egress IP.
    pub leases: Slots<LeaseTable>,
    /// The revision up to which a node's leases are in `leases`, by node.
    pub known_leases: Slots<u64>,
    /// Nodes.
    pub nodes: Slots<NodeEntry>,
    /// Index in `nodes` by tunnel address.
    pub node_index: Table<V6, u32>,
    /// Index in `nodes` by MAC address.
    pub mac_index: Table<MacKey, u32>,
    /// Interfaces that answer requests for egress IPs.
    pub uplinks: Table<u32, Uplink>,
    /// Settings.
    pub config: Slots<DatapathConfig>,
    /// The time until which this node is able to carry egress IPs.
    pub deadline: Slots<u64>,
    /// Names for display.
    pub names: Table<NameKey, Name>,
    counters: PerCpuArray<MapData, u64>,
    traffic: PerCpuArray<MapData, Traffic>,
}

macro_rules! family {
    ($pins:ident, $suffix:literal) => {
        FamilyMaps {
            flows: Table::open($pins, concat!("FLOWS_", $suffix))?,
            reverse: Table::open($pins, concat!("REVERSE_", $suffix))?,
            inbound: Table::open($pins, concat!("INBOUND_", $suffix))?,
            endpoints: Table::open($pins, concat!("ENDPOINTS_", $suffix))?,
            routes: Prefixes::open($pins, concat!("ROUTES_", $suffix))?,
            excepts: Prefixes::open($pins, concat!("EXCEPTS_", $suffix))?,
            egress_index: Table::open($pins, concat!("EGRESS_INDEX_", $suffix))?,
        }
    };
}

impl Maps {
    /// Opens the pinned maps.
    pub fn open(pins: &Pins) -> Result<Self, MapsError> {
        Ok(Self {
            v4: family!(pins, "V4"),
            v6: family!(pins, "V6"),
            policies: Table::open(pins, "POLICIES")?,
            members: Table::open(pins, "MEMBERS")?,
            assignments: Table::open(pins, "ASSIGNMENTS")?,
            accounts: Table::open(pins, "ACCOUNTS")?,
            maglev: Slots::open(pins, "MAGLEV")?,
            egress_ips: Slots::open(pins, "EGRESS_IPS")?,
            blocks: Slots::open(pins, "BLOCKS")?,
            meters: Slots::open(pins, "METERS")?,
            carriers: Slots::open(pins, "CARRIERS")?,
            leases: Slots::open(pins, "LEASES")?,
            known_leases: Slots::open(pins, "KNOWN_LEASES")?,
            nodes: Slots::open(pins, "NODES")?,
            node_index: Table::open(pins, "NODE_INDEX")?,
            mac_index: Table::open(pins, "MAC_INDEX")?,
            uplinks: Table::open(pins, "UPLINKS")?,
            config: Slots::open(pins, "CONFIG")?,
            deadline: Slots::open(pins, "DEADLINE")?,
            names: Table::open(pins, "NAMES")?,
            counters: typed(pins, "COUNTERS")?,
            traffic: typed(pins, "TRAFFIC")?,
        })
    }

    /// Returns all counters, summed over the CPUs.
    pub fn counters(&self) -> Result<BTreeMap<Counter, u64>, MapsError> {
        Counter::ALL.iter().map(|counter| Ok((*counter, self.counter(*counter)?))).collect()
    }

    /// Returns one counter, summed over the CPUs.
    pub fn counter(&self, counter: Counter) -> Result<u64, MapsError> {
        let values = self.counters.get(&(counter as u32), 0);
        let values = values.map_err(|source| MapsError::Access { map: "COUNTERS", source })?;
        Ok(values.iter().copied().fold(0, u64::wrapping_add))
    }

    /// Returns the counts of an account, summed over the CPUs.
    pub fn traffic(&self, account: u32) -> Result<Traffic, MapsError> {
        let values = self.traffic.get(&account, 0).map_err(|source| MapsError::Access { map: "TRAFFIC", source })?;
        let mut sum = Traffic::NONE;
        values.iter().for_each(|value| sum.add(value));
        Ok(sum)
    }

    /// Resets the counts of an account.
    pub fn clear_traffic(&mut self, account: u32) -> Result<(), MapsError> {
        let error = |source| MapsError::Access { map: "TRAFFIC", source };
        let cpus = nr_cpus().map_err(|(_, e)| error(MapError::IoError(e)))?;
        let nothing = PerCpuValues::try_from(vec![Traffic::NONE; cpus]).map_err(|e| error(MapError::IoError(e)))?;
        self.traffic.set(account, nothing, 0).map_err(error)
    }
}
