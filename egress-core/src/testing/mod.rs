//! Fixtures for tests, including those of the crates above: links, and clusters of any shape.
#![allow(missing_docs, clippy::unwrap_used, reason = "each is named after what it makes, and belongs to tests")]

pub mod world;

use crate::network::{
    MacAddress,
    links::{DefaultRoute, Link, LinkKind, TABLE_MAIN},
};

/// Returns a physical link that is up.
pub fn link(index: u32, name: &str) -> Link {
    Link {
        name: name.to_owned(),
        index,
        mac: Some(MacAddress([2, 0, 0, 0, 0, index as u8])),
        mtu: 1500,
        kind: LinkKind::Physical,
        master: None,
        up: true,
        carrier: true,
        peer: None,
        peer_netns: None,
        addresses: Vec::new(),
    }
}

/// Returns a default route of the main table.
pub fn default_route(oif: u32, gateway: &str) -> DefaultRoute {
    DefaultRoute { ipv6: false, table: TABLE_MAIN, metric: 0, oif, gateway: gateway.parse().ok(), source: None }
}
