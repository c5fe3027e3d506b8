//! Which addresses are at the far ends of links: in a pod's network namespace, behind its host-side interface.
//!
//! The kernel answers this across namespaces (`IFA_TARGET_NETNSID`, Linux 4.20) for a process with CAP_NET_ADMIN there, so it does not
//! matter how a CNI forwards packets to its pods: no host routes, bridge tables or CNI files are needed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use futures::StreamExt;
use rtnetlink::Handle;
use rtnetlink::packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use tokio::task::JoinSet;

use super::decode;
use egress_core::network::links::{Link, LinkTable};

/// What was found at the far ends.
#[derive(Debug)]
pub struct FarEnds {
    handle: Handle,
    _connection: JoinSet<()>,
    known: BTreeMap<u32, BTreeSet<IpAddr>>,
}

impl FarEnds {
    /// Nothing is known yet. The connection belongs to the network namespace that the calling thread is in.
    pub fn open() -> io::Result<FarEnds> {
        // Without strict checks the kernel reads no attribute of a dump's request, and would return this namespace's
        // addresses.
        let (connection, handle, _) = rtnetlink::new_connection_with_strict_check()?;
        let mut task = JoinSet::new();
        task.spawn(connection);
        Ok(FarEnds { handle, _connection: task, known: BTreeMap::new() })
    }

    /// Looks for the addresses in `wanted` behind the links in `among`, unless they were found already. `anew`: even behind
    /// links where others were found.
    pub async fn find(&mut self, wanted: &BTreeSet<IpAddr>, links: &LinkTable, among: &BTreeSet<u32>, anew: bool) {
        self.known.retain(|index, _| among.contains(index));
        if wanted.is_subset(&self.known.values().flatten().copied().collect()) {
            return;
        }
        for link in among.iter().filter_map(|index| links.links.get(index)) {
            let known = self.known.get(&link.index).is_some_and(|known| !known.is_empty());
            if anew || !known {
                let found = self.ask(link).await;
                self.known.insert(link.index, found);
            }
        }
    }

    /// The interface that each address was found behind.
    pub fn interfaces(&self) -> BTreeMap<IpAddr, u32> {
        self.known.iter().flat_map(|(index, found)| found.iter().map(|ip| (*ip, *index))).collect()
    }

    /// The addresses at the far end of a link; none if they cannot be read.
    async fn ask(&self, link: &Link) -> BTreeSet<IpAddr> {
        let (Some(netns), Some(peer)) = (link.peer_netns, link.peer) else { return BTreeSet::new() };
        let mut message = AddressMessage::default();
        message.attributes.push(AddressAttribute::TargetNetNsId(netns));
        let mut request = NetlinkMessage::from(RouteNetlinkMessage::GetAddress(message));
        request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        let mut found = BTreeSet::new();
        let Ok(mut answers) = self.handle.clone().request(request) else { return found };
        while let Some(answer) = answers.next().await {
            if let NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewAddress(message)) = answer.payload
                && let Some((index, net, true)) = decode::address(&message)
                && index == peer
                && message.attributes.contains(&AddressAttribute::TargetNetNsId(netns))
            {
                found.insert(net.addr());
            }
        }
        // Addresses that every interface has do not identify the pod.
        found.retain(|ip| !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local()));
        found
    }
}
