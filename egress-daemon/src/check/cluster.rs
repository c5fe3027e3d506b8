//! Judges the facts of a cluster before an installation. Pure.

use super::{
    CheckLine, CheckStatus,
    judge::{TESTED, bad, of_kernel, ok, version},
    pre::{ClusterFacts, NodeFacts, PodFacts},
};
use crate::{config::Config, ctl::print::first_of};
use std::net::IpAddr;

/// The oldest supported version of Kubernetes (the chart's `kubeVersion`).
const KUBERNETES: (u32, u32) = (1, 32);
/// The architectures that the image is built for.
const ARCHITECTURES: [&str; 2] = ["amd64", "arm64"];
/// The maximum number of names in a line; the rest are counted.
const NAMES: usize = 5;

/// Returns the lines of all checks.
pub(super) fn judge(facts: &ClusterFacts, config: &Config) -> Vec<CheckLine> {
    let mut lines = vec![kubernetes(facts)];
    lines.extend(facts.nodes.iter().flat_map(|found| nodes(found)));
    lines.extend(facts.pods.as_ref().map(pod_networks));
    lines.extend(facts.services.as_ref().map(|found| service_networks(found, facts, config)));
    lines.extend(facts.cnis.as_ref().map(|found| match found.as_slice() {
        [] => ok("cni", "no DaemonSet of a known CNI; any CNI that gives each pod an interface on the host works"),
        found => ok("cni", format!("{}; docs/networks.md lists what was tested with it", found.join(", "))),
    }));
    lines.extend(others(facts));
    lines.extend(facts.definitions.as_ref().map(|found| match found.as_slice() {
        [] => ok("kinds", "none of Spillway's kinds is installed yet"),
        found => ok("kinds", format!("Spillway's kinds are already installed: {}", first_of(found, NAMES))),
    }));
    lines.extend(pod_security(facts));
    let unread = |why: &String| {
        let remedy =
            "run the check with the permissions of a cluster administrator, or with those in manifests/pre/check.yaml";
        bad("access", CheckStatus::Warn, format!("not everything could be checked: {why}"), remedy)
    };
    lines.extend(facts.unread.iter().map(unread));
    lines
}

fn kubernetes(facts: &ClusterFacts) -> CheckLine {
    let found = format!("Kubernetes {}", facts.version);
    if version(&facts.version).is_some_and(|version| version >= KUBERNETES) {
        return ok("kubernetes", found);
    }
    let (major, minor) = KUBERNETES;
    let remedy = format!("upgrade to {major}.{minor} or later: an admission policy limits agents to their own objects");
    bad("kubernetes", CheckStatus::Fail, found, remedy)
}

fn nodes(found: &[NodeFacts]) -> Vec<CheckLine> {
    let linux: Vec<&NodeFacts> = found.iter().filter(|node| node.system == "linux").collect();
    let name = |node: &&NodeFacts| node.name.clone();
    let line = |check, wrong: Vec<String>, good: String, found: &str, status, remedy: &str| {
        if wrong.is_empty() {
            return ok(check, good);
        }
        bad(check, status, format!("{found}: {}", first_of(&wrong, NAMES)), remedy)
    };
    let judged = linux.iter().map(|node| (of_kernel(&node.release), node));
    let old: Vec<_> = judged.filter(|(status, _)| *status != CheckStatus::Ok).collect();
    let worst = old.iter().map(|(status, _)| *status).max().unwrap_or(CheckStatus::Ok);
    let old = old.into_iter().map(|(_, node)| format!("{} ({})", node.name, node.release)).collect();
    let foreign = linux.iter().filter(|node| !ARCHITECTURES.contains(&node.architecture.as_str()));
    let other = found.iter().filter(|node| node.system != "linux");
    let mut lines = vec![
        line(
            "kernel",
            old,
            format!("all {} nodes have Linux {}.{} or later", linux.len(), TESTED.0, TESTED.1),
            &format!("older than Linux {}.{}, the oldest tested version", TESTED.0, TESTED.1),
            worst,
            "upgrade these nodes; policies may not be carried out for pods on them",
        ),
        line(
            "architecture",
            foreign.map(name).collect(),
            ARCHITECTURES.join(" or "),
            "neither amd64 nor arm64",
            CheckStatus::Fail,
            "build the image for these nodes, or keep the agents away from them (agent.nodeSelector)",
        ),
    ];
    let other: Vec<String> = other.map(|node| node.name.clone()).collect();
    if !other.is_empty() {
        let remedy = "nothing: agents do not run there, and no policy can select their pods";
        lines.push(line("system", other, String::new(), "not Linux", CheckStatus::Warn, remedy));
    }
    lines
}

fn pod_networks(PodFacts { examined, unnamed }: &PodFacts) -> CheckLine {
    let Some(example) = unnamed.first() else {
        let found = format!("the podCIDRs of Nodes contain the addresses of all {examined} pods that were examined");
        return ok("networks", found);
    };
    let found = format!("{} addresses of pods are in no Node's podCIDRs, such as {example}", unnamed.len());
    let remedy = "nothing, if the CNI names its networks (Calico, Cilium, Antrea, Kube-OVN): Spillway reads them. Otherwise the \
                  controller reports each such pod to all agents; to avoid that, write the pods' networks into exceptCIDRs";
    bad("networks", CheckStatus::Warn, found, remedy)
}

fn service_networks(services: &[String], facts: &ClusterFacts, config: &Config) -> CheckLine {
    if !services.is_empty() {
        return ok("networks", format!("Services are in {}", first_of(services, NAMES)));
    }
    let address: Option<IpAddr> = facts.api_server.as_ref().and_then(|address| address.parse().ok());
    if address.is_some_and(|address| config.except_cidrs.iter().any(|net| net.contains(&address))) {
        return ok("networks", "exceptCIDRs contain the Service kubernetes");
    }
    let found = match &facts.api_server {
        Some(address) => format!("no object names the network of Services, which contains {address}"),
        None => "no object names the network of Services".to_owned(),
    };
    let remedy = "add it to exceptCIDRs (kube-apiserver's --service-cluster-ip-range)";
    bad("networks", CheckStatus::Warn, found, remedy)
}

fn others(facts: &ClusterFacts) -> Vec<CheckLine> {
    let used = facts.others.iter().filter(|(_, count)| *count > 0);
    let line = |(kind, count): &(&str, usize)| {
        let remedy = "turn that gateway off before Spillway carries out policies for the same pods: docs/migrate.md";
        bad("gateways", CheckStatus::Warn, format!("{count} objects of kind {kind} are in the cluster"), remedy)
    };
    used.map(line).collect()
}

fn pod_security(facts: &ClusterFacts) -> Option<CheckLine> {
    let level = facts.pod_security.as_ref().filter(|level| *level != "privileged")?;
    let remedy = "run `kubectl label --overwrite namespace spillway pod-security.kubernetes.io/enforce=privileged`";
    Some(bad("podsecurity", CheckStatus::Fail, format!("namespace spillway enforces the level {level}"), remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, release: &str, architecture: &str) -> NodeFacts {
        let [name, release, architecture] = [name, release, architecture].map(str::to_owned);
        NodeFacts { name, release, architecture, system: "linux".into() }
    }

    fn good() -> ClusterFacts {
        ClusterFacts {
            version: "1.36".into(),
            nodes: Some(vec![node("n1", "6.1.0-18-amd64", "amd64"), node("n2", "6.12.3", "arm64")]),
            pods: Some(PodFacts { examined: 12, unnamed: vec![] }),
            services: Some(vec!["10.96.0.0/16".into()]),
            api_server: Some("10.96.0.1".into()),
            definitions: Some(vec![]),
            cnis: Some(vec![]),
            ..ClusterFacts::default()
        }
    }

    fn findings(facts: &ClusterFacts) -> Vec<(&'static str, CheckStatus, String)> {
        let lines = judge(facts, &Config::default());
        let bad = lines.into_iter().filter(|line| line.status != CheckStatus::Ok);
        bad.map(|line| (line.check, line.status, format!("{} -> {}", line.found, line.remedy.unwrap()))).collect()
    }

    #[test]
    fn a_usual_cluster_has_no_findings() {
        assert_eq!(findings(&good()), []);
    }

    #[track_caller]
    fn finds(change: impl FnOnce(&mut ClusterFacts), check: &str, status: CheckStatus, parts: &[&str]) {
        let mut facts = good();
        change(&mut facts);
        let found = findings(&facts);
        let [(its, how, text)] = &found[..] else { panic!("{found:?}") };
        assert_eq!((*its, *how), (check, status), "{text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }

    #[test]
    fn nothing_is_said_of_facts_that_were_not_read() {
        let all = judge(&good(), &Config::default());
        let checks: Vec<&str> = all.iter().map(|line| line.check).collect();
        let expected = ["kubernetes", "kernel", "architecture", "networks", "networks", "cni", "kinds"];
        assert_eq!(checks, expected);
        let facts =
            ClusterFacts { version: "1.36".into(), unread: vec!["Nodes: forbidden".into()], ..Default::default() };
        let checks: Vec<_> = judge(&facts, &Config::default()).iter().map(|line| line.check).collect();
        assert_eq!(checks, ["kubernetes", "access"]);
    }

    #[test]
    fn obstacles_in_a_cluster_are_reported_with_remedies() {
        use CheckStatus::{Fail, Warn};
        finds(|facts| facts.version = "1.31".into(), "kubernetes", Fail, &["1.31", "1.32 or later"]);
        finds(|facts| facts.version = "1.9".into(), "kubernetes", Fail, &["1.9"]);
        let old = |n: usize| node(&format!("old{n}"), "5.15.0", "amd64");
        let add = |facts: &mut ClusterFacts, nodes: Vec<NodeFacts>| facts.nodes.as_mut().unwrap().extend(nodes);
        finds(|facts| add(facts, (0..7).map(old).collect()), "kernel", Fail, &["old0 (5.15.0)", "old4", "and 2 more"]);
        finds(|facts| add(facts, vec![node("s1", "6.8.0", "s390x")]), "architecture", Fail, &["s1", "image"]);
        let windows = NodeFacts { system: "windows".into(), ..node("w1", "10.0.20348", "amd64") };
        finds(|facts| add(facts, vec![windows]), "system", Warn, &["w1"]);
        finds(
            |facts| facts.pods.as_mut().unwrap().unnamed = vec![IpAddr::from([10, 9, 0, 1])],
            "networks",
            Warn,
            &["10.9.0.1", "exceptCIDRs"],
        );
        finds(|facts| facts.services = Some(vec![]), "networks", Warn, &["10.96.0.1", "--service-cluster-ip-range"]);
        finds(
            |facts| facts.others = vec![("Egress", 3)],
            "gateways",
            Warn,
            &["3 objects of kind Egress", "migrate.md"],
        );
        finds(
            |facts| facts.pod_security = Some("restricted".into()),
            "podsecurity",
            Fail,
            &["restricted", "privileged"],
        );
        finds(
            |facts| facts.unread = vec!["nodes is forbidden".into()],
            "access",
            Warn,
            &["forbidden", "pre/check.yaml"],
        );
    }

    #[test]
    fn service_network_in_except_cidrs_is_not_a_finding() {
        let facts = ClusterFacts { services: Some(vec![]), ..good() };
        let config = Config::parse("test", b"exceptCIDRs: [10.96.0.0/12]").unwrap();
        assert!(judge(&facts, &config).iter().all(|line| line.status == CheckStatus::Ok));
    }
}
