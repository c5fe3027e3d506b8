//! The shaper: a pair of veth devices that exists while this node owns an egress IP with limited bandwidth. The near end has an HTB qdisc
//! with a class for each such egress IP and direction. Packets that enter it come out of the far end at the rate of their class. No other
//! traffic of the node passes through it, and no interface of the node gets another qdisc.

use std::collections::BTreeMap;
use std::pin::pin;

use futures::{StreamExt, TryStreamExt};
use rtnetlink::packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::link::{LinkAttribute, LinkMessage};
use rtnetlink::packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption};
use rtnetlink::{Error, Handle, LinkUnspec, LinkVeth};

use super::decode;
use super::netlink::errno;
use super::sysctl::{self, tunnel_settings};
use egress_common::abi::SHAPER_HANDLE;
use egress_core::agent::machine::ShaperEnds;
use egress_core::network::links::LinkKind;

/// The name of the end that packets enter.
pub const NEAR: &str = "spillway-bw0";
/// The name of the end that packets come out of.
pub const FAR: &str = "spillway-bw1";
/// The alias that identifies a device that we made.
const ALIAS: &str = "spillway bandwidth";
/// No packet is too large for the shaper.
const MTU: u32 = 65_535;
/// The number of packets that may wait in a class. The programs count bytes, and drop earlier.
const QUEUE_PACKETS: u32 = 1_000_000;

/// Attributes of HTB (`TCA_HTB_*` of linux/pkt_sched.h).
const PARMS: u16 = 1;
const INIT: u16 = 2;
const RATE64: u16 = 6;
const CEIL64: u16 = 7;
/// `TC_LINKLAYER_ETHERNET`: the kernel computes transmission times itself, without a table of ours.
const ETHERNET: u8 = 1;
/// Nanoseconds per unit of a burst (`PSCHED_SHIFT`).
const TICK_NS: u64 = 64;

/// The rate of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Bits per second of Ethernet frames, without preamble and checksum.
    pub bits: u64,
    /// Bytes that may pass in a burst.
    pub burst: u64,
}

/// Why bandwidths are not limited.
#[derive(Debug, thiserror::Error)]
pub enum ShaperError {
    /// A foreign device has the name.
    #[error("the name {0} is taken by a device that Spillway did not make: remove it (`ip link del {0}`)")]
    NameTaken(String),
    /// The kernel refused.
    #[error("cannot {action}: {message}; bandwidths of egress IPs are not limited on this node until this succeeds")]
    Netlink {
        /// The attempted action.
        action: String,
        /// The kernel's answer.
        message: String,
    },
}

/// The shaper of this node.
#[derive(Debug, Default)]
pub struct Shaper {
    ends: Option<ShaperEnds>,
    classes: BTreeMap<u16, Rate>,
}

impl Shaper {
    /// Returns the devices, if they exist.
    pub fn ends(&self) -> Option<ShaperEnds> {
        self.ends
    }

    /// Ensures that the devices exist and are up, with their qdisc.
    pub async fn ensure(&mut self, handle: &Handle) -> Result<ShaperEnds, ShaperError> {
        let found = find(handle).await?;
        if let (Some(ends), true) = (found, found == self.ends) {
            return Ok(ends);
        }
        self.classes.clear();
        self.ends = None;
        if found.is_none() {
            let pair = LinkVeth::new(NEAR, FAR).mtu(MTU).txqueuelen(QUEUE_PACKETS).build();
            let made = handle.link().add(pair).execute().await;
            made.map_err(|error| failed(format!("make the devices {NEAR} and {FAR}"), &error))?;
        }
        for name in [NEAR, FAR] {
            for warning in sysctl::apply_to_own_device(&tunnel_settings(name)) {
                tracing::debug!("{}: {}", warning.object, warning.message);
            }
            let up = LinkUnspec::new_with_name(name).mtu(MTU).arp(false).alias(ALIAS).up().build();
            let changed = handle.link().change(up).execute().await;
            changed.map_err(|error| failed(format!("set up the device {name}"), &error))?;
        }
        let Some(ends) = find(handle).await? else {
            return Err(ShaperError::Netlink { action: format!("keep {NEAR}"), message: "somebody removed it".into() });
        };
        match request(handle, RouteNetlinkMessage::NewQueueDiscipline(qdisc(ends.near)), NLM_F_EXCL).await {
            Err(error) if errno(&error) != libc::EEXIST => Err(failed(format!("give {NEAR} an HTB qdisc"), &error)),
            _ => {
                self.ends = Some(ends);
                Ok(ends)
            }
        }
    }

    /// Sets the rates of the classes (by minor number). Other classes stay as they are: no packets enter them.
    pub async fn set(&mut self, handle: &Handle, wanted: &BTreeMap<u16, Rate>) -> Result<(), ShaperError> {
        let Some(ends) = self.ends else { return Ok(()) };
        for (minor, rate) in wanted {
            if self.classes.get(minor) == Some(rate) {
                continue;
            }
            let message = RouteNetlinkMessage::NewTrafficClass(class(ends.near, *minor, *rate));
            let set = request(handle, message, NLM_F_REPLACE).await;
            set.map_err(|error| failed(format!("set class {minor} of {NEAR} to {} bit/s", rate.bits), &error))?;
            self.classes.insert(*minor, *rate);
        }
        Ok(())
    }

    /// Removes the devices. Packets that wait in them are lost.
    pub async fn remove(&mut self, handle: &Handle) -> Result<(), ShaperError> {
        (self.ends, self.classes) = (None, BTreeMap::new());
        delete(handle).await.map(drop)
    }
}

/// Removes the devices. Returns false if none of them was ours.
pub async fn delete(handle: &Handle) -> Result<bool, ShaperError> {
    let Some(ends) = find(handle).await? else { return Ok(false) };
    match handle.link().del(ends.near).execute().await {
        Ok(()) => Ok(true),
        Err(error) if errno(&error) == libc::ENODEV => Ok(false),
        Err(error) => Err(failed(format!("remove {NEAR}"), &error)),
    }
}

/// Returns the existing devices. A foreign device with the name is an error. An agent may have been killed between creating the devices and
/// marking them: two devices with these names that are each other's peers are ours.
pub async fn find(handle: &Handle) -> Result<Option<ShaperEnds>, ShaperError> {
    let (near, far) = (get(handle, NEAR).await?, get(handle, FAR).await?);
    let marked = |message: &LinkMessage| {
        let alias = |attribute: &LinkAttribute| matches!(attribute, LinkAttribute::IfAlias(alias) if alias == ALIAS);
        message.attributes.iter().any(alias)
    };
    let leads_to = |from: &LinkMessage, to: &LinkMessage| {
        decode::link(from).is_some_and(|l| l.kind == LinkKind::Veth && l.below() == Some(to.header.index))
    };
    let ours = |near: &LinkMessage, far: &LinkMessage| {
        marked(near) || marked(far) || leads_to(near, far) && leads_to(far, near)
    };
    match (near, far) {
        (Some(near), Some(far)) if ours(&near, &far) => {
            Ok(Some(ShaperEnds { near: near.header.index, far: far.header.index }))
        }
        (None, None) => Ok(None),
        (Some(_), _) => Err(ShaperError::NameTaken(NEAR.to_owned())),
        (None, Some(_)) => Err(ShaperError::NameTaken(FAR.to_owned())),
    }
}

async fn get(handle: &Handle, name: &str) -> Result<Option<LinkMessage>, ShaperError> {
    match pin!(handle.link().get().match_name(name).execute()).try_next().await {
        Ok(message) => Ok(message),
        Err(error) if errno(&error) == libc::ENODEV => Ok(None),
        Err(error) => Err(failed(format!("look for {name}"), &error)),
    }
}

async fn request(handle: &Handle, message: RouteNetlinkMessage, flags: u16) -> Result<(), Error> {
    let mut request = NetlinkMessage::from(message);
    request.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | flags;
    let mut handle = handle.clone();
    let mut answers = handle.request(request)?;
    while let Some(answer) = answers.next().await {
        if let NetlinkPayload::Error(error) = answer.payload
            && error.code.is_some()
        {
            return Err(Error::NetlinkError(error));
        }
    }
    Ok(())
}

fn failed(action: String, error: &Error) -> ShaperError {
    ShaperError::Netlink { action, message: error.to_string() }
}

fn htb(index: u32, options: Vec<DefaultNla>) -> TcMessage {
    let mut message = TcMessage::with_index(index as i32);
    message.attributes.push(TcAttribute::Kind("htb".to_owned()));
    message.attributes.push(TcAttribute::Options(options.into_iter().map(TcOption::Other).collect()));
    message
}

/// Returns the root qdisc. Packets without a class, of which there are none, would pass immediately.
fn qdisc(index: u32) -> TcMessage {
    // struct tc_htb_glob: version, divisor for quanta, default class, debug flags, a counter.
    let init: Vec<u8> = [3u32, 10, 0, 0, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
    let mut message = htb(index, vec![DefaultNla::new(INIT, init)]);
    message.header.handle = TcHandle { major: SHAPER_HANDLE, minor: 0 };
    message.header.parent = TcHandle::ROOT;
    message
}

fn class(index: u32, minor: u16, rate: Rate) -> TcMessage {
    let bytes = (rate.bits / 8).max(1);
    let narrow = u32::try_from(bytes).unwrap_or(u32::MAX);
    let ticks = u128::from(rate.burst) * 1_000_000_000 / u128::from(bytes) / u128::from(TICK_NS);
    let ticks = u32::try_from(ticks).unwrap_or(u32::MAX);
    // struct tc_ratespec: logarithm of the cell, link layer, overhead, alignment, minimum size; then the rate.
    let mut spec = vec![0, ETHERNET, 0, 0, 0, 0, 0, 0];
    spec.extend(narrow.to_ne_bytes());
    // struct tc_htb_opt: rate, ceiling, both bursts, then the quantum, the level and the priority.
    let mut parms = [spec.clone(), spec].concat();
    parms.extend([ticks, ticks, MTU, 0, 0].into_iter().flat_map(u32::to_ne_bytes));
    let mut options = vec![DefaultNla::new(PARMS, parms)];
    if u64::from(narrow) != bytes {
        options.extend([RATE64, CEIL64].map(|kind| DefaultNla::new(kind, bytes.to_ne_bytes().to_vec())));
    }
    let mut message = htb(index, options);
    message.header.handle = TcHandle { major: SHAPER_HANDLE, minor };
    message.header.parent = TcHandle { major: SHAPER_HANDLE, minor: 0 };
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{Net, in_netns};

    #[test]
    fn the_shaper_is_made_changed_adopted_and_removed() {
        in_netns("the_shaper_is_made_changed_adopted_and_removed", async || {
            let net = Net::here();
            let mut shaper = Shaper::default();
            let ends = shaper.ensure(&net.handle).await.unwrap();
            let rate = Rate { bits: 100_000_000, burst: 1_250_000 };
            shaper.set(&net.handle, &[(3, rate), (4, rate)].into()).await.unwrap();
            let fast = Rate { bits: 80_000_000_000, burst: 1 << 32 };
            shaper.set(&net.handle, &[(3, fast)].into()).await.unwrap();
            assert_eq!(shaper.ensure(&net.handle).await.unwrap(), ends);
            let mut next = Shaper::default();
            assert_eq!(next.ensure(&net.handle).await.unwrap(), ends, "another agent adopts it");
            next.set(&net.handle, &[(3, rate)].into()).await.unwrap();
            next.remove(&net.handle).await.unwrap();
            assert_eq!(find(&net.handle).await.unwrap(), None);
            assert!(!delete(&net.handle).await.unwrap());
        });
    }

    #[test]
    fn devices_that_were_not_marked_yet_are_adopted_and_others_are_not() {
        in_netns("devices_that_were_not_marked_yet_are_adopted_and_others_are_not", async || {
            let net = Net::here();
            net.veth(NEAR, FAR).await;
            let mut shaper = Shaper::default();
            let ends = shaper.ensure(&net.handle).await.unwrap();
            assert_eq!((ends.near, ends.far), (net.index(NEAR).await, net.index(FAR).await));
            shaper.remove(&net.handle).await.unwrap();
            net.veth(NEAR, "stranger0").await;
            net.veth(FAR, "stranger1").await;
            assert!(matches!(shaper.ensure(&net.handle).await, Err(ShaperError::NameTaken(_))));
        });
    }
}
