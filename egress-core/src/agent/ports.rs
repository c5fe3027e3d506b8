//! The ports that flows use, and how many port blocks they are going to need. Pure.

use egress_common::port_block;
use std::{collections::BTreeMap, net::IpAddr, time::Duration};

/// The other end of a flow: address, port in host byte order, protocol.
pub type Remote = (IpAddr, u16, u32);

/// One translated flow, as far as ports are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Used {
    /// The pod.
    pub pod: IpAddr,
    /// The egress IP.
    pub egress: IpAddr,
    /// The other end.
    pub remote: Remote,
    /// The translated port, host byte order.
    pub port: u16,
}

/// The ports that flows of one egress IP use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Use {
    /// Flows by block.
    blocks: BTreeMap<u16, u32>,
    /// The most ports towards one remote address, port and protocol.
    peak: u32,
    /// The expected peak in [`AHEAD`] if it keeps growing, with [`POD_PORTS`] per pod at most: what the blocks must have room for.
    expected: u32,
}

/// Ports in use, by egress IP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports(BTreeMap<IpAddr, Use>);

impl Ports {
    /// Counts the ports of these flows. `growth` is the growth up to this count.
    pub fn count(flows: impl IntoIterator<Item = Used>, growth: &Growth) -> Self {
        let mut per_pod: BTreeMap<(IpAddr, Remote), BTreeMap<IpAddr, u32>> = BTreeMap::new();
        let mut ports = Self::default();
        for flow in flows {
            *per_pod.entry((flow.egress, flow.remote)).or_default().entry(flow.pod).or_default() += 1;
            if let Some(block) = port_block::of_port(flow.port) {
                *ports.0.entry(flow.egress).or_default().blocks.entry(block).or_default() += 1;
            }
        }
        for ((egress, _), pods) in &per_pod {
            let use_ = ports.0.entry(*egress).or_default();
            use_.peak = use_.peak.max(pods.values().sum());
        }
        for ((egress, _), pods) in &per_pod {
            let use_ = ports.0.entry(*egress).or_default();
            let expected = |n: &u32| growth.expected(*egress, use_.peak, *n).min(POD_PORTS);
            use_.expected = use_.expected.max(pods.values().map(expected).sum());
        }
        ports
    }

    /// Returns how many flows use a block of an egress IP.
    pub fn flows(&self, egress: IpAddr, block: u16) -> u32 {
        self.0.get(&egress).and_then(|u| u.blocks.get(&block)).copied().unwrap_or(0)
    }

    /// Returns the ports in use towards the busiest remote address, port and protocol, by egress IP.
    pub fn peaks(&self) -> BTreeMap<IpAddr, u32> {
        self.0.iter().map(|(egress, u)| (*egress, u.peak)).collect()
    }

    /// Returns how many blocks the flows use, by egress IP.
    pub fn blocks(&self) -> BTreeMap<IpAddr, usize> {
        self.0.iter().map(|(egress, u)| (*egress, u.blocks.len())).collect()
    }

    /// Returns how many blocks of an egress IP the flows are going to need, with room for as many ports again; at most all that there are.
    pub fn needed(&self, egress: IpAddr) -> u16 {
        let expected = self.0.get(&egress).map_or(0, |u| u.expected);
        let needed = (expected * LOW_WATER).div_ceil(u32::from(port_block::SIZE));
        needed.min(u32::from(port_block::COUNT)) as u16
    }
}

/// The peaks that a count found.
#[derive(Clone, Debug)]
struct Peaks {
    /// When the count began.
    at: Duration,
    /// The peaks by egress IP.
    peaks: BTreeMap<IpAddr, u32>,
}

/// Peaks of earlier counts.
#[derive(Clone, Debug, Default)]
pub struct Past {
    last: Option<Peaks>,
    /// The peaks of a count that is at least [`WINDOW`] older.
    earlier: Option<Peaks>,
}

impl Past {
    /// Returns the peaks that a count that begins now is compared with: those of the last count and, if that is not old enough, also those
    /// of the count before. The count before alone may date from long before the growth began.
    pub fn growth(&self, now: Duration) -> Growth {
        let age = |past: &Peaks| now.saturating_sub(past.at);
        let of = |past: &Peaks| (age(past).max(WINDOW), past.peaks.clone());
        let before = self.earlier.as_ref().filter(|_| self.last.as_ref().is_some_and(|last| age(last) < WINDOW));
        Growth(self.last.iter().chain(before).map(of).collect())
    }

    /// Records a count.
    pub fn note(&mut self, began: Duration, ports: &Ports) {
        if self.last.as_ref().is_none_or(|last| began.saturating_sub(last.at) >= WINDOW) {
            self.earlier = self.last.replace(Peaks { at: began, peaks: ports.peaks() });
        }
    }
}

/// The peaks by egress IP that a count is compared with, and how long ago they were; empty if there was no count before.
#[derive(Clone, Debug, Default)]
pub struct Growth(Vec<(Duration, BTreeMap<IpAddr, u32>)>);

impl Growth {
    /// Returns how many ports `used` will become, if the egress IP's peak keeps growing as it did up to `peak`.
    fn expected(&self, egress: IpAddr, peak: u32, used: u32) -> u32 {
        let more = |(age, peaks): &(Duration, BTreeMap<IpAddr, u32>)| {
            let grown = peak.saturating_sub(peaks.get(&egress).copied().unwrap_or(0));
            let per = u128::from(peak) * age.as_millis();
            (u128::from(used) * u128::from(grown) * AHEAD.as_millis()).checked_div(per).unwrap_or(0)
        };
        let more = self.0.iter().map(more).max().unwrap_or(0);
        used.saturating_add(more.min(u128::from(POD_PORTS)) as u32)
    }
}

/// The shortest time over which growth is measured: over less, ordinary fluctuation would look like growth.
const WINDOW: Duration = Duration::from_millis(250);

/// How long the requested blocks must last: several times what a busy cluster takes from a count to a lease in force.
const AHEAD: Duration = Duration::from_secs(4);

/// A node may use one part in this many of its ports towards one remote before it requests more blocks.
const LOW_WATER: u32 = 2;

/// For how many ports of an egress IP towards one remote a pod is given blocks. With the same number in reserve, this is a quarter of all
/// ports, so that no pod takes the whole cluster's.
const POD_PORTS: u32 = port_block::COUNT as u32 * port_block::SIZE as u32 / 4 / LOW_WATER;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn used(port: u16, remote: u16) -> Used {
        let (pod, egress) = ([10, 0, 0, 1].into(), egress());
        Used { pod, egress, remote: ([203, 0, 113, 1].into(), remote, 6), port }
    }

    pub fn count(flows: impl IntoIterator<Item = Used>) -> Ports {
        Ports::count(flows, &Growth::default())
    }

    pub fn egress() -> IpAddr {
        [192, 0, 2, 1].into()
    }

    /// docs/failures.md: port-ramp.
    #[test]
    fn port_ramp_growing_use_is_requested_ahead() {
        let (second, egress) = (Duration::from_secs(1), IpAddr::from([192, 0, 2, 1]));
        let ports = |count: u16| (0..count).map(|i| used(1024 + i, 443));
        let mut past = Past::default();
        let mut needed = |at: Duration, ports_used: u16| {
            let ports = Ports::count(ports(ports_used), &past.growth(at));
            past.note(at, &ports);
            ports.needed(egress)
        };
        assert_eq!(needed(second, 320), 10, "nothing is known of the time before the first count");
        assert_eq!(needed(3 * second, 320), 10);
        assert_eq!(needed(4 * second, 640), 20 + 4 * 10, "320 more a second");
        assert_eq!(
            needed(4 * second + second / 10, 640),
            20 + 37,
            "a tenth of a second is too short to measure growth"
        );
        assert_eq!(needed(5 * second, 800), 25 + 4 * 5, "160 more a second");
        assert_eq!(needed(8 * second, 800), 25, "it no longer grows");
        assert_eq!(needed(10 * second, 320), 10, "what shrinks is still needed as far as it is used");
        assert_eq!(
            needed(10 * second + second / 10, 640),
            20 + 4 * 40,
            "a rise that began after the last count, a tenth of a second ago, counts as 320 in a quarter of a second"
        );
        assert_eq!(needed(11 * second, 20_000), 252, "one pod's part, however fast it grows");
    }

    #[test]
    fn the_reported_peak_counts_all_ports_in_use() {
        let busy = count((0..20_000).map(|i| used(1024 + i, 443)));
        assert_eq!(busy.peaks(), [(egress(), 20_000)].into());
    }

    #[test]
    fn flows_are_counted_for_each_block() {
        let egress = IpAddr::from([192, 0, 2, 1]);
        let ports = count([used(1024, 443), used(1087, 80), used(1088, 443)]);
        assert_eq!([0, 1, 2].map(|block| ports.flows(egress, block)), [2, 1, 0]);
        assert_eq!(ports.blocks(), [(egress, 2)].into());
    }
}
