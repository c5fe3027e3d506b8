//! The policy route: rules that send marked packets of pods to a table of ours, and that table.
//!
//! Of an unmarked packet the kernel looks at one rule of ours, and at none where no policy has ever selected a pod: the kernel
//! has a shorter way to look up routes while nobody has made rules. Marked packets that come in by an interface that is no
//! pod's, or that this host sends, as the tunnel's outer packets are, pass by the table.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use futures::TryStreamExt;
use rtnetlink::{
    Handle, IpVersion, RouteMessageBuilder,
    packet_route::{
        AddressFamily,
        route::{RouteAttribute, RouteMessage, RouteMetric, RouteProtocol, RouteType},
        rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
    },
};

use super::{FirewallError, Spec};
use crate::host::{netlink::errno, table::LinkTable};

/// Our routing table.
const TABLE: u32 = 0x5350;
/// By this protocol number rules and routes are known as ours.
const PROTOCOL: u8 = 0x53;
/// Priorities of the rules: behind Cilium's (9, 10), before everything else that is known.
const UNMARKED: u32 = 80;
const OUTSIDE: u32 = 81;
const LEAD: u32 = 82;
const END: u32 = 83;
/// One neighbour on the device for all destinations; the programs overwrite what the device makes of it.
const NEXT_HOP_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 83, 80);
const NEXT_HOP_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x53, 0x50);
/// Metric of the route that is left when the device goes.
const LAST: u32 = 1_000_000;

/// What matters of a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rule {
    priority: u32,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// What does not have the bit goes on behind our rules.
    Unmarked(u32),
    /// What comes in by this interface goes on behind our rules.
    Outside(String),
    /// Our table.
    Lead,
    /// Where the others go on.
    End,
    /// Something else with our protocol number.
    Other(String),
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.priority)?;
        match &self.kind {
            Kind::Unmarked(bit) => write!(f, "not fwmark {bit:#x}/{bit:#x} goto {END}"),
            Kind::Outside(name) => write!(f, "iif {name} goto {END}"),
            Kind::Lead => write!(f, "lookup {TABLE}"),
            Kind::End => f.write_str("nop"),
            Kind::Other(text) => f.write_str(text),
        }
    }
}

/// The families that the kernel has.
fn families() -> impl Iterator<Item = IpVersion> {
    let ipv6 = std::path::Path::new("/proc/sys/net/ipv6").exists();
    [IpVersion::V4].into_iter().chain(ipv6.then_some(IpVersion::V6))
}

fn wanted(spec: &Spec) -> BTreeSet<Rule> {
    let outside = spec.outside.iter().map(|name| Rule { priority: OUTSIDE, kind: Kind::Outside(name.clone()) });
    let fixed = [
        Rule { priority: UNMARKED, kind: Kind::Unmarked(spec.mark) },
        Rule { priority: LEAD, kind: Kind::Lead },
        Rule { priority: END, kind: Kind::End },
    ];
    outside.chain(fixed).collect()
}

/// Makes the rules that are missing and removes others of ours; whether there were any.
pub async fn ensure_rules(handle: &Handle, spec: &Spec) -> Result<bool, FirewallError> {
    let wanted = wanted(spec);
    let mut changed = false;
    for family in families() {
        let present = ours(handle, &family).await?;
        // The target of a jump first, what leads to our table last.
        let order = |rule: &&Rule| (rule.priority == LEAD, rule.priority != END);
        let mut missing: Vec<&Rule> = wanted.iter().filter(|rule| present.iter().all(|(r, _)| r != *rule)).collect();
        missing.sort_by_key(order);
        for rule in missing {
            changed = true;
            add(handle, &family, rule).await.map_err(FirewallError::routing("made"))?;
        }
        let mut kept = BTreeSet::new();
        for (rule, message) in present {
            if !wanted.contains(&rule) || !kept.insert(rule) {
                changed = true;
                delete(handle, message).await?;
            }
        }
    }
    Ok(changed)
}

/// Whether there is any rule of ours.
pub async fn any_rules(handle: &Handle) -> Result<bool, FirewallError> {
    for family in families() {
        if !ours(handle, &family).await?.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}

async fn add(handle: &Handle, family: &IpVersion, rule: &Rule) -> Result<(), rtnetlink::Error> {
    let mut request = handle.rule().add().priority(rule.priority);
    let message = request.message_mut();
    message.header.family = address_family(family);
    message.header.table = 0;
    message.attributes.push(RuleAttribute::Protocol(RouteProtocol::Other(PROTOCOL)));
    match &rule.kind {
        Kind::Unmarked(bit) => {
            message.header.action = RuleAction::Goto;
            message.header.flags = RuleFlags::Invert;
            let jump = [RuleAttribute::FwMark(*bit), RuleAttribute::FwMask(*bit), RuleAttribute::Goto(END)];
            message.attributes.extend(jump);
        }
        Kind::Outside(name) => {
            message.header.action = RuleAction::Goto;
            message.attributes.extend([RuleAttribute::Iifname(name.clone()), RuleAttribute::Goto(END)]);
        }
        Kind::Lead => {
            message.header.action = RuleAction::ToTable;
            message.attributes.push(RuleAttribute::Table(TABLE));
        }
        Kind::End | Kind::Other(_) => message.header.action = RuleAction::Nop,
    }
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

/// The rules of ours in a family.
async fn ours(handle: &Handle, family: &IpVersion) -> Result<Vec<(Rule, RuleMessage)>, FirewallError> {
    let all: Vec<RuleMessage> =
        handle.rule().get(family.clone()).execute().try_collect().await.map_err(FirewallError::routing("read"))?;
    Ok(all.into_iter().filter_map(|message| Some((decode(&message)?, message))).collect())
}

/// The rule, if it is one of ours.
fn decode(message: &RuleMessage) -> Option<Rule> {
    let (mut priority, mut mark, mut interface, mut goto, mut own) = (0, (0, 0), None, 0, false);
    let mut table = u32::from(message.header.table);
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Priority(p) => priority = *p,
            RuleAttribute::FwMark(bits) => mark.0 = *bits,
            RuleAttribute::FwMask(bits) => mark.1 = *bits,
            RuleAttribute::Iifname(name) => interface = Some(name.clone()),
            RuleAttribute::Goto(to) => goto = *to,
            RuleAttribute::Table(number) => table = *number,
            RuleAttribute::Protocol(protocol) => own = u8::from(*protocol) == PROTOCOL,
            _ => {}
        }
    }
    let inverted = message.header.flags.contains(RuleFlags::Invert);
    let kind = match (message.header.action, interface) {
        (RuleAction::Goto, None) if inverted && goto == END && mark.0 == mark.1 => Kind::Unmarked(mark.0),
        (RuleAction::Goto, Some(name)) if !inverted && goto == END && mark == (0, 0) => Kind::Outside(name),
        (RuleAction::ToTable, None) if table == TABLE && mark == (0, 0) => Kind::Lead,
        (RuleAction::Nop, None) => Kind::End,
        (action, _) => Kind::Other(format!("{action:?}")),
    };
    own.then_some(Rule { priority, kind })
}

/// Whether the routes seem to be there.
pub fn present(links: &LinkTable, spec: &Spec) -> bool {
    families().all(|family| {
        let ipv6 = matches!(family, IpVersion::V6);
        links.default_routes.iter().any(|r| r.ipv6 == ipv6 && r.table == TABLE && r.oif == spec.index)
    })
}

/// Makes the routes, or replaces what is different.
pub async fn replace(handle: &Handle, spec: &Spec) -> Result<(), FirewallError> {
    for family in families() {
        for message in [lead(&family, spec), last(&family)] {
            handle.route().add(message).replace().execute().await.map_err(FirewallError::routing("made"))?;
        }
    }
    Ok(())
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

/// Everything to the tunnel device.
fn lead(family: &IpVersion, spec: &Spec) -> RouteMessage {
    let mut message = builder(family).output_interface(spec.index).onlink().build();
    let hop = match family {
        IpVersion::V4 => NEXT_HOP_V4.into(),
        IpVersion::V6 => NEXT_HOP_V6.into(),
    };
    message.attributes.push(RouteAttribute::Gateway(hop));
    message.attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(spec.mtu)]));
    message
}

/// What is left when the device is gone.
fn last(family: &IpVersion) -> RouteMessage {
    builder(family).priority(LAST).kind(RouteType::BlackHole).build()
}

/// The routes of ours in a family.
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

/// Rules and routes of ours, a line each.
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

/// Removes rules and routes of ours.
pub async fn remove(handle: &Handle) -> Result<(), FirewallError> {
    for family in families() {
        for (_, message) in ours(handle, &family).await? {
            delete(handle, message).await?;
        }
        for route in routes(handle, &family).await? {
            match handle.route().del(route).execute().await {
                Err(error) if errno(&error) != libc::ESRCH => return Err(FirewallError::routing("removed")(error)),
                _ => {}
            }
        }
    }
    Ok(())
}
