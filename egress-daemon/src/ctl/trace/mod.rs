//! `egressctl trace`: the datapath's decisions about a pod's packets, live.
//!
//! While the command runs, the agent replaces the usual programs with the programs of a trace, and sends the lines that they report.
//! This module replaces numbers with names.

mod packets;
#[cfg(test)]
mod tests;

use super::{
    NodeAccess, check_node,
    dump::Dump,
    explain::addresses,
    print::{Output, PrintError, print},
};
use crate::{
    agent::trace::{HEARTBEAT, SEEN, TraceQuery},
    observe::admin,
};
use anyhow::{Context as _, Result, bail};
use egress_node::datapath::Pins;
use k8s_openapi::jiff::Timestamp;
use packets::{Names, Packets};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    str::FromStr,
    time::{Duration, Instant},
};

/// The time limit for the agent to load the programs of a trace, and to send the next line.
const PATIENCE: Duration = Duration::from_secs(30);
const _: () = assert!(PATIENCE.as_secs() > HEARTBEAT.as_secs());

/// The other end of a packet: an address, with or without a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    address: IpAddr,
    port: Option<u16>,
}

impl FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(end) = text.parse::<SocketAddr>() {
            return Ok(Self { address: end.ip(), port: Some(end.port()).filter(|port| *port != 0) });
        }
        let address =
            text.parse().map_err(|_| "write an address, with or without a port: 203.0.113.7:443".to_owned())?;
        Ok(Self { address, port: None })
    }
}

/// The options of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceOptions {
    /// `namespace/name`, or an address.
    pub pod: String,
    /// If set, only packets from and to this peer.
    pub to: Option<Peer>,
    /// The maximum number of packets.
    pub count: Option<u64>,
    /// The duration of the trace.
    pub duration: Duration,
}

/// A message besides the packets, for stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remark {
    /// Packets are reported from now on.
    Begun,
    /// This many more packets were not reported, because too many arrived at a time.
    Lost(u64),
}

/// Traces until the maximum number of packets has been shown or the duration has passed. Blocks.
pub fn trace(
    options: &TraceOptions,
    access: &NodeAccess,
    output: Output,
    mut show: impl FnMut(&str) -> io::Result<()>,
    mut remark: impl FnMut(Remark),
) -> Result<()> {
    let pins = Pins::new(&access.bpffs);
    let dump = super::dump(&pins, access, false)?;
    check_node(access, dump.own_name())?;
    let query = query(&dump, options)?;
    let lines = admin::follow(&access.socket, &path(&query)?, PATIENCE)?;
    let end = Instant::now() + options.duration;
    let mut packets = Packets::default();
    let mut names = Names::new(dump, move || Dump::read(&pins, false));
    let mut lost = 0;
    for line in lines {
        let line = line.context("the connection to the agent broke, which ended the trace")?;
        if line.is_empty() {
            remark(Remark::Begun);
        } else if let Some(seen) = line.strip_prefix(SEEN).and_then(|seen| seen.parse::<u64>().ok()) {
            // The first line of a packet may still be in flight.
            let missing = seen.saturating_sub(packets.begun());
            if missing > lost {
                remark(Remark::Lost(missing - lost));
                lost = missing;
            }
        } else if let Some(packet) = packets.take(&line, Timestamp::now(), &mut names) {
            show(&one(&packet, output)?)?;
            if options.count == Some(packet.number) {
                return Ok(());
            }
        }
        if Instant::now() >= end {
            return Ok(());
        }
    }
    bail!("the agent has exited, which ended the trace")
}

fn one(packet: &packets::Packet, output: Output) -> Result<String, PrintError> {
    Ok(match output {
        Output::Table => print(packet, output)?,
        Output::Json => serde_json::to_string(packet).unwrap_or_default() + "\n",
        Output::Yaml => format!("---\n{}", print(packet, output)?),
    })
}

/// Builds the query for the agent.
fn query(dump: &Dump, options: &TraceOptions) -> Result<TraceQuery> {
    let ips = match options.pod.parse::<IpAddr>() {
        Ok(ip) => vec![ip],
        Err(_) => addresses(dump, &options.pod)?,
    };
    let to = options.to;
    if let Some(to) = to
        && !ips.iter().any(|ip| ip.is_ipv4() == to.address.is_ipv4())
    {
        bail!("pod {} has no address of the family of {}", options.pod, to.address);
    }
    let interfaces = ips.iter().filter_map(|ip| Some(dump.endpoint(*ip)?.ifindex));
    let mut query = TraceQuery {
        ifindex: interfaces.max().unwrap_or(0),
        to: to.map(|to| to.address),
        port: to.and_then(|to| to.port),
        ..TraceQuery::default()
    };
    for ip in ips {
        match ip {
            IpAddr::V4(ip) => query.v4 = Some(ip),
            IpAddr::V6(ip) => query.v6 = Some(ip),
        }
    }
    Ok(query)
}

/// Returns the path of the HTTP request.
fn path(query: &TraceQuery) -> Result<String> {
    let serde_json::Value::Object(fields) = serde_json::to_value(query)? else { bail!("a query has fields") };
    let set = fields.iter().filter(|(_, value)| !value.is_null());
    // Numbers and addresses need no escapes.
    let pairs: Vec<String> =
        set.map(|(name, value)| format!("{name}={}", value.to_string().trim_matches('"'))).collect();
    Ok(format!("/trace?{}", pairs.join("&")))
}
