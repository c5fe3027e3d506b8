//! Routes to the egress IPs that this node carries (`announce: Route`), in their own table. The node's BGP speaker (FRR, BIRD or GoBGP)
//! exports them. The node looks up no routes in that table.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    pin::pin,
};

use futures::TryStreamExt;
use rtnetlink::{
    Handle, RouteMessageBuilder,
    packet_route::{
        AddressFamily,
        route::{RouteAttribute, RouteMessage, RouteProtocol, RouteType},
    },
};
use tokio::task::JoinSet;

use super::{decode, netlink::errno};

/// The routing table. FRR imports no table above 252.
pub const TABLE: u32 = 83;
/// The protocol number of the routes, which identifies them as ours.
const PROTOCOL: RouteProtocol = RouteProtocol::Other(0x53);

/// Why egress IPs are not advertised as they should be.
#[derive(Debug, thiserror::Error)]
#[error("routes to egress IPs in table {TABLE} cannot be {action}: {message}; the agent needs CAP_NET_ADMIN")]
pub struct AdvertiseError {
    action: &'static str,
    message: String,
}

impl AdvertiseError {
    fn new(action: &'static str) -> impl Fn(rtnetlink::Error) -> Self {
        move |error| Self { action, message: error.to_string() }
    }
}

/// The routes, if known.
#[derive(Debug, Default)]
pub struct Advertised {
    there: Option<BTreeSet<IpAddr>>,
}

impl Advertised {
    /// Makes the next [`set`](Self::set) read the kernel's table, unless it should be empty.
    pub fn look_again(&mut self) {
        self.there = self.there.take().filter(BTreeSet::is_empty);
    }

    /// Adds the routes to these addresses, and removes all our other routes.
    pub async fn set(&mut self, handle: &Handle, wanted: &BTreeSet<IpAddr>) -> Result<(), AdvertiseError> {
        if self.there.as_ref() == Some(wanted) {
            return Ok(());
        }
        self.there = None;
        let mut there = BTreeSet::new();
        for (ip, message) in routes().await? {
            match wanted.contains(&ip) {
                true => drop(there.insert(ip)),
                false => delete(handle, message).await?,
            }
        }
        for ip in wanted.difference(&there) {
            let made = handle.route().add(route(*ip)).replace().execute().await;
            made.map_err(AdvertiseError::new("made"))?;
        }
        self.there = Some(wanted.clone());
        Ok(())
    }
}

/// Lists our routes, a line each.
pub async fn inventory() -> Result<Vec<String>, AdvertiseError> {
    Ok(routes().await?.into_iter().map(|(ip, _)| format!("route to {ip} in table {TABLE}, blackhole")).collect())
}

/// Removes our routes.
pub async fn remove(handle: &Handle) -> Result<(), AdvertiseError> {
    Advertised::default().set(handle, &BTreeSet::new()).await
}

async fn delete(handle: &Handle, message: RouteMessage) -> Result<(), AdvertiseError> {
    match handle.route().del(message).execute().await {
        Err(error) if errno(&error) != libc::ESRCH => Err(AdvertiseError::new("removed")(error)),
        _ => Ok(()),
    }
}

/// Returns a blackhole route: the uplink's program takes packets for an egress IP before any lookup.
fn route(ip: IpAddr) -> RouteMessage {
    let length = if ip.is_ipv4() { Ipv4Addr::BITS } else { Ipv6Addr::BITS };
    let builder = RouteMessageBuilder::<IpAddr>::new().table_id(TABLE).protocol(PROTOCOL).kind(RouteType::BlackHole);
    // Only the length could be wrong, and it is the family's.
    builder.destination_prefix(ip, length as u8).unwrap_or_else(|_| RouteMessageBuilder::<IpAddr>::new()).build()
}

/// Returns our routes in both families. The connection belongs to the network namespace of the calling thread.
async fn routes() -> Result<Vec<(IpAddr, RouteMessage)>, AdvertiseError> {
    let failed = |error: std::io::Error| AdvertiseError { action: "read", message: error.to_string() };
    // With strict checks the kernel returns only routes that match the request. There may be a million other routes.
    let (connection, handle, _) = rtnetlink::new_connection_with_strict_check().map_err(failed)?;
    let mut task = JoinSet::new();
    task.spawn(connection);
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut ours = RouteMessage::default();
        ours.header.address_family = family;
        ours.header.protocol = PROTOCOL;
        ours.attributes.push(RouteAttribute::Table(TABLE));
        let mut answers = pin!(handle.route().get(ours).execute());
        loop {
            match answers.try_next().await {
                Ok(Some(message)) => found.extend(decode(&message).map(|ip| (ip, message))),
                // The table does not exist.
                Err(error) if errno(&error) == libc::ENOENT => break,
                Err(error) => return Err(AdvertiseError::new("read")(error)),
                Ok(None) => break,
            }
        }
    }
    Ok(found)
}

/// Returns the destination of a route, if the route is ours.
fn decode(message: &RouteMessage) -> Option<IpAddr> {
    let ours = message.header.protocol == PROTOCOL && table(message) == TABLE;
    let destination = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(address) => decode::ip(address),
        _ => None,
    });
    destination.filter(|_| ours)
}

fn table(message: &RouteMessage) -> u32 {
    let long =
        message.attributes.iter().find_map(|a| if let RouteAttribute::Table(table) = a { Some(*table) } else { None });
    long.unwrap_or(u32::from(message.header.table))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{Net, in_netns};

    #[test]
    fn routes_are_those_that_are_wanted_and_nobody_elses() {
        in_netns("routes_are_those_that_are_wanted_and_nobody_elses", async || {
            let net = Net::here();
            let ips = |all: &[&str]| all.iter().map(|ip| ip.parse().unwrap()).collect::<BTreeSet<IpAddr>>();
            let foreign = RouteMessageBuilder::<IpAddr>::new().table_id(TABLE).kind(RouteType::BlackHole);
            let foreign = foreign.destination_prefix("203.0.113.9".parse().unwrap(), 32).unwrap().build();
            net.handle.route().add(foreign).execute().await.unwrap();
            let mut advertised = Advertised::default();
            assert!(inventory().await.unwrap().is_empty(), "no table for IPv6 at all");
            advertised.set(&net.handle, &ips(&["203.0.113.1", "203.0.113.2", "2001:db8::1"])).await.unwrap();
            let listed = inventory().await.unwrap();
            assert_eq!(listed.len(), 3, "{listed:?}");
            assert!(listed.contains(&"route to 2001:db8::1 in table 83, blackhole".to_owned()), "{listed:?}");
            // Another agent, which knows none of the routes.
            Advertised::default().set(&net.handle, &ips(&["203.0.113.2", "203.0.113.3"])).await.unwrap();
            let expected = ["203.0.113.2", "203.0.113.3"].map(|ip| format!("route to {ip} in table 83, blackhole"));
            assert_eq!(inventory().await.unwrap(), expected);
            // Routes that somebody removed: the next read notices.
            remove(&net.handle).await.unwrap();
            assert!(inventory().await.unwrap().is_empty());
            advertised.look_again();
            advertised.set(&net.handle, &ips(&["203.0.113.1"])).await.unwrap();
            assert_eq!(inventory().await.unwrap().len(), 1);
            // If nothing is advertised, nothing is read.
            let mut idle = Advertised { there: Some(BTreeSet::new()) };
            idle.look_again();
            idle.set(&net.handle, &BTreeSet::new()).await.unwrap();
            assert_eq!(inventory().await.unwrap().len(), 1);
            let all = net.handle.route().get(RouteMessageBuilder::<Ipv4Addr>::new().build()).execute();
            let all: Vec<RouteMessage> = all.try_collect().await.unwrap();
            assert_eq!(all.iter().filter(|route| table(route) == TABLE).count(), 2, "the foreign one stays");
        });
    }
}
