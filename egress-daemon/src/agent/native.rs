//! A gateway's program at drivers: the interfaces that have it, and why others do not.

use crate::datapath::{
    attach::{Attacher, Hook},
    drivers,
    load::NATIVE,
    native::{self, Devices},
};
use egress_core::network::{
    links::LinkTable,
    xdp::{Driver, Why, Xdp, act, judge},
};
use std::collections::{BTreeMap, BTreeSet};

/// By interface: whether the program is at its driver, or why not.
pub type Natives = BTreeMap<String, Result<(), Why>>;

/// What was found at the interfaces at which a gateway's packets arrive.
#[derive(Default)]
pub struct Found {
    /// By hook: the interface's name, and whether the program belongs there.
    verdicts: BTreeMap<Hook, (String, Result<(), Why>)>,
    /// The interfaces that transmit what was redirected to them.
    devices: BTreeSet<u32>,
}

/// The program that belongs at a driver in front of this program at the interface's ingress.
fn in_front_of(program: &str) -> Option<&'static str> {
    let [underlay, uplink] = NATIVE;
    match program {
        "underlay_ingress" => Some(underlay),
        "uplink_ingress" => Some(uplink),
        _ => None,
    }
}

/// The interfaces at which a gateway's packets arrive: program, index and name.
fn candidates(hooks: &BTreeMap<Hook, String>) -> impl Iterator<Item = (&'static str, u32, &String)> {
    hooks.iter().filter_map(|((program, index), name)| Some((in_front_of(program)?, *index, name)))
}

/// Examines the drivers, and decides.
pub fn find(setting: Xdp, hooks: &BTreeMap<Hook, String>, table: &LinkTable, attacher: &Attacher) -> Found {
    let links = candidates(hooks).filter_map(|(_, index, _)| table.links.get(&index));
    // An earlier agent's program is replaced.
    let ours = native::pinned(attacher.pins()).into_values().collect();
    let (looked, unusable) = (drivers::look(links, &ours), attacher.not_native());
    let verdict = |index: u32, name: &str| match (unusable, &looked) {
        (Some(error), _) => Err(Why::only(format!("the kernel does not accept the program: {error}"))),
        (None, Err(error)) => Err(Why::only(format!("the drivers cannot be read: {error}"))),
        (None, Ok(drivers)) => match drivers.get(&index) {
            Some(driver) => judge(setting, name, driver),
            None => Err(Why::only("the interface is gone")),
        },
    };
    let verdict = |(program, index, name): (_, u32, &String)| ((program, index), (name.clone(), verdict(index, name)));
    let verdicts = candidates(hooks).map(verdict).collect();
    let sends = |driver: &Driver| driver.acts.is_some_and(|acts| acts & act::NDO_XMIT != 0);
    let drivers = looked.unwrap_or_default().into_iter();
    Found { verdicts, devices: drivers.filter(|(_, driver)| sends(driver)).map(|(index, _)| index).collect() }
}

impl Found {
    /// The hooks at drivers.
    pub fn hooks(&self) -> impl Iterator<Item = (Hook, String)> {
        let wanted = self.verdicts.iter().filter(|(_, (_, verdict))| verdict.is_ok());
        wanted.map(|(hook, (name, _))| (*hook, name.clone()))
    }

    /// Makes the capable interfaces those that the program may redirect to.
    pub fn allow(&self, devices: Option<&mut Devices>) {
        let Some(devices) = devices else { return };
        let wanted = if self.hooks().next().is_some() { self.devices.clone() } else { BTreeSet::new() };
        if let Err(error) = devices.set(&wanted) {
            tracing::warn!("packets are not forwarded at drivers: {error}");
        }
    }

    /// What is in force, given the interfaces to which the program could not be attached.
    pub fn in_force(self, failed: &BTreeMap<String, String>) -> Natives {
        let all = self.verdicts.into_values();
        all.map(|(name, verdict)| match failed.get(&name) {
            Some(error) => (name, Err(Why::only(error))),
            None => (name, verdict),
        })
        .collect()
    }
}
