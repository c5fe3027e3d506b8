//! Ranges of addresses, as pools have them.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use super::Family;

/// An invalid range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// One end is IPv4, the other IPv6.
    #[error("{start} and {end} are of different families")]
    Families {
        /// the first address
        start: IpAddr,
        /// the last address
        end: IpAddr,
    },
    /// The end lies before the start.
    #[error("{end} lies before {start}: swap them")]
    Order {
        /// the first address
        start: IpAddr,
        /// the last address
        end: IpAddr,
    },
}

/// Addresses of one family, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IpRange {
    start: IpAddr,
    end: IpAddr,
}

impl IpRange {
    /// Creates the range from `start` to `end`, both included.
    pub fn new(start: IpAddr, end: IpAddr) -> Result<Self, RangeError> {
        if Family::of(start) != Family::of(end) {
            return Err(RangeError::Families { start, end });
        }
        if end < start {
            return Err(RangeError::Order { start, end });
        }
        Ok(Self { start, end })
    }

    /// Returns what may be allocated from a CIDR by Antrea's rule: never its first address, and never the last of an IPv4 one. `None` if
    /// nothing is left (/31, /32, /128).
    pub fn from_cidr(cidr: IpNet) -> Option<Self> {
        let family = Family::of_net(&cidr);
        let first = Family::bits(cidr.network()).checked_add(1)?;
        let last = match family {
            Family::V4 => Family::bits(cidr.broadcast()).checked_sub(1)?,
            Family::V6 => Family::bits(cidr.broadcast()),
        };
        (first <= last && u32::from(cidr.prefix_len()) < family.width())
            .then(|| Self { start: family.address(first), end: family.address(last) })
    }

    /// Returns the first address.
    pub fn start(&self) -> IpAddr {
        self.start
    }

    /// Returns the last address.
    pub fn end(&self) -> IpAddr {
        self.end
    }

    /// Returns the family of its addresses.
    pub fn family(&self) -> Family {
        Family::of(self.start)
    }

    /// Returns whether the address lies in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        Family::of(address) == self.family() && self.start <= address && address <= self.end
    }

    /// Returns the number of addresses; u128::MAX for the whole of IPv6.
    pub fn count(&self) -> u128 {
        (Family::bits(self.end) - Family::bits(self.start)).saturating_add(1)
    }

    /// Returns all its addresses in order, one at a time.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let family = self.family();
        (Family::bits(self.start)..=Family::bits(self.end)).map(move |bits| family.address(bits))
    }
}

impl fmt::Display for IpRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Option<IpRange> {
        IpRange::from_cidr(text.parse().unwrap())
    }

    #[test]
    fn cidrs_follow_antreas_rule() {
        assert_eq!(cidr("192.0.2.0/28").unwrap().count(), 14);
        assert_eq!(cidr("192.0.2.0/28").unwrap().start(), "192.0.2.1".parse::<IpAddr>().unwrap());
        assert_eq!(cidr("192.0.2.0/30").unwrap().count(), 2);
        for none in ["192.0.2.0/31", "192.0.2.1/32", "2001:db8::1/128", "255.255.255.255/32"] {
            assert_eq!(cidr(none), None, "{none}");
        }
        assert_eq!(cidr("2001:db8::/127").unwrap().count(), 1);
        assert_eq!(cidr("2001:db8::/64").unwrap().end(), "2001:db8::ffff:ffff:ffff:ffff".parse::<IpAddr>().unwrap());
        assert_eq!(cidr("::/0").unwrap().count(), u128::MAX);
    }

    #[test]
    fn a_range_includes_its_ends_and_refuses_reversed_ones() {
        let [a, b] = ["192.0.2.32", "192.0.2.40"].map(|a| a.parse::<IpAddr>().unwrap());
        let range = IpRange::new(a, b).unwrap();
        assert!(range.contains(a) && range.contains(b) && range.count() == 9);
        assert_eq!(range.addresses().count(), 9);
        assert!(!range.contains("::ffff:192.0.2.33".parse().unwrap()));
        assert!(matches!(IpRange::new(b, a), Err(RangeError::Order { .. })));
        assert!(matches!(IpRange::new(a, "::1".parse().unwrap()), Err(RangeError::Families { .. })));
    }
}
