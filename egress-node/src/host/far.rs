//! Finds the addresses at the far ends of links: in a pod's network namespace, behind its host-side interface.
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

/// At most this many addresses of one link are read: a pod that may change its own interface could give it millions.
const MOST_ADDRESSES: usize = 64;

/// The addresses found at the far ends.
#[derive(Debug)]
pub struct FarEnds {
    handle: Handle,
    _connection: JoinSet<()>,
    known: BTreeMap<u32, BTreeSet<IpAddr>>,
}

impl FarEnds {
    /// Starts without any known address. The connection belongs to the network namespace of the calling thread.
    pub fn open() -> io::Result<FarEnds> {
        // Without strict checks the kernel ignores the attributes of a dump request, and would return this namespace's addresses.
        let (connection, handle, _) = rtnetlink::new_connection_with_strict_check()?;
        let mut task = JoinSet::new();
        task.spawn(connection);
        Ok(FarEnds { handle, _connection: task, known: BTreeMap::new() })
    }

    /// Opens a new connection, because the old one is still receiving a dump.
    fn reopen(&mut self) {
        match Self::open() {
            Ok(fresh) => *self = Self { known: std::mem::take(&mut self.known), ..fresh },
            Err(error) => tracing::error!("netlink: {error}"),
        }
    }

    /// Looks for the addresses in `wanted` behind those links in `among` where no address was found before. Asks each such link, because an
    /// address may be behind another link as well. With `anew`, also asks the other links if any address is not known.
    pub async fn find(&mut self, wanted: &BTreeSet<IpAddr>, links: &LinkTable, among: &BTreeSet<u32>, anew: bool) {
        self.known.retain(|index, _| among.contains(index));
        if wanted.is_empty() {
            return;
        }
        let anew = anew && !wanted.is_subset(&self.known.values().flatten().copied().collect());
        for link in among.iter().filter_map(|index| links.links.get(index)) {
            let known = self.known.get(&link.index).is_some_and(|known| !known.is_empty());
            if anew || !known {
                let found = self.ask(link).await;
                self.known.insert(link.index, found);
            }
        }
    }

    /// Returns the interfaces that each address was found behind. There may be several: a pod that may change its own interface can give it
    /// another pod's address.
    pub fn interfaces(&self) -> BTreeMap<IpAddr, BTreeSet<u32>> {
        let mut interfaces: BTreeMap<IpAddr, BTreeSet<u32>> = BTreeMap::new();
        for (index, found) in &self.known {
            for ip in found {
                interfaces.entry(*ip).or_default().insert(*index);
            }
        }
        interfaces
    }

    /// Returns the addresses at the far end of a link; none if they cannot be read.
    async fn ask(&mut self, link: &Link) -> BTreeSet<IpAddr> {
        let (Some(netns), Some(peer)) = (link.peer_netns, link.peer) else { return BTreeSet::new() };
        let mut message = AddressMessage::default();
        message.header.index = peer;
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
            if found.len() == MOST_ADDRESSES {
                tracing::warn!("reading only {MOST_ADDRESSES} addresses at the far end of {}", link.name);
                self.reopen();
                break;
            }
        }
        // Addresses that every interface has do not identify the pod.
        found.retain(|ip| !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local()));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::links::{Links, LinksOptions};
    use crate::host::testing::{Net, NetNs, in_netns};

    async fn found(far: &mut FarEnds, wanted: &[&str], among: &[u32], anew: bool) -> BTreeMap<IpAddr, BTreeSet<u32>> {
        let links = Links::follow(LinksOptions::default()).await.unwrap().current();
        let wanted = wanted.iter().map(|ip| ip.parse().unwrap()).collect();
        far.find(&wanted, &links, &among.iter().copied().collect(), anew).await;
        far.interfaces()
    }

    /// Creates two pods. Returns their namespaces, and the indices of the links to them.
    async fn two_pods() -> ([NetNs; 2], Vec<u32>) {
        let (net, pods) = (Net::here(), [NetNs::create(), NetNs::create()]);
        let mut indices = Vec::new();
        for (name, pod) in ["veth0", "veth1"].into_iter().zip(&pods) {
            net.veth_into(name, pod, "eth0").await;
            indices.push(net.index(name).await);
        }
        (pods, indices)
    }

    #[test]
    fn an_address_is_found_behind_all_links_that_have_it() {
        in_netns("an_address_is_found_behind_all_links_that_have_it", async || {
            let (pods, indices) = two_pods().await;
            let add =
                |pod: &NetNs, address: &'static str| pod.run(|| async { Net::here().address("eth0", address).await });
            let ip: IpAddr = "10.0.0.1".parse().unwrap();
            let mut far = FarEnds::open().unwrap();
            add(&pods[0], "10.0.0.1/24");
            assert_eq!(found(&mut far, &["10.0.0.1"], &indices, false).await, [(ip, [indices[0]].into())].into());
            // The link had no address at the first request.
            add(&pods[1], "10.0.0.1/24");
            assert_eq!(found(&mut far, &["10.0.0.1"], &indices, false).await[&ip], indices.iter().copied().collect());
            add(&pods[1], "10.0.0.2/24");
            let other: IpAddr = "10.0.0.2".parse().unwrap();
            assert!(
                !found(&mut far, &["10.0.0.2"], &indices, false).await.contains_key(&other),
                "it was asked already"
            );
            assert_eq!(found(&mut far, &["10.0.0.2"], &indices, true).await[&other], [indices[1]].into());
        });
    }

    #[test]
    fn a_link_with_very_many_addresses_does_not_hide_others() {
        in_netns("a_link_with_very_many_addresses_does_not_hide_others", async || {
            let (pods, indices) = two_pods().await;
            pods[0].run(|| async {
                let net = Net::here();
                for i in 0..1_000u16 {
                    let [high, low] = i.to_be_bytes();
                    net.address("eth0", &format!("10.1.{high}.{low}/32")).await;
                }
            });
            pods[1].run(|| async { Net::here().address("eth0", "10.0.0.1/24").await });
            let mut far = FarEnds::open().unwrap();
            let found = found(&mut far, &["10.0.0.1"], &indices, false).await;
            let ip: IpAddr = "10.0.0.1".parse().unwrap();
            assert_eq!((found.len(), &found[&ip]), (MOST_ADDRESSES + 1, &[indices[1]].into()));
        });
    }
}
