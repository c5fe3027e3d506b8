//! Attaches the XDP programs (native mode) at the drivers of a gateway's interfaces, and maintains the interfaces through which they send.

use super::{
    Pins,
    attach::Failure,
    load::NATIVE,
    maps::{MapsError, Table, typed},
    strangers,
};
use aya::{
    maps::{
        MapData, MapError,
        xdp::{DevMapHash, XdpMapError},
    },
    programs::{
        Xdp, XdpMode,
        links::{FdLink, PinnedLink},
        xdp::XdpLink,
    },
};
use egress_common::egress::VlanSide;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Replaces the program of the pinned link, or creates and pins a link. Never uses generic mode, which is slower than TC.
pub(super) fn attach(program: &mut Xdp, pin: &Path, index: u32) -> Result<(), Failure> {
    if let Ok(pinned) = PinnedLink::from_pin(pin) {
        let replaced = XdpLink::try_from(FdLink::from(pinned))
            .map_err(|e| Failure::Pin(e.to_string()))
            .and_then(|link| Ok(program.attach_to_link(link)?));
        if let Ok(id) = replaced {
            // The pin keeps the link alive.
            drop(program.take_link(id)?);
            if is_at(program.info()?.id(), index) {
                return Ok(());
            }
        }
        // The link's interface is gone, and another one has its index.
        fs::remove_file(pin)?;
    }
    let id = program.attach_to_if_index(index, XdpMode::Driver)?;
    let link = FdLink::try_from(program.take_link(id)?).map_err(|e| Failure::Pin(e.to_string()))?;
    link.pin(pin).map_err(|e| Failure::Pin(e.to_string()))?;
    Ok(())
}

/// Returns the program of each pinned link, by the interface's index: programs that this agent or the one before it attached.
pub fn pinned(pins: &Pins) -> BTreeMap<u32, u32> {
    let Ok(entries) = fs::read_dir(pins.links()) else { return BTreeMap::new() };
    let link = |path: PathBuf| {
        let (program, index) = path.file_name()?.to_str()?.rsplit_once('-')?;
        let index = NATIVE.contains(&program).then(|| index.parse().ok())??;
        let info = FdLink::from(PinnedLink::from_pin(path).ok()?).info().ok()?;
        Some((index, info.program_id()))
    };
    entries.filter_map(|entry| link(entry.ok()?.path())).collect()
}

/// Returns whether the program with this id is at the interface's driver.
pub(super) fn is_at(id: u32, index: u32) -> bool {
    strangers::xdp(index).is_ok_and(|ids| ids.contains(&id))
}

/// The interfaces through which the programs may send, and the VLAN devices that they know.
pub struct Devices {
    map: DevMapHash<MapData>,
    vlans: Table<VlanSide, VlanSide>,
}

const NAME: &str = "DEVICES";

impl Devices {
    /// Opens the pinned maps.
    pub fn open(pins: &Pins) -> Result<Self, MapsError> {
        Ok(Self { map: typed(pins, NAME)?, vlans: Table::open(pins, "VLANS")? })
    }

    /// Sets the two sides of each VLAN device: each side maps to the other.
    pub fn set_vlans(&mut self, wanted: &BTreeMap<VlanSide, VlanSide>) -> Result<(), MapsError> {
        let present = self.vlans.entries()?;
        for side in present.keys().filter(|side| !wanted.contains_key(*side)) {
            self.vlans.remove(side)?;
        }
        for (side, other) in wanted.iter().filter(|(side, other)| present.get(side) != Some(*other)) {
            self.vlans.set(side, other)?;
        }
        Ok(())
    }

    /// Sets the interfaces, by index. The kernel removes interfaces that disappear.
    pub fn set(&mut self, wanted: &BTreeSet<u32>) -> Result<(), MapsError> {
        let access = |source| MapsError::Access { map: NAME, source };
        let present: BTreeSet<u32> = self.map.keys().collect::<Result<_, _>>().map_err(access)?;
        for index in wanted - &present {
            match self.map.insert(index, index, None, 0) {
                Ok(()) => {}
                Err(XdpMapError::MapError(error)) => return Err(access(error)),
                Err(XdpMapError::ChainedProgramNotSupported) => return Err(access(MapError::ProgIdNotSupported)),
            }
        }
        for index in &present - wanted {
            // The interface may have disappeared in between.
            let _ = self.map.remove(index);
        }
        Ok(())
    }
}
