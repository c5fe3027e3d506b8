//! CiliumEgressGatewayPolicy: Cilium manifests work unchanged, and policies that Cilium silently rejects are reported.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::Result;
use lab::{Family, Lab, Pod, PodSpec, Server, wait_until};
use serde_json::Value;

use crate::per_endpoint::assignments;
use crate::support::{PATIENCE, egress, named, owner, start, wait_sources};

/// Returns a policy; `spec` must be indented by two spaces.
fn cegp(name: &str, spec: &str) -> String {
    format!("apiVersion: cilium.io/v2\nkind: CiliumEgressGatewayPolicy\nmetadata:\n  name: {name}\nspec:\n{spec}\n")
}

/// The selectors of Cilium's documentation, and all IPv4 destinations.
const EMPIRE: &str = "  selectors:
  - podSelector:
      matchLabels:
        org: empire
        class: mediabot
        # The following label selects default namespace
        io.kubernetes.pod.namespace: default
  destinationCIDRs:
  - \"0.0.0.0/0\"
";

fn mediabot(lab: &mut Lab, name: &str, namespace: &str, node: &str) -> Result<Pod> {
    lab.add_pod(PodSpec::new(name, node).namespace(namespace).label("org", "empire").label("class", "mediabot"))
}

fn wait_v4(pod: &Pod, server: &Server, expected: IpAddr) -> Result<()> {
    wait_sources(&pod.ns, server, Family::V4, &[expected])
}

/// Returns the row of `egressctl policies` for a policy.
fn told(lab: &Lab, node: &str, policy: &str) -> Result<Value> {
    let list = lab.egressctl(node, &["policies"])?;
    let row = list["items"].as_array().and_then(|rows| rows.iter().find(|row| row["name"] == policy));
    Ok(row.cloned().unwrap_or_default())
}

#[test]
fn a_manifest_of_ciliums_documentation_works_as_it_is() {
    Lab::builder().workers(1).gateways(2).far_servers(2).run(|lab| {
        lab.add_namespace("other", &[])?;
        let address = egress(Family::V4, &[50])[0];
        lab.node("gw2").ns.ip(&[format!("addr add {address}/24 dev ext0")])?;
        lab.node("gw2").ns.wait_addressed(&["ext0"])?;
        let excluded = format!("  excludedCIDRs:\n  - {}/32\n", lab.server("far2").ips.v4);
        let gateway = |rest: &str| format!("nodeSelector:\n      matchLabels:\n        egress: \"true\"{rest}");
        let with_ip = gateway(&format!("\n    egressIP: {address}"));
        lab.manifests()
            .write("cegp", &cegp("egress-sample", &format!("{EMPIRE}{excluded}  egressGateway:\n    {with_ip}")))?;
        let pod = mediabot(lab, "mediabot", "default", "worker1")?;
        let stranger = mediabot(lab, "mediabot", "other", "worker1")?;
        start(lab)?;
        let (near, far, untouched) =
            (lab.server("server1").clone(), lab.server("far1").clone(), lab.server("far2").clone());
        wait_v4(&pod, &near, address)?;
        wait_v4(&pod, &far, address)?;
        assert_eq!(owner(lab, address).as_deref(), Some("gw2"), "the gateway is the node that has the address");
        let node = IpAddr::from(lab.node("worker1").underlay.v4);
        wait_v4(&pod, &untouched, node)?;
        wait_v4(&stranger, &near, node)?;
        // With an interface, the first gateway by name serves.
        lab.node("gw2").ns.ip(&[format!("addr del {address}/24 dev ext0")])?;
        let first = egress(Family::V4, &[101])[0];
        let by_interface = gateway("\n    interface: ext0");
        lab.manifests()
            .write("cegp", &cegp("egress-sample", &format!("{EMPIRE}  egressGateway:\n    {by_interface}")))?;
        wait_v4(&pod, &near, first)?;
        // The list takes precedence over the single gateway.
        let list = format!("  egressGateways:\n  - nodeSelector: {{matchLabels: {{{}}}}}\n", named("gw2"));
        lab.manifests()
            .write("cegp", &cegp("egress-sample", &format!("{EMPIRE}  egressGateway:\n    {by_interface}\n{list}")))?;
        wait_v4(&pod, &near, egress(Family::V4, &[102])[0])?;
        // An empty list does not. Without address and interface, the default route's address is used.
        let single = format!("{{nodeSelector: {{matchLabels: {{{}}}}}}}", named("gw1"));
        let empty = format!("{EMPIRE}  egressGateways: []\n  egressGateway: {single}");
        lab.manifests().write("cegp", &cegp("egress-sample", &empty))?;
        wait_v4(&pod, &near, first)?;
        // The other selectors: the namespace's labels, and those of the pod's node.
        let elsewhere = |node: &str| {
            let namespace = "namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: other}}";
            let pods = "podSelector: {matchExpressions: [{key: class, operator: In, values: [mediabot]}]}";
            let nodes = format!("nodeSelector: {{matchLabels: {{{}}}}}", named(node));
            let selectors = format!("  selectors:\n  - {namespace}\n    {pods}\n    {nodes}\n");
            cegp("egress-sample", &format!("{selectors}  destinationCIDRs: [0.0.0.0/0]\n  egressGateway: {single}"))
        };
        lab.manifests().write("cegp", &elsewhere("worker1"))?;
        wait_v4(&stranger, &near, first)?;
        wait_v4(&pod, &near, node)?;
        lab.manifests().write("cegp", &elsewhere("gw2"))?;
        wait_v4(&stranger, &near, node)
    });
}

#[test]
fn pods_are_assigned_in_turn_and_then_stay() {
    Lab::builder().workers(2).run(|lab| {
        let gateways = |hosts: &[u8]| -> String {
            let one = |host: &u8| {
                let address = egress(Family::V4, &[*host])[0];
                format!("  - nodeSelector: {{matchLabels: {{egress: \"true\"}}}}\n    egressIP: {address}\n")
            };
            let list: String = hosts.iter().map(one).collect();
            cegp("turns", &format!("{EMPIRE}  egressGateway: {{nodeSelector: {{}}}}\n  egressGateways:\n{list}"))
        };
        // The addresses are deliberately not in order.
        lab.manifests().write("cegp", &gateways(&[12, 10, 11]))?;
        for number in 0..6 {
            mediabot(lab, &format!("bot-{number}"), "default", ["worker1", "worker2"][number % 2])?;
        }
        start(lab)?;
        let ips = egress(Family::V4, &[10, 11, 12]);
        let in_turn: BTreeMap<String, IpAddr> =
            (0..6).map(|number| (format!("default/bot-{number}"), ips[number % 3])).collect();
        assignments(lab, Family::V4, &[10, 11, 12], |found| *found == in_turn)?;
        // The first pod is removed and another one added: Cilium's round-robin would move all pods.
        lab.remove_pod("bot-0")?;
        mediabot(lab, "bot-9", "default", "worker1")?;
        let mut expected = in_turn.clone();
        expected.remove("default/bot-0");
        expected.insert("default/bot-9".into(), ips[0]);
        assignments(lab, Family::V4, &[10, 11, 12], |found| *found == expected)?;
        // A gateway is added: only as many pods move as it takes over.
        lab.manifests().write("cegp", &gateways(&[12, 13, 10, 11]))?;
        let moved = assignments(lab, Family::V4, &[10, 11, 12, 13], |found| {
            found.len() == 6 && found.values().any(|ip| *ip == egress(Family::V4, &[13])[0])
        })?;
        assert_eq!(moved.iter().filter(|(pod, ip)| expected[*pod] != **ip).count(), 1, "{expected:?} {moved:?}");
        Ok(())
    });
}

#[test]
fn policies_that_cilium_ignores_silently_are_reported_and_disturb_nobody() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let address = egress(Family::V4, &[50])[0];
        // The selector excludes workers: one may be the first ready node, and its network has no route back to this address.
        let nodes = "nodeSelector: {matchLabels: {egress: \"true\"}}";
        let gateway = format!("  egressGateway: {{{nodes}, egressIP: {address}}}\n");
        let refused = [
            (
                "both",
                format!("{EMPIRE}  egressGateway: {{nodeSelector: {{}}, egressIP: {address}, interface: ext0}}"),
                "both egressIP and interface",
            ),
            (
                "nobody",
                format!("  selectors: [{{}}]\n  destinationCIDRs: [0.0.0.0/0]\n{gateway}"),
                "neither pods nor namespaces",
            ),
            (
                "nowhere",
                format!("  selectors: [{{podSelector: {{}}}}]\n  destinationCIDRs: []\n{gateway}"),
                "it is empty",
            ),
            (
                "cidr",
                format!("  selectors: [{{podSelector: {{}}}}]\n  destinationCIDRs: [10.0.0.0/33]\n{gateway}"),
                "not understood",
            ),
            ("ip", format!("{EMPIRE}  egressGateway: {{nodeSelector: {{}}, egressIP: 192.0.2}}"), "not understood"),
        ];
        for (name, spec, _) in &refused {
            lab.manifests().write(name, &cegp(name, spec))?;
        }
        let family = "  selectors: [{podSelector: {matchLabels: {app: six}}}]\n  destinationCIDRs: [\"::/0\"]\n";
        lab.manifests().write("family", &cegp("family", &format!("{family}{gateway}")))?;
        lab.manifests().write("good", &cegp("good", &format!("{EMPIRE}{gateway}")))?;
        let pod = mediabot(lab, "mediabot", "default", "worker1")?;
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_v4(&pod, &server, address)?;
        for (name, _, why) in &refused {
            let what = format!("{name} is told with: {why}");
            let good = |row: &Value| {
                row["ready"] == "False (Invalid)" && row["problems"][0].as_str().is_some_and(|text| text.contains(why))
            };
            wait_until(&what, PATIENCE, || told(lab, "worker1", &format!("cegp/{name}")), good)?;
        }
        let no_address = |row: &Value| row["ready"] == "False (NoAddress)";
        wait_until("the other family is reported", PATIENCE, || told(lab, "worker1", "cegp/family"), no_address)?;
        let log = lab.controller("controller").log();
        for (name, _, why) in &refused {
            let event = |line: &&str| line.contains(&format!("policy cegp/{name}")) && line.contains(why);
            assert!(log.lines().any(|line| event(&line)), "no event for {name}: {log}");
        }
        // Once corrected, a policy takes effect.
        lab.manifests().remove("good")?;
        let other = egress(Family::V4, &[51])[0];
        lab.manifests()
            .write("both", &cegp("both", &format!("{EMPIRE}  egressGateway: {{{nodes}, egressIP: {other}}}")))?;
        wait_v4(&pod, &server, other)?;
        let ready = |row: &Value| row["ready"] == "True" && row["problems"] == Value::Array(Vec::new());
        wait_until("it is ready", PATIENCE, || told(lab, "worker1", "cegp/both"), ready).map(drop)
    });
}

#[test]
fn the_first_gateway_by_name_serves_and_the_next_one_when_it_is_gone() {
    Lab::builder().workers(1).run(|lab| {
        let address = egress(Family::V4, &[50])[0];
        let gateway = format!("  egressGateway: {{nodeSelector: {{matchLabels: {{egress: \"true\"}}}}, egressIP: {address}}}\n");
        let pod = mediabot(lab, "mediabot", "default", "worker1")?;
        // Three addresses on three gateways show that all of them work.
        lab.manifests().write("others", &crate::support::web(&[10, 11, 12]))?;
        start(lab)?;
        let owners = || -> Result<std::collections::BTreeSet<_>> {
            Ok(egress(Family::V4, &[10, 11, 12]).into_iter().filter_map(|ip| owner(lab, ip)).collect())
        };
        wait_until("every gateway carries something", PATIENCE, owners, |owners| owners.len() == 3)?;
        lab.manifests().write("cegp", &cegp("first", &format!("{EMPIRE}{gateway}")))?;
        let server = lab.server("server1").clone();
        wait_v4(&pod, &server, address)?;
        assert_eq!(owner(lab, address).as_deref(), Some("gw1"));
        lab.relabel_node("gw1", &[("kubernetes.io/hostname", "gw1")])?;
        // The next one is the first by name among the other gateways that are proven by then.
        let next = crate::support::wait_owner(lab, address, |node| node != "gw1")?;
        wait_v4(&pod, &server, address)?;
        // The address stays there when the first gateway returns.
        lab.relabel_node("gw1", &[("kubernetes.io/hostname", "gw1"), ("egress", "true")])?;
        lab.manifests().write("nobody", &cegp("nobody", &format!("  selectors: [{{podSelector: {{matchLabels: {{app: none}}}}}}]\n  destinationCIDRs: [0.0.0.0/0]\n  egressGateway: {{nodeSelector: {{matchLabels: {{{}}}}}, egressIP: {}}}", named("gw1"), egress(Family::V4, &[51])[0])))?;
        crate::support::wait_owner(lab, egress(Family::V4, &[51])[0], |node| node == "gw1")?;
        assert_eq!(owner(lab, address), Some(next));
        Ok(())
    });
}
