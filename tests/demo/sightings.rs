//! The proof of "never the wrong address": everything that a server's interface sees from pods, and which of it had a
//! source that it should not have.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::Result;
use lab::{Capture, Server};

/// Packets that a server saw, and those among them with a source that was not allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sightings {
    /// All packets towards the server.
    pub packets: usize,
    /// Those with another source, by that source.
    pub strangers: BTreeMap<IpAddr, usize>,
    /// Packets that the capture itself lost: it proves nothing about them.
    pub lost: u64,
}

impl Sightings {
    /// Counts what came from each source.
    pub fn of(sources: &BTreeMap<IpAddr, usize>, allowed: &[IpAddr], lost: u64) -> Sightings {
        let strangers = sources.iter().filter(|(source, _)| !allowed.contains(source));
        Sightings {
            packets: sources.values().sum(),
            strangers: strangers.map(|(source, count)| (*source, *count)).collect(),
            lost,
        }
    }

    /// Adds what another capture saw.
    pub fn add(&mut self, other: &Sightings) {
        self.packets += other.packets;
        self.lost += other.lost;
        for (source, count) in &other.strangers {
            *self.strangers.entry(*source).or_default() += count;
        }
    }

    /// Whether packets were seen, all of them, and none from a stranger.
    pub fn are_clean(&self) -> bool {
        self.packets > 0 && self.lost == 0 && self.strangers.is_empty()
    }

    /// `0 of 1234 packets`, with the strangers' addresses.
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
    /// Watches what arrives at a server.
    pub fn start(server: &Server) -> Result<Watch> {
        Ok(Watch { capture: Capture::start(&server.ns, "eth0")?, server: server.clone() })
    }

    /// Ends, and judges what was seen.
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
    fn an_empty_or_lossy_capture_proves_nothing() {
        assert!(!Sightings::default().are_clean());
        assert!(Sightings::of(&BTreeMap::from([(ip(10), 5)]), &[ip(10)], 0).are_clean());
        assert!(!Sightings::of(&BTreeMap::from([(ip(10), 5)]), &[ip(10)], 1).are_clean());
    }
}
