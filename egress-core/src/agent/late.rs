//! Selected pods that are late: still without an address, or with an address that no interface of the node leads to. Pure.
//!
//! While a selected pod is starting, packets from unknown sources are held. A pod that never gets a network (because a Secret is missing,
//! say) must not hold them forever: after a time limit nothing is held for it, and it is reported. When it does start, its interface
//! appears: unknown sources are then held until it is known which pod is behind that interface.

use super::facts::{Classes, Facts};
use crate::model::{EndpointId, PolicyId, Trouble, TroubleKind};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

/// How long a pod may have an address before an interface must lead to it.
const REACHED_AFTER: Duration = Duration::from_secs(10);

/// Since when each pod or interface has been late.
#[derive(Clone, Debug, Default)]
pub struct Late {
    starting: BTreeMap<EndpointId, Duration>,
    unreached: BTreeMap<EndpointId, Duration>,
    /// Interfaces with no known pod behind them.
    nobodys: BTreeMap<u32, Duration>,
}

/// Sets `known` to `present`; new entries begin at `now`.
fn follow<K: Ord>(known: &mut BTreeMap<K, Duration>, present: BTreeSet<K>, now: Duration) {
    let since: Vec<Duration> = present.iter().map(|key| known.get(key).copied().unwrap_or(now)).collect();
    *known = present.into_iter().zip(since).collect();
}

impl Late {
    /// Updates the state from the current pods and interfaces.
    pub fn update(&mut self, is: &Facts) {
        let own = || is.objects.snapshot.endpoints.values().filter(|e| e.node == is.node);
        let selected = || own().filter(|e| is.classes.get(&e.id).is_some_and(|class| !class.is_empty()));
        let starting = selected().filter(|e| e.ips.is_empty()).map(|e| e.id.clone()).collect();
        let reached = |ips: &BTreeSet<IpAddr>| ips.iter().any(|ip| is.interfaces.contains_key(ip));
        let unreached = selected().filter(|e| !e.ips.is_empty() && !reached(&e.ips)).map(|e| e.id.clone()).collect();
        let taken: BTreeSet<u32> = own().flat_map(|e| &e.ips).filter_map(|ip| is.interfaces.get(ip)).copied().collect();
        follow(&mut self.starting, starting, is.now);
        follow(&mut self.unreached, unreached, is.now);
        follow(&mut self.nobodys, is.roles.pods.difference(&taken).copied().collect(), is.now);
    }

    /// Returns whether unknown sources must be held: a selected pod is starting, or a late pod may be behind a new interface.
    pub fn holds(&self, limit: Duration, now: Duration) -> bool {
        let young = |since: &Duration| now.saturating_sub(*since) < limit;
        self.starting.values().any(young) || !self.starting.is_empty() && self.nobodys.values().any(young)
    }

    /// Returns whether any pod has been starting for so long that nothing is held for it.
    pub fn is_any_overdue(&self, limit: Duration, now: Duration) -> bool {
        self.starting.values().any(|since| now.saturating_sub(*since) >= limit)
    }

    /// Returns the troubles to report, for each policy that selects a late pod.
    pub fn troubles(&self, classes: &Classes, limit: Duration, now: Duration) -> BTreeSet<Trouble> {
        let late = |since: &Duration, limit: Duration| now.saturating_sub(*since) >= limit;
        let not_started = self.starting.iter().filter(|(_, since)| late(since, limit));
        let not_started = not_started.map(|(id, _)| {
            let message = format!(
                "it has had no address for {} s: unknown sources are no longer held for it until an interface appears; find out why it does not start (kubectl describe pod)",
                limit.as_secs()
            );
            (id, TroubleKind::PodNotStarted, message)
        });
        let unreached = self.unreached.iter().filter(|(_, since)| late(since, REACHED_AFTER));
        let unreached = unreached.map(|(id, _)| {
            let message = "no interface of the node leads to it (ipvlan, macvlan, SR-IOV, or an unknown kind): its packets bypass the \
                           programs, and the policy does not apply to it; connect it with a veth pair, or name its host-side interface \
                           in podInterfaces";
            (id, TroubleKind::PodWithoutInterface, message.to_owned())
        });
        let of_policies = |(id, kind, message): (&EndpointId, TroubleKind, String)| {
            let policies: Vec<PolicyId> = classes.get(id).into_iter().flatten().cloned().collect();
            let pod = Some(id.clone());
            policies.into_iter().map(move |policy| Trouble { policy, kind, pod: pod.clone(), message: message.clone() })
        };
        not_started.chain(unreached).flat_map(of_policies).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        agent::facts::Objects,
        model::{Endpoint, PolicyKind, Snapshot},
        network::classify::Roles,
    };
    use std::sync::Arc;

    const LIMIT: Duration = Duration::from_secs(60);

    /// One node and the state of its pods.
    struct NodeFixture {
        late: Late,
        snapshot: Snapshot,
        interfaces: BTreeMap<IpAddr, u32>,
        pods: BTreeSet<u32>,
    }

    impl NodeFixture {
        /// Creates a node with these pods, each with the number of its addresses.
        fn new(pods: &[(&str, u8)]) -> NodeFixture {
            let mut snapshot = Snapshot::default();
            for (number, (name, ips)) in pods.iter().enumerate() {
                let id = EndpointId::new("default", name, name);
                let ips = (0..*ips).map(|n| IpAddr::from([10, 0, number as u8, n])).collect();
                snapshot
                    .endpoints
                    .insert(id.clone(), Endpoint { id, node: "me".into(), ips, labels: Default::default() });
            }
            NodeFixture { late: Late::default(), snapshot, interfaces: BTreeMap::new(), pods: BTreeSet::new() }
        }

        /// Returns whether unknown sources are held at a time, and what is reported then.
        fn at(&mut self, seconds: u64) -> (bool, Vec<TroubleKind>) {
            let now = Duration::from_secs(seconds);
            let class = BTreeSet::from([PolicyId::new(PolicyKind::Native, "web")]);
            let web = self.snapshot.endpoints.keys().filter(|id| id.name.starts_with("web"));
            let classes: Classes = web.map(|id| (id.clone(), class.clone())).collect();
            let objects = Arc::new(Objects { snapshot: self.snapshot.clone(), ..Objects::default() });
            let roles = Roles { pods: self.pods.clone(), ..Roles::default() };
            let (node, interfaces) = ("me".into(), self.interfaces.clone());
            let facts = Facts { node, now, objects, roles, classes, interfaces, ..Facts::default() };
            self.late.update(&facts);
            let classes = &facts.classes;
            let told = self.late.troubles(classes, LIMIT, now).into_iter().map(|t| t.kind).collect();
            (self.late.holds(LIMIT, now), told)
        }

        fn address(&mut self, pod: &str, ip: [u8; 4]) {
            let pod = self.snapshot.endpoints.values_mut().find(|e| *e.id.name == *pod).unwrap();
            pod.ips.insert(ip.into());
        }
    }

    #[test]
    fn a_pod_that_never_starts_does_not_hold_packets_forever() {
        let mut node = NodeFixture::new(&[("web", 0)]);
        assert_eq!(node.at(5), (true, vec![]));
        assert_eq!(node.at(64), (true, vec![]));
        assert_eq!(node.at(65), (false, vec![TroubleKind::PodNotStarted]));
        assert_eq!(node.at(100_000), (false, vec![TroubleKind::PodNotStarted]));
        node.snapshot.endpoints.clear();
        assert_eq!(node.at(100_001), (false, vec![]));
    }

    #[test]
    fn a_pod_that_starts_late_is_held_once_its_interface_appears() {
        let mut node = NodeFixture::new(&[("web", 0), ("other", 1)]);
        // An interface that was there before, of a container that is not a pod.
        node.pods = [3, 4].into();
        node.interfaces = [(IpAddr::from([10, 0, 1, 0]), 3)].into();
        assert!(node.at(0).0);
        assert!(!node.at(1_000).0);
        // Unknown sources are held for the interface of another starting pod until it is known which pod is behind it.
        node.pods.insert(5);
        assert!(node.at(1_001).0);
        node.address("other", [10, 0, 1, 1]);
        node.interfaces.insert([10, 0, 1, 1].into(), 5);
        assert_eq!(node.at(1_002), (false, vec![TroubleKind::PodNotStarted]));
        node.pods.insert(6);
        assert!(node.at(1_003).0);
        node.address("web", [10, 0, 0, 0]);
        node.interfaces.insert([10, 0, 0, 0].into(), 6);
        assert_eq!(node.at(1_004), (false, vec![]));
    }

    #[test]
    fn a_selected_pod_without_an_interface_is_reported() {
        let mut node = NodeFixture::new(&[("web", 2), ("other", 1)]);
        assert_eq!(node.at(0), (false, vec![]));
        assert_eq!(node.at(9), (false, vec![]));
        assert_eq!(node.at(10), (false, vec![TroubleKind::PodWithoutInterface]), "no policy selects the other one");
        node.interfaces.insert([10, 0, 0, 1].into(), 3);
        assert_eq!(node.at(11), (false, vec![]));
    }
}
