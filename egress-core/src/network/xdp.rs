//! Decides whether a gateway's packets are forwarded at the driver of an interface (XDP), or at TC as usual.

use super::links::{Link, LinkKind, LinkTable};
use egress_common::egress::VlanSide;
use std::{collections::BTreeMap, fmt};

named! {
    /// The setting.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum Xdp {
        /// Where it is faster, and nothing else is attached there.
        #[default]
        Auto,
        /// Wherever the driver can do it.
        Native,
        /// Nowhere.
        Off,
    }
    /// Returns its name in the configuration.
    as_str
}

/// What a driver can do (`enum netdev_xdp_act`): run a program, let it redirect, and send what another program has redirected.
pub mod act {
    /// Verdicts of the program other than redirection.
    pub const BASIC: u64 = 1 << 0;
    /// Redirection.
    pub const REDIRECT: u64 = 1 << 1;
    /// Sending what was redirected.
    pub const NDO_XMIT: u64 = 1 << 2;
}

/// What is known of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The kind of device.
    pub kind: LinkKind,
    /// The bits of [`act`]; absent on kernels that do not report them.
    pub acts: Option<u64>,
    /// Whether VLAN tags are removed from a frame before a program sees it.
    pub hides_tags: bool,
    /// Another party's XDP program that is attached, if any.
    pub stranger: Option<String>,
}

/// Why a program is not attached at a driver.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Why {
    /// The reason.
    pub reason: String,
    /// What to do about it, if something can be done.
    pub remedy: Option<String>,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        self.remedy.iter().try_for_each(|remedy| write!(f, " ({remedy})"))
    }
}

impl Why {
    /// Creates a reason that nothing can be done about.
    pub fn only(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), remedy: None }
    }

    fn with(reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { reason: reason.into(), remedy: Some(remedy.into()) }
    }
}

/// Returns the links at whose drivers the frames of these interfaces arrive, by index.
pub fn cards(table: &LinkTable, interfaces: impl Iterator<Item = u32>) -> BTreeMap<u32, &Link> {
    let card = |index: u32| card(table, table.links.get(&index)?).ok();
    interfaces.filter_map(card).map(|card| (card.index, card)).collect()
}

/// Returns the link at whose driver the frames of a link arrive: the card that it is a VLAN device of, or itself.
fn card<'a>(table: &'a LinkTable, link: &'a Link) -> Result<&'a Link, Why> {
    let name = &link.name;
    if !is_vlan(link) {
        return Ok(link);
    }
    if !matches!(link.kind, LinkKind::Vlan(1..=4094)) {
        return Err(Why::only(format!("{name} is not an 802.1Q VLAN device with a VLAN from 1 to 4094")));
    }
    match link.below().and_then(|index| table.links.get(&index)) {
        None => Err(Why::only(format!("the card of {name} is not in this network namespace"))),
        Some(below) if is_vlan(below) => Err(Why::only(format!("{name} is in the VLAN of {}: two tags", below.name))),
        Some(card) => Ok(card),
    }
}

/// Returns whether the link is a VLAN device, of 802.1Q or 802.1ad.
fn is_vlan(link: &Link) -> bool {
    matches!(&link.kind, LinkKind::Vlan(_)) || link.kind == LinkKind::Other("vlan".to_owned())
}

/// Returns both sides of each VLAN device among these interfaces that is up, each with the other. Frames of a bond arrive at its ports.
pub fn vlans(table: &LinkTable, interfaces: impl Iterator<Item = u32>) -> BTreeMap<VlanSide, VlanSide> {
    let mut sides = BTreeMap::new();
    for link in interfaces.filter_map(|index| table.links.get(&index)).filter(|link| link.up) {
        let (LinkKind::Vlan(vlan), Ok(card)) = (&link.kind, card(table, link)) else { continue };
        let device = VlanSide { ifindex: link.index, vlan: 0 };
        let at = |link: &Link| VlanSide { ifindex: link.index, vlan: u32::from(*vlan) };
        let is_bond = card.kind == LinkKind::Other("bond".to_owned());
        let ports = table.links.values().filter(|port| is_bond && port.master == Some(card.index));
        sides.extend(ports.chain([card]).map(|link| (at(link), device)));
        sides.insert(device, at(card));
    }
    sides
}

/// Returns the link at whose driver the program for an interface belongs: itself or its card. `drivers` are those of [`cards`].
pub fn place<'a>(
    setting: Xdp,
    table: &'a LinkTable,
    interface: u32,
    drivers: &BTreeMap<u32, Driver>,
) -> Result<&'a Link, Why> {
    if setting == Xdp::Off {
        return Err(Why::only("disabled by `xdp`"));
    }
    let gone = || Why::only("the interface is gone");
    let card = card(table, table.links.get(&interface).ok_or_else(gone)?)?;
    match judge(setting, &card.name, drivers.get(&card.index).ok_or_else(gone)?) {
        Ok(()) => Ok(card),
        Err(why) if card.index == interface => Err(why),
        Err(why) => Err(Why { reason: format!("at its card {}: {}", card.name, why.reason), ..why }),
    }
}

/// Returns whether the program belongs at the driver of the link with that name.
fn judge(setting: Xdp, name: &str, driver: &Driver) -> Result<(), Why> {
    if let Some(stranger) = &driver.stranger {
        return Err(Why::only(format!("another XDP program, {stranger}, is attached")));
    }
    let Some(acts) = driver.acts else {
        return Err(Why::with("the kernel does not report what drivers can do", "boot Linux 6.3 or later"));
    };
    if acts & (act::BASIC | act::REDIRECT) != act::BASIC | act::REDIRECT {
        return Err(Why::only(format!("the driver of a {} interface cannot redirect frames", driver.kind)));
    }
    if setting == Xdp::Auto && driver.kind == LinkKind::Veth {
        let reason = "a veth delivers merged segments, which TC forwards as they are";
        return Err(Why::with(reason, "`xdp: Native` if most packets are small"));
    }
    if driver.hides_tags {
        let remedy = format!("`ethtool -K {name} rxvlan off`");
        return Err(Why::with("VLAN tags are removed before a program sees them", remedy));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::link;

    const ALL: u64 = act::BASIC | act::REDIRECT | act::NDO_XMIT;
    const CARD: u32 = 2;
    const DEVICE: u32 = 5;

    fn card() -> Driver {
        Driver { kind: LinkKind::Physical, acts: Some(ALL), hides_tags: false, stranger: None }
    }

    fn table(links: impl IntoIterator<Item = Link>) -> LinkTable {
        LinkTable { links: links.into_iter().map(|link| (link.index, link)).collect(), ..LinkTable::default() }
    }

    /// Returns a VLAN device of a link.
    fn device(index: u32, vlan: u16, below: u32) -> Link {
        Link { kind: LinkKind::Vlan(vlan), peer: Some(below), ..link(index, &format!("eth0.{vlan}")) }
    }

    /// Returns where the program for [`DEVICE`] belongs, or why it belongs nowhere.
    fn place_of(device: Link, driver: &Driver) -> Result<u32, String> {
        let table = table([link(CARD, "eth0"), device]);
        let drivers = cards(&table, [DEVICE].into_iter()).into_keys().map(|index| (index, driver.clone())).collect();
        place(Xdp::Native, &table, DEVICE, &drivers).map(|card| card.index).map_err(|why| why.to_string())
    }

    #[test]
    fn capable_card_is_used_unless_xdp_is_off() {
        let (table, drivers) = (table([link(CARD, "eth0")]), [(CARD, card())].into());
        for (setting, does) in [(Xdp::Auto, true), (Xdp::Native, true), (Xdp::Off, false)] {
            assert_eq!(place(setting, &table, CARD, &drivers).is_ok(), does, "{setting}");
        }
    }

    #[test]
    fn obstacles_to_a_driver_program_are_named() {
        let reason = |driver: &Driver| judge(Xdp::Native, "eth0", driver).unwrap_err().to_string();
        let stranger = Driver { stranger: Some("xdp_dispatcher".into()), ..card() };
        assert!(reason(&stranger).contains("xdp_dispatcher"));
        assert!(reason(&Driver { acts: None, ..card() }).contains("Linux 6.3"));
        for acts in [0, act::BASIC, act::NDO_XMIT] {
            assert!(reason(&Driver { acts: Some(acts), ..card() }).contains("physical"));
        }
        assert!(reason(&Driver { hides_tags: true, ..card() }).contains("ethtool -K eth0 rxvlan off"));
    }

    #[test]
    fn the_program_for_a_vlan_device_belongs_at_a_card_that_can_do_it() {
        assert_eq!(place_of(device(DEVICE, 100, CARD), &card()), Ok(CARD));
        let hides = Driver { hides_tags: true, ..card() };
        let why = place_of(device(DEVICE, 100, CARD), &hides).unwrap_err();
        assert!(why.contains("at its card eth0") && why.contains("ethtool -K eth0 rxvlan off"), "{why}");
    }

    #[test]
    fn vlan_devices_that_no_program_can_serve_say_why() {
        let provider = Link { kind: LinkKind::Other("vlan".to_owned()), ..device(DEVICE, 100, CARD) };
        let away = Link { peer_netns: Some(1), ..device(DEVICE, 100, CARD) };
        let nested = table([link(CARD, "eth0"), device(4, 10, CARD), device(DEVICE, 100, 4)]);
        for (link, part) in [(provider, "802.1Q"), (device(DEVICE, 0, CARD), "802.1Q"), (away, "network namespace")] {
            let why = place_of(link, &card()).unwrap_err();
            assert!(why.contains(part), "{why}");
        }
        let why = place(Xdp::Native, &nested, DEVICE, &BTreeMap::new()).unwrap_err().to_string();
        assert!(why.contains("eth0.100 is in the VLAN of eth0.10"), "{why}");
        assert!(vlans(&nested, [DEVICE].into_iter()).is_empty());
    }

    #[test]
    fn a_vlan_device_that_is_up_has_two_sides_and_one_more_for_each_port_of_a_bond() {
        let side = |ifindex, vlan| VlanSide { ifindex, vlan };
        let port = |index: u32| Link { master: Some(CARD), ..link(index, &format!("port{index}")) };
        let of = |kind: LinkKind| {
            let card = Link { kind, ..link(CARD, "card") };
            let down = Link { up: false, ..device(6, 200, CARD) };
            let table = table([card, port(3), port(4), device(DEVICE, 100, CARD), down, device(7, 300, CARD)]);
            vlans(&table, [CARD, DEVICE, 6].into_iter())
        };
        let both = BTreeMap::from([(side(CARD, 100), side(DEVICE, 0)), (side(DEVICE, 0), side(CARD, 100))]);
        assert_eq!(of(LinkKind::Bridge), both);
        let ports = [3, 4].map(|port| (side(port, 100), side(DEVICE, 0)));
        assert_eq!(of(LinkKind::Other("bond".to_owned())), both.into_iter().chain(ports).collect());
    }

    #[test]
    fn merged_segments_of_a_veth_stay_at_tc_unless_somebody_says_otherwise() {
        let veth = Driver { kind: LinkKind::Veth, ..card() };
        assert!(judge(Xdp::Auto, "eth0", &veth).unwrap_err().to_string().contains("xdp: Native"));
        assert_eq!(judge(Xdp::Native, "eth0", &veth), Ok(()));
    }
}
