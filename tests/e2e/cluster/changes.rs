//! Pods, labels and policies are added, changed and removed.

use anyhow::{Result, ensure};

use crate::Test;
use crate::world::{InstalledCluster, egress};

pub const TESTS: &[Test] = &[
    ("changes::a_pod_follows_its_labels", a_pod_follows_its_labels),
    ("changes::destinations_and_policies_change", destinations_and_policies_change),
    ("changes::a_pod_that_comes_back_with_the_address_of_another_is_what_its_labels_say", address_reused),
];

fn a_pod_follows_its_labels(world: &InstalledCluster) -> Result<()> {
    let pods = world.deploy("web", 1)?;
    world.pool("public", 10, 11)?;
    world.policy("web", "web", "203.0.113.0/24", 2)?;
    let pod = &pods[0];
    world.wait_sources(pod, 0, &egress([10, 11]))?;
    world.cluster.kubectl(&["label", "pod", &pod.name, "app=other", "--overwrite"])?;
    world.wait_sources(pod, 0, &[world.plain(&pod.node)])?;
    world.cluster.kubectl(&["label", "pod", &pod.name, "app=web", "--overwrite"])?;
    world.wait_sources(pod, 0, &egress([10, 11]))
}

fn destinations_and_policies_change(world: &InstalledCluster) -> Result<()> {
    let pods = world.deploy("web", 1)?;
    let pod = &pods[0];
    world.pool("public", 10, 12)?;
    world.policy("web", "web", "203.0.113.7/32", 1)?;
    world.wait_sources(pod, 0, &egress([10]))?;
    world.wait_sources(pod, 1, &[world.plain(&pod.node)])?;
    world.policy("web", "web", "203.0.113.0/24", 2)?;
    world.wait_sources(pod, 1, &egress([10, 11]))?;
    // A longer prefix of another policy wins, only for its destination.
    world.policy("special", "web", "203.0.113.8/32", 1)?;
    world.wait_sources(pod, 1, &egress([12]))?;
    world.wait_sources(pod, 0, &egress([10, 11]))?;
    world.cluster.kubectl(&["delete", "egp", "special", "web"])?;
    world.wait_sources(pod, 0, &[world.plain(&pod.node)])?;
    world.policy("web", "web", "203.0.113.0/24", 3)?;
    world.wait_sources(pod, 0, &egress(10..=12))
}

fn address_reused(world: &InstalledCluster) -> Result<()> {
    let pods = world.deploy("web", 1)?;
    world.pool("public", 10, 10)?;
    world.policy("web", "web", "203.0.113.0/24", 1)?;
    let old = &pods[0];
    world.wait_sources(old, 0, &egress([10]))?;
    // The bridge CNI assigns addresses in turn: resetting its memory of the last one gives the next pod the same address.
    world.cluster.kubectl(&["delete", "deployment", "web", "--wait=true", "--cascade=foreground"])?;
    let mut shell = world.cluster.on_node(&old.node)?;
    let last: u8 = old.ip.octets()[3] - 1;
    let [a, b, c, _] = old.ip.octets();
    let script = format!(
        "d=/var/lib/cni/networks/lab; while [ -e $d/{} ]; do :; done; printf {a}.{b}.{c}.{last} > $d/last_reserved_ip.0",
        old.ip
    );
    ensure!(shell.args(["timeout", "30", "sh", "-c", &script]).status()?.success(), "the CNI's memory");
    world.cluster.apply(&format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: heir, labels: {{deployment: heir, app: other}}}}, spec: {{
           nodeName: {}, terminationGracePeriodSeconds: 1,
           containers: [{{name: pod, image: '{}', imagePullPolicy: Never}}]}}}}",
        old.node,
        lab::cluster::POD_IMAGE
    ))?;
    let heir = world.cluster.deployed("heir", 1)?;
    ensure!(
        heir[0].ip == old.ip,
        "{} is not {}: the address was not reused, so the test proves nothing",
        heir[0].ip,
        old.ip
    );
    world.wait_sources(&heir[0], 0, &[world.plain(&old.node)])
}
