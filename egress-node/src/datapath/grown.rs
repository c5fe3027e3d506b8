//! Records that have grown since the pinned maps were made. When the agent of a newer version loads its programs, it carries their entries
//! over.
//!
//! A record grows at its end only, and zero in the new part means the old behaviour. So the map is created anew, and each value is copied
//! and padded with zeros. The older programs continue with the older map until they are replaced: established flows are not affected.
//! Entries that they add meanwhile would be lost, so they get no ports for new flows: the pod retries a connection that begins then.

use super::{
    Pins,
    batch::{Batches, put},
    load::LoadError,
};
use aya::maps::{MapData, MapInfo, MapType};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// The map in which the programs find the ports of new flows.
const PORTS: &str = "BLOCKS";
/// The map with the collector's timer. It does not grow: a timer cannot be copied.
const TIMER: &str = "COLLECTOR";
/// The suffix of an older map's pin until its entries are copied. A BPF file system allows no dots in names.
const OLDER: &str = "-older";

/// Sets aside the pinned maps whose values are shorter than those of the programs' `object`.
///
/// # Errors
/// If a map differs in anything else. Nothing is set aside then.
pub fn set_aside(pins: &Pins, object: &aya_obj::Object) -> Result<(), LoadError> {
    let mut grown = Vec::new();
    for (name, map) in &object.maps.iter().collect::<BTreeMap<_, _>>() {
        let path = pins.map(name);
        let Ok(info) = MapInfo::from_pin(&path) else { continue };
        let kind = info.map_type().map_or(0, |kind| kind as u32);
        let found = (kind, info.key_size(), info.value_size());
        let wanted = (map.map_type(), map.key_size(), map.value_size());
        if found == wanted {
            continue;
        }
        if name.as_str() == TIMER || !can_grow(kind) || (found.0, found.1) != (wanted.0, wanted.1) || found.2 > wanted.2
        {
            let shape = |(kind, key, value)| format!("type {kind}, keys of {key} and values of {value} bytes");
            let (found, wanted) = (shape(found), shape(wanted));
            return Err(LoadError::OtherShape { path, root: pins.root().to_path_buf(), found, wanted });
        }
        tracing::info!("map {name} of an older version has shorter records: carrying its entries over");
        grown.push(path);
    }
    // The ports first: an agent that is killed here must not leave them to the older programs.
    let ports = (!grown.is_empty()).then(|| pins.map(PORTS));
    for path in ports.into_iter().chain(grown) {
        let aside = older(&path);
        if !aside.exists() {
            fs::rename(&path, aside).map_err(|source| LoadError::Directory { path, source })?;
        }
    }
    Ok(())
}

/// Returns whether the entries of maps of this type can be listed.
fn can_grow(kind: u32) -> bool {
    [MapType::Hash, MapType::LruHash, MapType::LpmTrie, MapType::Array].into_iter().any(|one| one as u32 == kind)
}

fn older(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(OLDER);
    name.into()
}

/// Returns the names of the maps that were set aside.
fn aside(pins: &Pins) -> Result<Vec<String>, LoadError> {
    let listed = fs::read_dir(pins.maps()).map_err(|source| LoadError::Directory { path: pins.maps(), source })?;
    let names = listed.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter_map(|name| Some(name.strip_suffix(OLDER)?.to_owned())).collect())
}

/// Returns the capacities, in entries, of the maps that were set aside, by name: the new maps need the same capacity.
pub fn room(pins: &Pins) -> Result<BTreeMap<String, u32>, LoadError> {
    let entries = |name: &str| MapInfo::from_pin(older(&pins.map(name))).map_or(0, |info| info.max_entries());
    Ok(aside(pins)?.into_iter().map(|name| (name.clone(), entries(&name))).collect())
}

/// Copies the entries that were set aside into the new maps. The collector must be started afterwards.
pub fn carry_over(pins: &Pins) -> Result<(), LoadError> {
    let mut names = aside(pins)?;
    if names.is_empty() {
        return Ok(());
    }
    // The collector would remove flows from the older maps only.
    stop_collector(pins)?;
    names.sort_by_key(|name| name != PORTS);
    for name in &names {
        let (new, old) = (pins.map(name), older(&pins.map(name)));
        let carried = copy(&open(&old)?, &open(&new)?, name == PORTS);
        carried.map_err(|source| LoadError::NotCarriedOver { path: old, root: pins.root().to_path_buf(), source })?;
    }
    for name in &names {
        let path = older(&pins.map(name));
        fs::remove_file(&path).map_err(|source| LoadError::Directory { path, source })?;
    }
    Ok(())
}

fn open(path: &Path) -> Result<MapData, LoadError> {
    MapData::from_pin(path)
        .map_err(|error| LoadError::Directory { path: path.to_path_buf(), source: io::Error::other(error) })
}

/// Cancels the timer: the kernel frees it when its element is written.
fn stop_collector(pins: &Pins) -> Result<(), LoadError> {
    let path = pins.map(TIMER);
    let map = open(&path)?;
    let size = map.info().map_or(0, |info| info.value_size());
    let (key, value) = (0u32.to_ne_bytes(), vec![0u8; size as usize]);
    put(&map, &key, &value).map_err(|source| LoadError::Directory { path, source })
}

/// Copies all entries. With `take`, zeroes the entries of `old`.
fn copy(old: &MapData, new: &MapData, take: bool) -> io::Result<()> {
    let size = |map: &MapData| map.info().map(|info| info.value_size() as usize).map_err(io::Error::other);
    let (old_size, new_size) = (size(old)?, size(new)?);
    for batch in Batches::of(old)? {
        let (keys, values) = batch?;
        let mut grown = vec![0u8; values.len() / old_size * new_size];
        for (wide, narrow) in grown.chunks_exact_mut(new_size).zip(values.chunks_exact(old_size)) {
            wide[..old_size].copy_from_slice(narrow);
        }
        put(new, &keys, &grown)?;
        if take {
            put(old, &keys, &vec![0; values.len()])?;
        }
    }
    Ok(())
}
