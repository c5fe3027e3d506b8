//! Whether a gateway's packets are sent on at the driver of an interface (XDP), or at TC as usual.

use super::links::LinkKind;
use std::fmt;

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

impl fmt::Display for Xdp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Xdp::Auto => "Auto",
            Xdp::Native => "Native",
            Xdp::Off => "Off",
        })
    }
}

/// What a driver can do (`enum netdev_xdp_act`): run a program, have it redirect, and send what another one has redirected.
pub mod act {
    /// The program's verdicts other than redirection.
    pub const BASIC: u64 = 1 << 0;
    /// Redirection.
    pub const REDIRECT: u64 = 1 << 1;
    /// To send what was redirected.
    pub const NDO_XMIT: u64 = 1 << 2;
}

/// What is known of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// What sort of device it is.
    pub kind: LinkKind,
    /// The bits of [`act`]; absent on kernels that do not report them.
    pub acts: Option<u64>,
    /// VLAN tags are taken off a frame before a program sees it.
    pub hides_tags: bool,
    /// Another party's XDP program that is attached.
    pub stranger: Option<String>,
}

/// Why a program is not at a driver.
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
    /// A reason that nothing can be done about.
    pub fn only(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), remedy: None }
    }

    fn with(reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { reason: reason.into(), remedy: Some(remedy.into()) }
    }
}

/// Whether the program belongs at the driver of the interface with that name.
pub fn judge(setting: Xdp, name: &str, driver: &Driver) -> Result<(), Why> {
    if setting == Xdp::Off {
        return Err(Why::only("switched off by `xdp`"));
    }
    if driver.kind == LinkKind::Other("vlan".to_owned()) {
        let reason = format!(
            "{name} is a VLAN of a card: a program would have to be at the card, where none is attached for it"
        );
        return Err(Why::only(reason));
    }
    if let Some(stranger) = &driver.stranger {
        return Err(Why::only(format!("another XDP program, {stranger}, is attached")));
    }
    let Some(acts) = driver.acts else {
        return Err(Why::with("the kernel does not report what drivers can do", "boot Linux 6.3 or later"));
    };
    if acts & (act::BASIC | act::REDIRECT) != act::BASIC | act::REDIRECT {
        return Err(Why::only(format!("the driver of a {} interface cannot do it", driver.kind)));
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

    const ALL: u64 = act::BASIC | act::REDIRECT | act::NDO_XMIT;

    fn card() -> Driver {
        Driver { kind: LinkKind::Physical, acts: Some(ALL), hides_tags: false, stranger: None }
    }

    #[test]
    fn a_card_that_can_do_it_does_unless_it_is_switched_off() {
        assert_eq!(judge(Xdp::Auto, "eth0", &card()), Ok(()));
        assert_eq!(judge(Xdp::Native, "eth0", &card()), Ok(()));
        assert!(judge(Xdp::Off, "eth0", &card()).is_err());
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
    fn a_vlan_of_a_card_is_named_as_what_it_is() {
        let vlan = |acts| Driver { kind: LinkKind::Other("vlan".to_owned()), acts, ..card() };
        for acts in [None, Some(0)] {
            assert!(
                judge(Xdp::Native, "eth0.100", &vlan(acts)).unwrap_err().to_string().contains("eth0.100 is a VLAN")
            );
        }
    }

    #[test]
    fn merged_segments_of_a_veth_stay_at_tc_unless_somebody_says_otherwise() {
        let veth = Driver { kind: LinkKind::Veth, ..card() };
        assert!(judge(Xdp::Auto, "eth0", &veth).unwrap_err().to_string().contains("xdp: Native"));
        assert_eq!(judge(Xdp::Native, "eth0", &veth), Ok(()));
    }
}
