//! Looks up the routes to other nodes.

use super::failing::Failing;
use egress_core::network::{Route, links::LinkTable};
use egress_node::host::{
    netlink::Netlink,
    route::{self, Secured},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
};

/// The routes to other nodes, as the kernel last reported them.
#[derive(Default)]
pub struct Routes {
    found: BTreeMap<IpAddr, Result<Route, String>>,
    secured: Vec<Secured>,
    reading: Failing,
    links: LinkTable,
}

impl Routes {
    /// Reads the IPsec policies again, because nothing notifies the agent of changes. Keeps the known ones if they cannot be read.
    pub fn check_secured(&mut self) {
        self.take_secured(route::secured());
    }

    fn take_secured(&mut self, read: io::Result<Vec<Secured>>) {
        match read {
            Ok(secured) => {
                self.reading.is_over();
                if secured != self.secured {
                    self.secured = secured;
                    self.found.clear();
                }
            }
            Err(error) => {
                if self.reading.is_news(&error.to_string()) {
                    tracing::warn!("IPsec policies cannot be read; the last known ones are used: {error}");
                }
            }
        }
    }

    /// Looks up the routes to `addresses` and forgets all others. Known routes stay valid until links, addresses or routes change.
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
                    Ok(route) => route.ok_or_else(|| "there is no route to it".into()),
                    Err(error) => Err(format!("the route cannot be read: {error}")),
                }
            };
            self.found.insert(*address, found);
        }
    }

    /// Returns the routes that the last [`Self::find`] left, by address.
    pub fn found(&self) -> &BTreeMap<IpAddr, Result<Route, String>> {
        &self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipsec_policies_stay_known_while_they_cannot_be_read() {
        let mut routes = Routes::default();
        routes.take_secured(Ok(vec![Secured::default()]));
        routes.take_secured(Err(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(routes.secured, [Secured::default()]);
        routes.take_secured(Ok(Vec::new()));
        assert_eq!(routes.secured, []);
    }
}
