//! `PerEndpoint`: every pod has one egress IP, pods are balanced over egress IPs, and changes move only pods that must move.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::Result;
use lab::{Cni, Family, Lab, PodSpec, wait_until};

use crate::support::{PATIENCE, WEB, egress, gateways, policy, sources, start};

/// Waits until all connections of each pod have a single one of `hosts` and `good` holds. Returns each pod's egress IP
/// in one family. (Until the ports of a pod's own egress IP are confirmed, its first flows use another one.)
pub fn assignments(
    lab: &Lab,
    family: Family,
    hosts: &[u8],
    good: impl Fn(&BTreeMap<String, IpAddr>) -> bool,
) -> Result<BTreeMap<String, IpAddr>> {
    assignments_of("", lab, family, hosts, good)
}

/// [`assignments`] for the pods whose names begin with `prefix`.
pub fn assignments_of(
    prefix: &str,
    lab: &Lab,
    family: Family,
    hosts: &[u8],
    good: impl Fn(&BTreeMap<String, IpAddr>) -> bool,
) -> Result<BTreeMap<String, IpAddr>> {
    let server = lab.server("server1");
    let allowed = egress(family, hosts);
    let look = || {
        let mut found = BTreeMap::new();
        for pod in lab.pods().filter(|pod| pod.name.starts_with(prefix)) {
            let seen = sources(&pod.ns, server, family, 8)?;
            let single = seen.len() == 1 && seen.iter().all(|(ip, count)| *count == 8 && allowed.contains(ip));
            anyhow::ensure!(single, "the connections of {} have the sources {seen:?}", pod.name);
            found.extend(seen.into_keys().map(|ip| (pod.key(), ip)));
        }
        Ok(found)
    };
    wait_until("one egress IP for each pod, as it should be", PATIENCE, look, good)
}

/// Returns the number of pods of each egress IP.
pub fn loads(assignments: &BTreeMap<String, IpAddr>) -> Vec<usize> {
    lab::traffic::tally(assignments.values().copied()).into_values().collect()
}

#[test]
fn every_pod_has_one_egress_ip_and_they_are_balanced() {
    Lab::builder().run(|lab| {
        let spec = format!("{WEB}{}\n  distribution: PerEndpoint", gateways(&[10, 11, 12]));
        lab.manifests().write("web", &policy("web", &spec))?;
        for (number, node) in ["worker1", "worker2", "worker1", "worker2", "gw1", "worker1"].into_iter().enumerate() {
            let cni = if node == "worker2" { Cni::Bridge } else { Cni::PointToPoint };
            lab.add_pod(PodSpec::new(&format!("web-{number}"), node).label("app", "web").cni(cni))?;
        }
        start(lab)?;
        for family in Family::BOTH {
            assignments(lab, family, &[10, 11, 12], |all| loads(all) == [2, 2, 2])?;
        }
        Ok(())
    });
}

#[test]
fn changes_move_only_the_pods_that_they_must() {
    Lab::builder().workers(1).run(|lab| {
        let spec = |hosts: &[u8]| policy("web", &format!("{WEB}{}\n  distribution: PerEndpoint", gateways(hosts)));
        lab.manifests().write("web", &spec(&[10, 11, 12]))?;
        for number in 0..6 {
            lab.add_pod(PodSpec::new(&format!("web-{number}"), "worker1").label("app", "web"))?;
        }
        start(lab)?;
        let before = assignments(lab, Family::V4, &[10, 11, 12], |all| loads(all) == [2, 2, 2])?;

        // A pod is added whose name sorts between the others: no pod moves.
        lab.add_pod(PodSpec::new("web-25", "worker1").label("app", "web"))?;
        let with_another = assignments(lab, Family::V4, &[10, 11, 12], |all| all.len() == 7)?;
        assert!(before.iter().all(|(pod, ip)| with_another[pod] == *ip), "{before:?} {with_another:?}");
        lab.remove_pod("web-25")?;

        // An egress IP is removed: its two pods move, one to each of the others.
        lab.manifests().write("web", &spec(&[10, 11]))?;
        let gone = egress(Family::V4, &[12])[0];
        let after = assignments(lab, Family::V4, &[10, 11], |all| loads(all) == [3, 3])?;
        let stayed = before.iter().filter(|(pod, ip)| **ip != gone && after[*pod] == **ip).count();
        assert_eq!(stayed, 4, "{before:?} {after:?}");
        Ok(())
    });
}
