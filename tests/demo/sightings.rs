//! The proof of "never the wrong address": all packets from pods at a server's interface, and those among them with a wrong source.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::Result;
use lab::{Capture, Server};

/// Packets that a server saw, and those among them with a source that is not allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sightings {
    /// The number of packets towards the server.
    pub packets: usize,
    /// The number of packets from each source that is not allowed.
    pub strangers: BTreeMap<IpAddr, usize>,
    /// The number of packets that the capture lost, about which it proves nothing.
    pub lost: u64,
}

impl Sightings {
    /// Counts the packets from all sources, and from those that are not `allowed`.
    pub fn of(sources: &BTreeMap<IpAddr, usize>, allowed: &[IpAddr], lost: u64) -> Sightings {
        let strangers = sources.iter().filter(|(source, _)| !allowed.contains(source));
        Sightings {
            packets: sources.values().sum(),
            strangers: strangers.map(|(source, count)| (*source, *count)).collect(),
            lost,
        }
    }

    /// Adds the packets of another capture.
    pub fn add(&mut self, other: &Sightings) {
        self.packets += other.packets;
        self.lost += other.lost;
        for (source, count) in &other.strangers {
            *self.strangers.entry(*source).or_default() += count;
        }
    }

    /// Returns whether there were packets, none lost and none with a wrong source.
    pub fn are_clean(&self) -> bool {
        self.packets > 0 && self.lost == 0 && self.strangers.is_empty()
    }

    /// Returns a summary such as `0 of 1234 packets`, with the wrong sources.
    pub fn sentence(&self) -> String {
        let wrong: usize = self.strangers.values().sum();
        let mut text = format!("{wrong} of {} packets", self.packets);
        if !self.strangers.is_empty() {
            let list: Vec<String> =
                self.strangers.iter().map(|(source, count)| format!("{count} from {source}")).collect();
            text.push_str(&format!(": {}", list.join(", ")));
        }
        if self.lost > 0 {
            text.push_str(&format!(" ({} more were not captured)", self.lost));
        }
        text
    }
}

/// A running capture at a server.
pub struct Watch {
    capture: Capture,
    server: Server,
}

impl Watch {
    /// Starts a capture of the packets that arrive at a server.
    pub fn start(server: &Server) -> Result<Watch> {
        Ok(Watch { capture: Capture::start(&server.ns, "eth0")?, server: server.clone() })
    }

    /// Ends the capture and judges its packets.
    pub fn finish(self, allowed: &[IpAddr]) -> Result<Sightings> {
        let (trace, lost) = self.capture.finish_lossy()?;
        let mut sources = trace.sources_towards(self.server.ips.v4.into());
        sources.extend(trace.sources_towards(self.server.ips.v6.into()));
        Ok(Sightings::of(&sources, allowed, lost))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    #[test]
    fn unexpected_sources_are_counted_and_named() {
        let sources = BTreeMap::from([(ip(10), 5), (ip(77), 2)]);
        let mut seen = Sightings::of(&sources, &[ip(10)], 0);
        assert!(!seen.are_clean());
        assert_eq!(seen.sentence(), "2 of 7 packets: 2 from 192.0.2.77");
        seen.add(&seen.clone());
        assert_eq!((seen.packets, seen.strangers[&ip(77)]), (14, 4));
    }

    #[test]
    fn empty_and_lossy_captures_are_not_clean() {
        assert!(!Sightings::default().are_clean());
        assert!(Sightings::of(&BTreeMap::from([(ip(10), 5)]), &[ip(10)], 0).are_clean());
        assert!(!Sightings::of(&BTreeMap::from([(ip(10), 5)]), &[ip(10)], 1).are_clean());
    }
}
