//! The routes to other nodes.

use egress_core::network::{Route, links::LinkTable};
use egress_node::host::{
    netlink::Netlink,
    route::{self, Secured},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// The routes to other nodes, as the kernel last reported them.
#[derive(Default)]
pub struct Routes {
    found: BTreeMap<IpAddr, Result<Route, String>>,
    secured: Vec<Secured>,
    links: LinkTable,
}

impl Routes {
    /// Returns whether IPsec policies have changed. Nothing notifies about them.
    pub fn check_secured(&mut self) -> bool {
        let secured = route::secured().unwrap_or_else(|error| {
            tracing::debug!("IPsec policies cannot be read: {error}");
            Vec::new()
        });
        let changed = secured != self.secured;
        if changed {
            self.secured = secured;
            self.found.clear();
        }
        changed
    }

    /// Asks for the routes to `addresses`, and forgets all others. What is known stays valid until links, addresses or
    /// routes change.
    pub async fn find(&mut self, netlink: &Netlink, links: &LinkTable, addresses: &BTreeSet<IpAddr>) {
        if self.links != *links {
            self.found.clear();
            self.links = links.clone();
        }
        self.found.retain(|address, _| addresses.contains(address));
        for address in addresses {
            if self.found.contains_key(address) {
                continue;
            }
            let found = if self.secured.iter().any(|policy| policy.covers(*address)) {
                Err("an IPsec policy covers it".into())
            } else {
                match route::lookup(&netlink.handle, *address).await {
                    Ok(route) => route.ok_or_else(|| "no route leads to it".into()),
                    Err(error) => Err(format!("the route cannot be read: {error}")),
                }
            };
            self.found.insert(*address, found);
        }
    }

    /// The routes to the addresses that were asked for.
    pub fn found(&self) -> &BTreeMap<IpAddr, Result<Route, String>> {
        &self.found
    }
}
