//! Looks up the route to an address, and finds whether IPsec would process its packets.

use egress_core::network::Route;
use std::io;
use std::net::IpAddr;
use std::pin::pin;

use futures::TryStreamExt;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteType};
use rtnetlink::{Error, Handle, sys::protocols::NETLINK_XFRM};

use super::decode;
use crate::netlink::{DONE, ERROR, Message, exchange};

/// Asks the kernel. `None` if there is no route to the address, or the address is this node's own.
pub async fn lookup(handle: &Handle, to: IpAddr) -> Result<Option<Route>, Error> {
    let mut question = RouteMessage::default();
    let (family, length, address) = match to {
        IpAddr::V4(a) => (AddressFamily::Inet, 32, RouteAddress::Inet(a)),
        IpAddr::V6(a) => (AddressFamily::Inet6, 128, RouteAddress::Inet6(a)),
    };
    question.header.address_family = family;
    question.header.destination_prefix_length = length;
    question.attributes.push(RouteAttribute::Destination(address));
    match pin!(handle.route().get(question).execute()).try_next().await {
        Ok(answer) => Ok(answer.as_ref().and_then(route)),
        // There is no route, or a route that prohibits.
        Err(Error::NetlinkError(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn route(message: &RouteMessage) -> Option<Route> {
    if message.header.kind != RouteType::Unicast {
        return None;
    }
    let mut route = Route { oif: 0, gateway: None, mtu: None, encapsulated: false };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => route.oif = *index,
            RouteAttribute::Metrics(metrics) => {
                let mtu = |metric: &RouteMetric| if let RouteMetric::Mtu(mtu) = metric { Some(*mtu) } else { None };
                route.mtu = metrics.iter().find_map(mtu).filter(|mtu| *mtu != 0);
            }
            RouteAttribute::Encap(_) | RouteAttribute::EncapType(_) => route.encapsulated = true,
            other => route.gateway = decode::gateway(other).or(route.gateway),
        }
    }
    (route.oif != 0).then_some(route)
}

/// The destinations of an IPsec policy for outgoing packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Secured {
    /// The address family (`AF_INET`, `AF_INET6`); 0 for both.
    family: u16,
    destination: [u8; 16],
    prefix_length: u8,
}

impl Secured {
    /// Returns whether the policy covers packets to the address.
    pub fn covers(&self, to: IpAddr) -> bool {
        let (family, octets) = match to {
            IpAddr::V4(a) => (libc::AF_INET, a.octets().to_vec()),
            IpAddr::V6(a) => (libc::AF_INET6, a.octets().to_vec()),
        };
        let bit = |bytes: &[u8], i: usize| bytes.get(i / 8).map(|byte| byte >> (7 - i % 8) & 1);
        (self.family == 0 || i32::from(self.family) == family)
            && (0..usize::from(self.prefix_length)).all(|i| bit(&octets, i) == bit(&self.destination, i))
    }
}

/// `XFRM_MSG_GETPOLICY` and `XFRM_MSG_NEWPOLICY` (linux/xfrm.h).
const GET_POLICY: u16 = 0x15;
const NEW_POLICY: u16 = 0x13;
/// Length of `struct xfrm_userpolicy_id`, which a request carries.
const POLICY_ID: usize = 64;
/// Offsets in `struct xfrm_userpolicy_info`: the selector comes first.
const SELECTOR_FAMILY: usize = 40;
const SELECTOR_PREFIX: usize = 42;
const DIRECTION: usize = 160;
/// `XFRM_POLICY_OUT`.
const OUT: u8 = 1;

/// Returns the IPsec policies for outgoing packets. A kernel without IPsec has none.
pub fn secured() -> io::Result<Vec<Secured>> {
    let request = Message::new(GET_POLICY, libc::NLM_F_DUMP, &[0; POLICY_ID]).finish();
    let mut found = Vec::new();
    let answer = exchange(NETLINK_XFRM, &request, |kind, body| {
        found.extend((kind == NEW_POLICY).then(|| policy(body)).flatten());
        matches!(kind, DONE | ERROR)
    });
    match answer {
        Err(error) if error.raw_os_error() != Some(libc::EPROTONOSUPPORT) => Err(error),
        _ => Ok(found),
    }
}

/// Parses a policy. `None` if it is not for outgoing packets.
fn policy(body: &[u8]) -> Option<Secured> {
    (body.get(DIRECTION) == Some(&OUT)).then_some(())?;
    let family = u16::from_ne_bytes(*body.get(SELECTOR_FAMILY..)?.first_chunk()?);
    Some(Secured { family, destination: *body.first_chunk()?, prefix_length: *body.get(SELECTOR_PREFIX)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{Net, NetNs, in_netns};

    #[test]
    fn the_route_to_an_address_follows_the_routing_table() {
        in_netns("the_route_to_an_address_follows_the_routing_table", async || {
            let (net, other) = (Net::here(), NetNs::create());
            net.veth_into("eth0", &other, "far").await;
            net.address("eth0", "10.0.0.1/24").await;
            let eth0 = net.index("eth0").await;
            let ask = async |text: &str| lookup(&net.handle, text.parse().unwrap()).await.unwrap();
            let on_link = ask("10.0.0.9").await.unwrap();
            assert_eq!((on_link.oif, on_link.gateway, on_link.encapsulated), (eth0, None, false));
            assert_eq!(ask("192.0.2.1").await, None, "no route");
            assert_eq!(ask("10.0.0.1").await, None, "its own address");
            assert_eq!(ask("2001:db8::1").await, None);
            assert_eq!(secured().unwrap_or_default(), []);
        });
    }

    #[test]
    fn a_policy_covers_the_addresses_of_its_selector() {
        let mut destination = [0; 16];
        destination[..3].copy_from_slice(&[10, 1, 0x80]);
        let policy = Secured { family: libc::AF_INET as u16, destination, prefix_length: 17 };
        let covers = |text: &str| policy.covers(text.parse().unwrap());
        assert!(covers("10.1.128.1") && covers("10.1.255.1"));
        assert!(!covers("10.1.127.1") && !covers("2001:db8::1"));
    }
}
