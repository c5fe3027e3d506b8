//! Networks of the cluster that no object names. A network that an address of a pod or of the API server's Service reveals is left alone,
//! as large as it may be, and reported: policies apply only to what is known to be outside. Pure.

use super::facts::Facts;
use crate::{model::Family, network::pods::PodCidrs};
use ipnet::IpNet;
use std::{collections::BTreeMap, net::IpAddr, time::Duration};

/// kube-apiserver allows no service network with more than this many host bits.
const SERVICE_BITS: u32 = 20;
/// How long the controller may take to report a pod. Not shorter: a network that is left alone for a moment severs connections.
const TOLD_AFTER: Duration = Duration::from_secs(10);
/// The length of the network around a pod's address that may belong to pods, IPv4 and IPv6: CNIs give nodes blocks of about this size.
const AROUND: [u8; 2] = [24, 64];

/// Networks that no object names, each with the evidence and the remedy.
pub type Networks = BTreeMap<IpNet, String>;

/// Since when each pod address of this node has been in no network that an object names.
#[derive(Clone, Debug, Default)]
pub struct Unnamed {
    pods: BTreeMap<IpAddr, Duration>,
}

impl Unnamed {
    /// Updates the state, and returns the networks that may be the cluster's although no object names them.
    pub fn update(&mut self, is: &Facts) -> Networks {
        let cidrs = PodCidrs::of(&is.objects.snapshot);
        let told = |ip: IpAddr| {
            cidrs.have(ip)
                || is.objects.snapshot.pod_networks.iter().chain(&is.except_cidrs).any(|net| net.contains(&ip))
        };
        let own = is.objects.snapshot.endpoints.values().filter(|pod| pod.node == is.node);
        let unnamed = own.flat_map(|pod| pod.ips.iter().copied()).filter(|ip| !told(*ip));
        self.pods = unnamed.map(|ip| (ip, self.pods.get(&ip).copied().unwrap_or(is.now))).collect();
        let late = self.pods.iter().filter(|(_, since)| is.now.saturating_sub(**since) >= TOLD_AFTER);
        late.map(|(ip, _)| around_pod(*ip)).chain(services(is)).collect()
    }
}

/// Returns the network around a pod's address, with the evidence and the remedy.
fn around_pod(ip: IpAddr) -> (IpNet, String) {
    let message = format!(
        "the address {ip} of a pod is in no network that a Node, a CNI, the controller or exceptCIDRs names: check that a controller \
         is running (EgressNode.spec.podNetworks), or add the pods' network to exceptCIDRs"
    );
    (net(ip, AROUND[usize::from(ip.is_ipv6())]), message)
}

/// Returns the largest service network whose second address is that of the API server's Service, which is always the second, if no
/// ServiceCIDR and no setting of the administrator has that address. `None` if it is a node's address and no Service's.
fn services(is: &Facts) -> Option<(IpNet, String)> {
    let service = is.api_server?;
    let named = is.except_cidrs.iter().filter(|net| **net != service);
    let of_nodes = is.objects.snapshot.nodes.values().flat_map(|node| node.addresses.iter().copied().map(IpNet::from));
    let known = named.copied().chain(of_nodes).any(|net| net.contains(&service));
    if known || !is.objects.snapshot.services.is_empty() {
        return None;
    }
    let address = service.addr();
    let free = Family::bits(address).wrapping_sub(1).trailing_zeros().min(SERVICE_BITS);
    let message = format!(
        "the network of Services is unknown: the cluster has no ServiceCIDR, and exceptCIDRs does not contain {address}, the Service of \
         the API server; add the cluster's service network to exceptCIDRs"
    );
    Some((net(address, u8::try_from(Family::of(address).width() - free).unwrap_or(service.prefix_len())), message))
}

/// Returns the network of this length that contains an address.
fn net(address: IpAddr, length: u8) -> IpNet {
    IpNet::new(address, length).map_or_else(|_| address.into(), |net| net.trunc())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        agent::facts::Objects,
        model::{Endpoint, EndpointId, NodeName, Snapshot},
        testing::world::node,
    };
    use std::sync::Arc;

    fn parse(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    /// Returns the unnamed networks of a node with a pod, at a time.
    fn at(
        unnamed: &mut Unnamed,
        snapshot: &Snapshot,
        excepts: &[IpNet],
        api: Option<IpNet>,
        seconds: u64,
    ) -> Vec<IpNet> {
        let now = Duration::from_secs(seconds);
        let objects = Arc::new(Objects { snapshot: snapshot.clone(), ..Objects::default() });
        let (node, except_cidrs) = ("me".into(), excepts.to_vec());
        let facts = Facts { node, objects, except_cidrs, api_server: api, now, ..Facts::default() };
        unnamed.update(&facts).into_keys().collect()
    }

    fn snapshot(ips: &[&str]) -> Snapshot {
        let mut snapshot = Snapshot::default();
        snapshot.nodes.insert("me".into(), node("me", Default::default()));
        let id = EndpointId::new("default", "pod", "");
        let ips = ips.iter().map(|ip| ip.parse().unwrap()).collect();
        snapshot.endpoints.insert(id.clone(), Endpoint { id, node: "me".into(), ips, labels: Default::default() });
        snapshot
    }

    #[test]
    fn the_assumed_service_network_is_the_largest_that_can_begin_at_the_api_servers_address() {
        let around = |service: &str| {
            let service = IpNet::from(service.parse::<IpAddr>().unwrap());
            // The agent itself excepts the API server's Service.
            let found = at(&mut Unnamed::default(), &Snapshot::default(), &[service], Some(service), 0);
            found.into_iter().map(|net| net.to_string()).collect::<Vec<_>>()
        };
        // The defaults of kubeadm, k3s, OpenShift, EKS, and the API server's flag (10.0.0.0/24).
        assert_eq!(around("10.96.0.1"), ["10.96.0.0/12"]);
        assert_eq!(around("10.43.0.1"), ["10.43.0.0/16"]);
        assert_eq!(around("172.30.0.1"), ["172.30.0.0/15"]);
        assert_eq!(around("172.20.0.1"), ["172.20.0.0/14"]);
        assert_eq!(around("10.0.0.1"), ["10.0.0.0/12"]);
        assert_eq!(around("fd00:10:96::1"), ["fd00:10:96::/108"]);
        // An address that is not the second of any network was chosen explicitly.
        assert_eq!(around("192.0.2.8"), ["192.0.2.8/32"]);
    }

    #[test]
    fn service_network_that_is_named_is_known() {
        let service = parse("10.96.0.1/32");
        let found =
            |snapshot: &Snapshot, named: &[IpNet]| at(&mut Unnamed::default(), snapshot, named, Some(service), 0);
        let mut snapshot = Snapshot::default();
        assert_eq!(found(&snapshot, &[service, parse("10.96.0.0/16")]), []);
        snapshot.services.insert(parse("172.20.0.0/16"));
        assert_eq!(found(&snapshot, &[service]), []);
        snapshot.services.clear();
        let mut me = node("me", Default::default());
        me.addresses.insert(service.addr());
        snapshot.nodes.insert("me".into(), me);
        assert_eq!(found(&snapshot, &[service]), [], "the API server of a cluster without kube-proxy");
        assert_eq!(at(&mut Unnamed::default(), &snapshot, &[], None, 0), []);
    }

    #[test]
    fn pod_unknown_to_the_controller_reveals_a_pod_network() {
        let mut cluster = snapshot(&["10.9.3.4", "fd09::3:4"]);
        let mut unnamed = Unnamed::default();
        assert_eq!(at(&mut unnamed, &cluster, &[], None, 100), []);
        assert_eq!(at(&mut unnamed, &cluster, &[], None, 109), []);
        let around = [parse("10.9.3.0/24"), parse("fd09::/64")];
        assert_eq!(at(&mut unnamed, &cluster, &[], None, 110), around);
        assert_eq!(at(&mut unnamed.clone(), &cluster, &[parse("10.9.0.0/16")], None, 110), around[1..]);
        cluster.pod_networks.insert(parse("10.9.3.4/32"));
        assert_eq!(at(&mut unnamed, &cluster, &[], None, 111), around[1..], "the controller reports it");
        cluster.nodes.get_mut(&NodeName::from("me")).unwrap().pod_cidrs.insert(parse("fd09::/64"));
        assert_eq!(at(&mut unnamed, &cluster, &[], None, 112), []);
        cluster.pod_networks.clear();
        assert_eq!(at(&mut unnamed, &cluster, &[], None, 113), [], "it may take its time again");
    }

    #[test]
    fn pods_of_other_nodes_show_nothing() {
        let mut cluster = snapshot(&["10.9.3.4"]);
        cluster.endpoints.values_mut().for_each(|pod| pod.node = "other".into());
        let mut unnamed = Unnamed::default();
        at(&mut unnamed, &cluster, &[], None, 0);
        assert_eq!(at(&mut unnamed, &cluster, &[], None, 1_000), []);
    }
}
