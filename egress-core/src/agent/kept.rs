//! Pods whose objects are gone while their interfaces are not. Pure.
//!
//! `kubectl delete --force` removes the object immediately. The kubelet may take its time, or never finish if it hangs; meanwhile the pod
//! runs and sends. A pod that a policy has selected stays selected until its interface is gone.

use crate::{
    encode::{EndpointView, name_text, tables::Tables},
    model::{EndpointId, NodeName, PolicyId, Snapshot},
    network::links::LinkTable,
};
use egress_common::{
    abi::name_kind,
    endpoint::{Endpoint, NO_POLICY},
    net,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// Returns the pods in the maps whose objects are gone, with the addresses that are still behind an interface and belong to no other pod,
/// and with the policies that still exist.
pub fn gone(
    before: &BTreeMap<EndpointId, EndpointView>,
    snapshot: &Snapshot,
    node: &NodeName,
    links: &LinkTable,
) -> BTreeMap<EndpointId, EndpointView> {
    let own = snapshot.endpoints.values().filter(|e| e.node == *node);
    let taken: BTreeSet<IpAddr> = own.flat_map(|e| e.ips.iter().copied()).collect();
    let exists = |id: &EndpointId| snapshot.endpoints.get(id).is_some_and(|e| e.node == *node);
    let gone = before.iter().filter(|(id, _)| !exists(id)).filter_map(|(id, pod)| {
        let stays = |(ip, index): &(&IpAddr, &u32)| links.links.contains_key(index) && !taken.contains(ip);
        let interfaces: BTreeMap<_, _> = pod.interfaces.iter().filter(stays).map(|(ip, i)| (*ip, *i)).collect();
        let class: BTreeSet<_> = pod.class.iter().filter(|p| snapshot.policies.contains_key(p)).cloned().collect();
        let ips = interfaces.keys().copied().collect();
        let view = EndpointView { ips, class, interfaces, ..pod.clone() };
        (!view.ips.is_empty() && !view.class.is_empty()).then(|| (id.clone(), view))
    });
    gone.collect()
}

/// Returns the pods that an earlier agent has left in the maps. A class consists of the policies that its routes name.
pub fn recover(tables: &Tables) -> BTreeMap<EndpointId, EndpointView> {
    let names = |kind| tables.names.iter().filter(move |(k, _)| k.kind == kind).map(|(k, n)| (k.id, name_text(n)));
    let policies: BTreeMap<u32, PolicyId> =
        names(name_kind::POLICY).filter_map(|(number, name)| Some((number, name.parse().ok()?))).collect();
    let mut classes: BTreeMap<u32, BTreeSet<PolicyId>> = BTreeMap::new();
    let routes = tables.v4.routes.iter().map(|((key, _), policy)| (key.class, *policy));
    let routes = routes.chain(tables.v6.routes.iter().map(|((key, _), policy)| (key.class, *policy)));
    for (class, policy) in routes.filter(|(_, policy)| *policy != NO_POLICY) {
        classes.entry(class).or_default().extend(policies.get(&policy).cloned());
    }
    let mut all: BTreeMap<EndpointId, EndpointView> = BTreeMap::new();
    let ids: BTreeMap<u32, EndpointId> =
        names(name_kind::ENDPOINT).filter_map(|(number, name)| Some((number, name.parse().ok()?))).collect();
    let v4 = tables.v4.endpoints.iter().map(|(ip, e)| (IpAddr::from(net::from_v4(*ip)), e));
    let v6 = tables.v6.endpoints.iter().map(|(ip, e)| (IpAddr::from(net::from_v6(*ip)), e));
    for (ip, Endpoint { id, class, history_until, ifindex, .. }) in v4.chain(v6) {
        let Some(id) = ids.get(id) else { continue };
        let view = all.entry(id.clone()).or_default();
        view.ips.insert(ip);
        view.class = classes.get(class).cloned().unwrap_or_default();
        view.history_until = *history_until;
        view.interfaces.extend((*ifindex != 0).then_some((ip, *ifindex)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::{Endpoint, PolicyKind},
        testing::link,
    };

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_deleted_pod_stays_selected_until_its_interface_is_gone_or_its_address_is_reused() {
        let id = EndpointId::new("default", "web", "1");
        let class = BTreeSet::from([PolicyId::new(PolicyKind::Native, "web")]);
        let both = [ip("10.0.0.7"), ip("fd00::7")];
        let interfaces: BTreeMap<_, _> = both.map(|ip| (ip, 3)).into();
        let view = EndpointView { ips: both.into(), class, history_until: 0, interfaces };
        let before = BTreeMap::from([(id.clone(), view.clone())]);
        let node = NodeName::from("me");
        let mut links = LinkTable::default();
        links.links.insert(3, link(3, "veth3"));
        let mut snapshot = Snapshot::default();
        let now = |snapshot: &Snapshot, links: &LinkTable| gone(&before, snapshot, &node, links);
        assert_eq!(now(&snapshot, &links), [].into(), "its policy is gone as well");
        let policy = crate::agent::view_tests::web();
        snapshot.policies.insert(policy.id.clone(), policy);
        assert_eq!(now(&snapshot, &links), before);
        let heir = |name: &str, ips: &[IpAddr]| Endpoint {
            id: EndpointId::new("default", name, name),
            node: node.clone(),
            ips: ips.iter().copied().collect(),
            labels: Default::default(),
        };
        snapshot.endpoints.insert(EndpointId::new("default", "heir", "heir"), heir("heir", &both[..1]));
        let rest = now(&snapshot, &links).remove(&id).unwrap();
        assert_eq!((rest.ips, rest.interfaces), ([both[1]].into(), [(both[1], 3)].into()));
        assert_eq!(now(&snapshot, &LinkTable::default()), [].into());
        snapshot.endpoints.insert(id.clone(), heir("web", &both));
        assert_eq!(now(&snapshot, &links), [].into(), "it has an object");
    }
}
