//! The policy route of a node without a default route: our own table, and a rule after all others that sends marked packets without another
//! route to that table. The lack of a default route is a reason to have gateways.
//!
//! Nothing is created if there is a default route: the kernel looks up routes faster without custom rules.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use futures::TryStreamExt;
use rtnetlink::{
    Handle, IpVersion, RouteMessageBuilder,
    packet_route::{
        AddressFamily,
        route::{RouteAttribute, RouteMessage, RouteProtocol, RouteType},
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};

use super::{FirewallError, Spec};
use crate::host::netlink::errno;
use egress_core::network::links::LinkTable;

/// Our routing table.
const TABLE: u32 = 0x5350;
/// The protocol number that identifies rules and routes as ours.
const PROTOCOL: u8 = 0x53;
/// The rule's priority: after the kernel's rules, the last of which is 32767.
const BEHIND: u32 = 0x9350;
/// One neighbour on the device for all destinations; the programs overwrite the header that the device writes for it.
const NEXT_HOP_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 83, 80);
const NEXT_HOP_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x53, 0x50);

/// The relevant content of one of our rules.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    /// Sends packets with the bit to our table.
    Lead(u32),
    /// Another rule with our protocol number, of an older agent: its priority and its action.
    Other(u32, String),
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rule::Lead(bit) => write!(f, "{BEHIND}: fwmark {bit:#x}/{bit:#x} lookup {TABLE}"),
            Rule::Other(priority, text) => write!(f, "{priority}: {text}"),
        }
    }
}

/// Returns the families that the kernel has.
pub fn families() -> impl Iterator<Item = IpVersion> {
    let ipv6 = std::path::Path::new("/proc/sys/net/ipv6").exists();
    [IpVersion::V4].into_iter().chain(ipv6.then_some(IpVersion::V6))
}

/// Returns whether the family has a default route that is not ours.
pub fn has_default(links: &LinkTable, family: &IpVersion) -> bool {
    links.default_routes.iter().any(|route| route.ipv6 == is_ipv6(family) && route.table != TABLE)
}

fn is_ipv6(family: &IpVersion) -> bool {
    matches!(family, IpVersion::V6)
}

/// Creates the route and the rule of a family, or without a `spec` removes them. Returns whether anything changed. With `anew`, the route
/// may differ from the one before.
pub async fn ensure(
    handle: &Handle,
    links: &LinkTable,
    family: &IpVersion,
    spec: Option<&Spec>,
    anew: bool,
) -> Result<bool, FirewallError> {
    let mut changed = false;
    let there = links.default_routes.iter().any(|route| route.ipv6 == is_ipv6(family) && route.table == TABLE);
    // The route comes before the rule that refers to it.
    if let Some(spec) = spec
        && (anew || !there)
    {
        handle.route().add(lead(family, spec)).replace().execute().await.map_err(FirewallError::routing("made"))?;
        changed = true;
    }
    let wanted = spec.map(|spec| Rule::Lead(spec.mark));
    let mut kept = false;
    for (rule, message) in ours(handle, family).await? {
        if wanted.as_ref() == Some(&rule) && !kept {
            kept = true;
        } else {
            delete(handle, message).await?;
            changed = true;
        }
    }
    if let Some(Rule::Lead(bit)) = wanted
        && !kept
    {
        add(handle, family, bit).await.map_err(FirewallError::routing("made"))?;
        changed = true;
    }
    if spec.is_none() && there {
        remove_routes(handle, family).await?;
        changed = true;
    }
    Ok(changed)
}

/// Returns whether any of our rules exists.
pub async fn any_rules(handle: &Handle) -> Result<bool, FirewallError> {
    for family in families() {
        if !ours(handle, &family).await?.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}

async fn add(handle: &Handle, family: &IpVersion, bit: u32) -> Result<(), rtnetlink::Error> {
    let mut request = handle.rule().add().priority(BEHIND);
    let message = request.message_mut();
    message.header.family = address_family(family);
    message.header.table = 0;
    message.header.action = RuleAction::ToTable;
    message.attributes.extend([
        RuleAttribute::Protocol(RouteProtocol::Other(PROTOCOL)),
        RuleAttribute::FwMark(bit),
        RuleAttribute::FwMask(bit),
        RuleAttribute::Table(TABLE),
    ]);
    match request.execute().await {
        Err(error) if errno(&error) == libc::EEXIST => Ok(()),
        result => result,
    }
}

async fn delete(handle: &Handle, message: RuleMessage) -> Result<(), FirewallError> {
    match handle.rule().del(message).execute().await {
        Err(error) if errno(&error) != libc::ENOENT => Err(FirewallError::routing("removed")(error)),
        _ => Ok(()),
    }
}

fn address_family(family: &IpVersion) -> AddressFamily {
    match family {
        IpVersion::V4 => AddressFamily::Inet,
        IpVersion::V6 => AddressFamily::Inet6,
    }
}

/// Returns our rules in a family.
async fn ours(handle: &Handle, family: &IpVersion) -> Result<Vec<(Rule, RuleMessage)>, FirewallError> {
    let all: Vec<RuleMessage> =
        handle.rule().get(family.clone()).execute().try_collect().await.map_err(FirewallError::routing("read"))?;
    Ok(all.into_iter().filter_map(|message| Some((decode(&message)?, message))).collect())
}

/// Decodes a rule, if it is ours.
fn decode(message: &RuleMessage) -> Option<Rule> {
    let (mut priority, mut mark, mut own) = (0, (0, 0), false);
    let mut table = u32::from(message.header.table);
    let mut others = false;
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Priority(p) => priority = *p,
            RuleAttribute::FwMark(bits) => mark.0 = *bits,
            RuleAttribute::FwMask(bits) => mark.1 = *bits,
            RuleAttribute::Iifname(_) | RuleAttribute::Goto(_) => others = true,
            RuleAttribute::Table(number) => table = *number,
            RuleAttribute::Protocol(protocol) => own = u8::from(*protocol) == PROTOCOL,
            _ => {}
        }
    }
    let lead = message.header.action == RuleAction::ToTable && table == TABLE && mark.0 == mark.1 && mark.0 != 0;
    let rule = if lead && !others && message.header.flags.is_empty() && priority == BEHIND {
        Rule::Lead(mark.0)
    } else {
        Rule::Other(priority, format!("{:?}", message.header.action))
    };
    own.then_some(rule)
}

fn builder(family: &IpVersion) -> RouteMessageBuilder<IpAddr> {
    let any: IpAddr = match family {
        IpVersion::V4 => Ipv4Addr::UNSPECIFIED.into(),
        IpVersion::V6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    let builder = RouteMessageBuilder::<IpAddr>::new().table_id(TABLE).protocol(RouteProtocol::Other(PROTOCOL));
    // A prefix of length 0 fits every family.
    builder.destination_prefix(any, 0).unwrap_or_else(|_| RouteMessageBuilder::<IpAddr>::new())
}

/// Returns the route that sends everything to the tunnel device.
fn lead(family: &IpVersion, spec: &Spec) -> RouteMessage {
    let mut message = builder(family).output_interface(spec.index).onlink().build();
    let hop = match family {
        IpVersion::V4 => NEXT_HOP_V4.into(),
        IpVersion::V6 => NEXT_HOP_V6.into(),
    };
    message.attributes.push(RouteAttribute::Gateway(hop));
    message
}

/// Returns our routes in a family.
async fn routes(handle: &Handle, family: &IpVersion) -> Result<Vec<RouteMessage>, FirewallError> {
    let all = match family {
        IpVersion::V4 => RouteMessageBuilder::<Ipv4Addr>::new().build(),
        IpVersion::V6 => RouteMessageBuilder::<Ipv6Addr>::new().build(),
    };
    let all: Vec<RouteMessage> =
        handle.route().get(all).execute().try_collect().await.map_err(FirewallError::routing("read"))?;
    let ours = |message: &RouteMessage| {
        let table = message.attributes.iter().any(|a| matches!(a, RouteAttribute::Table(TABLE)));
        table && message.header.protocol == RouteProtocol::Other(PROTOCOL)
    };
    Ok(all.into_iter().filter(ours).collect())
}

/// Lists our rules and routes, a line each.
pub async fn inventory(handle: &Handle) -> Result<Vec<String>, FirewallError> {
    let mut lines = Vec::new();
    for family in families() {
        let name = if matches!(family, IpVersion::V4) { "IPv4" } else { "IPv6" };
        lines.extend(ours(handle, &family).await?.iter().map(|(rule, _)| format!("{name} rule {rule}")));
        for route in routes(handle, &family).await? {
            let device = route.attributes.iter().any(|a| matches!(a, RouteAttribute::Oif(_)));
            let kind =
                if device && route.header.kind == RouteType::Unicast { "to the tunnel device" } else { "blackhole" };
            lines.push(format!("{name} route default in table {TABLE}, {kind}"));
        }
    }
    Ok(lines)
}

/// Removes our rules and routes.
pub async fn remove(handle: &Handle) -> Result<(), FirewallError> {
    for family in families() {
        for (_, message) in ours(handle, &family).await? {
            delete(handle, message).await?;
        }
        remove_routes(handle, &family).await?;
    }
    Ok(())
}

async fn remove_routes(handle: &Handle, family: &IpVersion) -> Result<(), FirewallError> {
    for route in routes(handle, family).await? {
        match handle.route().del(route).execute().await {
            Err(error) if errno(&error) != libc::ESRCH => return Err(FirewallError::routing("removed")(error)),
            _ => {}
        }
    }
    Ok(())
}
