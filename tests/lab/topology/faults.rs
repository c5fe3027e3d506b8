//! Causes faults: links down, interfaces gone, nodes dead or cut off.

use anyhow::Result;

use super::{Lab, Role};
use crate::netns::NetNs;

/// In milliseconds: without a carrier, a gateway gives up after 0.15 s, and after 3 s with [`ONE_SECOND`], the kernel's default.
const SHORT_RETRANSMISSION_MS: &str = "50";
const ONE_SECOND: &str = "1000";

/// One of the two shared segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Between the nodes.
    Underlay,
    /// Between gateways and servers.
    External,
}

impl Lab {
    /// Simulates a power failure: kills the node's processes of Spillway and takes its ports down on all segments, so
    /// that no packet that its kernel still sends arrives anywhere. The Node object stays as it is.
    pub fn kill_node(&mut self, name: &str) -> Result<()> {
        self.cut(name, Segment::Underlay)?;
        if self.node(name).role == Role::Gateway {
            self.cut(name, Segment::External)?;
        }
        for process in self.processes.values_mut().filter(|process| process.node() == Some(name)) {
            process.kill()?;
        }
        Ok(())
    }

    /// Simulates the return of power: the ports come up, and no state of Spillway is left in the kernel, as after a
    /// reboot. [`Lab::start_agent`] starts Spillway again.
    pub fn revive_node(&mut self, name: &str) -> Result<()> {
        // With the old maps, the gateway would count as able until its deadline, and one port may come up a second after the other.
        self.clean_up(name)?;
        self.heal(name, Segment::Underlay)?;
        if self.node(name).role == Role::Gateway {
            self.heal(name, Segment::External)?;
        }
        Ok(())
    }

    /// Pulls the cable of a node at the segment's bridge: the node's interface loses its carrier.
    pub fn cut(&self, node: &str, segment: Segment) -> Result<()> {
        self.set_neighbour_retransmission(node, segment, SHORT_RETRANSMISSION_MS)?;
        self.segment(segment).ip(&[format!("link set {node} down")])
    }

    /// Plugs the cable in again.
    pub fn heal(&self, node: &str, segment: Segment) -> Result<()> {
        self.segment(segment).ip(&[format!("link set {node} up")])?;
        self.segment(segment).wait_running(&[node])?;
        self.set_neighbour_retransmission(node, segment, ONE_SECOND)
    }

    /// Sets the interval in milliseconds at which a gateway repeats a neighbour request at its uplink; after three
    /// requests it drops the packets queued for the answer. All nodes share one kernel here: the sender's TCP sees that
    /// its packet is still queued, and does not retransmit it.
    fn set_neighbour_retransmission(&self, node: &str, segment: Segment, milliseconds: &str) -> Result<()> {
        match self.nodes.get(node) {
            Some(node) if node.external.is_some() && segment == Segment::External => {
                let keys = ["net.ipv4.neigh.ext0.retrans_time_ms", "net.ipv6.neigh.ext0.retrans_time_ms"];
                node.ns.sysctls(&keys.map(|key| (key, milliseconds)))
            }
            _ => Ok(()),
        }
    }

    /// Makes the segment drop all frames from and to a node while its link stays up: only the silence reveals it.
    pub fn isolate(&self, node: &str, segment: Segment) -> Result<()> {
        self.segment(segment).nft(&format!(
            "table bridge isolate-{node} {{
                chain forward {{ type filter hook forward priority 0; iifname \"{node}\" drop; oifname \"{node}\" drop; }}
            }}"
        ))
    }

    /// Reverts [`Lab::isolate`].
    pub fn rejoin(&self, node: &str, segment: Segment) -> Result<()> {
        self.segment(segment).nft(&format!("delete table bridge isolate-{node}"))
    }

    /// Makes the segment's switch a hub: it learns no addresses and floods each frame, like a switch whose table is lost or full.
    pub fn flood(&self, segment: Segment) -> Result<()> {
        self.segment(segment).ip(&["link set br0 type bridge ageing_time 0 fdb_flush".into()])
    }

    /// Makes the manifests directory unreachable for a node, as when its path to the API server is cut.
    pub fn cut_store(&self, node: &str) -> Result<()> {
        self.store_link(node).map(drop)?;
        std::fs::remove_file(self.store_path(node))?;
        Ok(())
    }

    /// Reverts [`Lab::cut_store`].
    pub fn heal_store(&self, node: &str) -> Result<()> {
        self.store_link(node).map(drop)
    }

    /// Returns the namespace of a segment's bridge.
    fn segment(&self, segment: Segment) -> &NetNs {
        match segment {
            Segment::Underlay => &self.underlay,
            Segment::External => &self.external,
        }
    }
}
