//! The gateway's program at drivers (XDP): the interfaces that have it, and why others do not.

use egress_common::egress::VlanSide;
use egress_core::network::{
    links::{Link, LinkTable},
    xdp::{Driver, Why, Xdp, act, cards, place, vlans},
};
use egress_node::datapath::{
    attach::{Attacher, Hook},
    drivers,
    load::NATIVE,
    native::{self, Devices},
};
use std::collections::{BTreeMap, BTreeSet};

/// For each interface, whether the program is at its driver or its card's driver, or why not.
pub type Natives = BTreeMap<String, Result<(), Why>>;

/// The findings about the interfaces at which a gateway's packets arrive.
#[derive(Default)]
pub struct Found {
    /// For each interface, the name of the link whose driver should hold the program, or why there is none.
    verdicts: BTreeMap<String, Result<String, Why>>,
    /// The hooks at drivers.
    hooks: BTreeMap<Hook, String>,
    /// The interfaces that transmit frames that are redirected to them.
    devices: BTreeSet<u32>,
    /// Both sides of VLAN devices.
    vlans: BTreeMap<VlanSide, VlanSide>,
}

/// Returns the program that belongs at a driver in front of `program` at the interface's ingress.
fn in_front_of(program: &str) -> Option<&'static str> {
    let [underlay, uplink] = NATIVE;
    match program {
        "underlay_ingress" => Some(underlay),
        "uplink_ingress" => Some(uplink),
        _ => None,
    }
}

/// Returns the interfaces at which a gateway's packets arrive: program, index and name.
fn candidates(hooks: &BTreeMap<Hook, String>) -> impl Iterator<Item = (&'static str, u32, &String)> {
    hooks.iter().filter_map(|((program, index), name)| Some((in_front_of(program)?, *index, name)))
}

/// Examines the drivers and decides which of them should hold a program.
pub fn find(setting: Xdp, hooks: &BTreeMap<Hook, String>, table: &LinkTable, attacher: &Attacher) -> Found {
    let interfaces = || candidates(hooks).map(|(_, index, _)| index);
    // An earlier agent's program is replaced.
    let ours = native::pinned(attacher.pins()).into_values().collect();
    let looked = drivers::look(cards(table, interfaces()).into_values(), &ours);
    let verdict = |index: u32| match &looked {
        Err(error) => Err(Why::only(format!("the drivers cannot be read: {error}"))),
        Ok(drivers) => place(setting, table, index, drivers),
    };
    let verdicts: Vec<_> = candidates(hooks).map(|(program, index, name)| (program, name, verdict(index))).collect();
    let hooks = at_cards(verdicts.iter().filter_map(|(program, _, verdict)| Some((*program, *verdict.as_ref().ok()?))));
    let named = |(_, name, verdict): (_, &String, Result<&Link, Why>)| (name.clone(), verdict.map(|l| l.name.clone()));
    let verdicts = verdicts.into_iter().map(named).collect();
    let sends = |driver: &Driver| driver.acts.is_some_and(|acts| acts & act::NDO_XMIT != 0);
    let drivers = looked.unwrap_or_default().into_iter();
    let devices = drivers.filter(|(_, driver)| sends(driver)).map(|(index, _)| index).collect();
    Found { verdicts, hooks, devices, vlans: vlans(table, interfaces()) }
}

/// Returns the hooks for programs that belong at these cards. A driver holds one program; the underlay's also does an uplink's work.
fn at_cards<'a>(wanted: impl Iterator<Item = (&'static str, &'a Link)>) -> BTreeMap<Hook, String> {
    let [underlay, _] = NATIVE;
    let mut programs = BTreeMap::new();
    for (program, card) in wanted {
        let (present, _) = programs.entry(card.index).or_insert((program, card.name.clone()));
        if program == underlay {
            *present = underlay;
        }
    }
    programs.into_iter().map(|(index, (program, name))| ((program, index), name)).collect()
}

impl Found {
    /// Returns the hooks at drivers.
    pub fn hooks(&self) -> &BTreeMap<Hook, String> {
        &self.hooks
    }

    /// Lets the program redirect to the capable interfaces, and tells it the VLAN devices.
    pub fn allow(&self, devices: Option<&mut Devices>) {
        let Some(devices) = devices else { return };
        let nothing = Self::default();
        let wanted = if self.hooks.is_empty() { &nothing } else { self };
        if let Err(error) = devices.set_vlans(&wanted.vlans).and_then(|()| devices.set(&wanted.devices)) {
            tracing::warn!("packets are not forwarded at drivers: {error}");
        }
    }

    /// Returns the result for each interface, given the cards to which the program could not be attached.
    pub fn in_force(self, failed: &BTreeMap<String, String>) -> Natives {
        let in_force = |verdict: Result<String, Why>| match failed.get(&verdict?) {
            Some(error) => Err(Why::only(error)),
            None => Ok(()),
        };
        self.verdicts.into_iter().map(|(name, verdict)| (name, in_force(verdict))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::testing::link;

    #[test]
    fn card_gets_one_program_and_the_underlays_takes_precedence() {
        let [underlay, uplink] = NATIVE;
        let (first, second) = (link(2, "eth0"), link(3, "eth1"));
        for order in [[underlay, uplink], [uplink, underlay]] {
            let wanted = order.map(|program| (program, &first)).into_iter().chain([(uplink, &second)]);
            let hooks = [((underlay, 2), "eth0".to_owned()), ((uplink, 3), "eth1".to_owned())];
            assert_eq!(at_cards(wanted), hooks.into());
        }
    }
}
