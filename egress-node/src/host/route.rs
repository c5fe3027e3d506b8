//! Looks up the route to an address, and finds whether IPsec would process its packets.

use egress_core::network::Route;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::pin::pin;

use futures::TryStreamExt;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteType};
use rtnetlink::{Error, Handle};

use super::decode;

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
/// `NLMSG_ERROR` and `NLMSG_DONE` (linux/netlink.h).
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// Length of `struct nlmsghdr`.
const HEADER: usize = 16;
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
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_XFRM) };
    if fd < 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) { Ok(Vec::new()) } else { Err(error) };
    }
    // SAFETY: the descriptor was just opened and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut request = [0u8; HEADER + POLICY_ID];
    request[..4].copy_from_slice(&((HEADER + POLICY_ID) as u32).to_ne_bytes());
    request[4..6].copy_from_slice(&GET_POLICY.to_ne_bytes());
    request[6..8].copy_from_slice(&((libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16).to_ne_bytes());
    // SAFETY: the buffer is valid for its length.
    let sent = unsafe { libc::send(socket.as_raw_fd(), request.as_ptr().cast(), request.len(), 0) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut buffer = [0u8; 32_768];
    loop {
        // SAFETY: the buffer is valid for its length.
        let length = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        if length < 0 {
            return Err(io::Error::last_os_error());
        }
        if !policies(&buffer[..length as usize], &mut found)? {
            return Ok(found);
        }
    }
}

/// Reads the messages of one answer. Returns whether more answers follow.
fn policies(mut answer: &[u8], found: &mut Vec<Secured>) -> io::Result<bool> {
    while let Some((header, _)) = answer.split_at_checked(HEADER) {
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        let Some(body) = answer.get(HEADER..length) else { return Err(io::ErrorKind::InvalidData.into()) };
        match kind {
            NEW_POLICY if body.get(DIRECTION) == Some(&OUT) => {
                let family = u16::from_ne_bytes([body[SELECTOR_FAMILY], body[SELECTOR_FAMILY + 1]]);
                let mut destination = [0; 16];
                destination.copy_from_slice(&body[..16]);
                found.push(Secured { family, destination, prefix_length: body[SELECTOR_PREFIX] });
            }
            NEW_POLICY => {}
            // Both message types begin with a negative error number, or zero.
            DONE | ERROR => {
                let number = body.first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
                return if number < 0 { Err(io::Error::from_raw_os_error(-number)) } else { Ok(false) };
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        answer = answer.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(true)
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
    fn error_answer_is_not_taken_for_the_end_of_the_policies() {
        let message = |kind: u16, body: &[u8]| {
            let length = ((HEADER + body.len()) as u32).to_ne_bytes();
            [&length[..], &kind.to_ne_bytes(), &[0; 10], body].concat()
        };
        let mut policy = [0u8; DIRECTION + 8];
        (policy[DIRECTION], policy[SELECTOR_PREFIX]) = (OUT, 8);
        let read = |messages: &[Vec<u8>]| {
            let mut found = Vec::new();
            policies(&messages.concat(), &mut found).map(|more| (more, found.len())).map_err(|e| e.raw_os_error())
        };
        let (one, end) = (message(NEW_POLICY, &policy), message(DONE, &0i32.to_ne_bytes()));
        assert_eq!(read(std::slice::from_ref(&one)), Ok((true, 1)));
        assert_eq!(read(&[one.clone(), end]), Ok((false, 1)));
        for kind in [ERROR, DONE] {
            let refused = message(kind, &(-libc::EPERM).to_ne_bytes());
            assert_eq!(read(&[one.clone(), refused]), Err(Some(libc::EPERM)));
        }
        assert_eq!(read(&[one[..HEADER + 8].to_vec()]), Err(None), "it is cut off");
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
