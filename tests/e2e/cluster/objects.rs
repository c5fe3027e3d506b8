//! What users see and write: columns, conditions, rejections, events.

use anyhow::{Result, ensure};

use crate::Test;
use crate::world::{InstalledCluster, PATIENCE, egress};

pub const TESTS: &[Test] = &[
    ("objects::kubectl_shows_states_addresses_owners_and_events", kubectl_shows_states_addresses_owners_and_events),
    ("objects::bad_objects_are_refused_with_a_remedy", bad_objects_are_refused_with_a_remedy),
    ("objects::object_of_the_previous_version_takes_effect_unchanged", alpha_objects),
    ("objects::a_pool_that_is_exhausted_says_so_until_addresses_come_free", exhaustion),
    ("objects::every_example_applies_and_is_in_force", every_example_applies_and_is_in_force),
    ("objects::tenant_a_team_writes_its_own_policy", tenant_a_team_writes_its_own_policy),
    ("objects::fifty_policies_of_one_address_are_ten_on_each_of_five_gateways", fifty_policies),
];

fn kubectl_shows_states_addresses_owners_and_events(world: &InstalledCluster) -> Result<()> {
    let pods = world.deploy("web", 2)?;
    world.pool("public", 10, 12)?;
    world.policy("web", "web", "203.0.113.0/24", 3)?;
    let (reason, message) = world.condition("web", "Ready", "True")?;
    ensure!(reason == "AsExpected" && message.contains("spread over its egress IPs"), "{reason}: {message}");
    world.until("both pods are counted", &["egp", "web"], |policy| policy["status"]["selectedEndpoints"] == 2)?;
    for pod in &pods {
        world.wait_sources(pod, 0, &egress(10..=12))?;
    }
    let owners = world.wait_owners(3, "")?;
    let policies = world.cluster.kubectl(&["get", "egp"])?;
    ensure!(
        policies.lines().next().is_some_and(|l| ["READY", "ENDPOINTS", "EGRESS IPS"].iter().all(|c| l.contains(c)))
    );
    ensure!(policies.contains("True") && policies.contains("192.0.2.10, 192.0.2.11, 192.0.2.12"), "{policies}");
    let ips = world.cluster.kubectl(&["get", "spillway"])?;
    for (address, (node, _)) in &owners {
        ensure!(ips.lines().any(|l| l.contains(&address.to_string()) && l.contains(node.as_str())), "{address}: {ips}");
    }
    let pools = world.cluster.kubectl(&["get", "eipp", "public"])?;
    ensure!(
        pools.lines().last().is_some_and(|line| line.split_whitespace().take(3).eq(["public", "3", "3"])),
        "{pools}"
    );
    let nodes = world.cluster.kubectl(&["get", "egn"])?;
    ensure!(nodes.lines().filter(|line| line.contains("True")).count() == 6, "{nodes}");

    let events = ["events.events.k8s.io", "-n", "default"];
    let has = |list: &serde_json::Value, kind: &str, reason: &str| {
        let events = list["items"].as_array().into_iter().flatten();
        events.into_iter().any(|event| event["regarding"]["kind"] == kind && event["reason"] == reason)
    };
    world.until("events tell what happened", &events, |list| {
        has(list, "EgressIP", "Allocated")
            && has(list, "EgressIP", "Moved")
            && has(list, "EgressGatewayPolicy", "Ready")
    })?;
    let explained = world.cluster.kubectl(&["explain", "egp.spec.distribution"])?;
    ensure!(explained.contains("PerEndpoint"), "{explained}");
    Ok(())
}

/// docs/failures.md: tenant.
fn tenant_a_team_writes_its_own_policy(world: &InstalledCluster) -> Result<()> {
    world.team("team-a", true)?;
    world.team("team-b", false)?;
    let bind = ["create", "rolebinding", "dev", "-n", "team-a", "--clusterrole=edit", "--serviceaccount=team-a:dev"];
    world.cluster.try_kubectl(&bind)?;
    let may = |kind: &str, scope: &str| -> Result<bool> {
        let dev = "--as=system:serviceaccount:team-a:dev";
        let answer = world.cluster.try_kubectl(&["auth", "can-i", "create", kind, scope, dev])?;
        Ok(String::from_utf8_lossy(&answer.stdout).trim() == "yes")
    };
    lab::wait_for("the role edit has Spillway's rights", PATIENCE, || {
        may("egresspolicies.spillway.io", "--namespace=team-a")
    })?;
    ensure!(!may("egresspolicies.spillway.io", "--namespace=team-b")?, "the policies of another namespace");
    ensure!(!may("egressgatewaypolicies.spillway.io", "--all-namespaces")?, "policies of the cluster");

    let condition = |kind: &'static str, reason: &'static str| {
        move |policy: &serde_json::Value| {
            let conditions = policy["status"]["conditions"].as_array().into_iter().flatten();
            conditions.into_iter().any(|condition| condition["type"] == kind && condition["reason"] == reason)
        }
    };
    let (ready, refused) = (condition("Ready", "AsExpected"), condition("Degraded", "NotAllowed"));
    world.until("the team's policy is in force", &["egpol", "team", "-n", "team-a"], ready)?;
    world.until("the other team learns why its policy is not", &["egpol", "team", "-n", "team-b"], refused)?;
    world.until("in an event, too", &["events.events.k8s.io", "-n", "team-b"], |list| {
        let mut events = list["items"].as_array().into_iter().flatten();
        events.any(|event| event["regarding"]["kind"] == "EgressPolicy" && event["reason"] == "Degraded")
    })?;
    Ok(())
}

fn bad_objects_are_refused_with_a_remedy(world: &InstalledCluster) -> Result<()> {
    let policy = |spec: &str| {
        format!(
            "{{apiVersion: spillway.io/v1beta1, kind: EgressGatewayPolicy, metadata: {{name: bad}}, spec: {{{spec}}}}}"
        )
    };
    for (spec, part) in [
        (
            "selectors: [{podSelector: {}}], destinationCIDRs: [203.0.113.7/24], egressIPPools: [{name: public}]",
            "write",
        ),
        ("selectors: [{podSelector: {}}], destinationCIDRs: [203.0.113.0/24]", "egress"),
        ("destinationCIDRs: [203.0.113.0/24], egressIPPools: [{name: public}]", "selectors"),
    ] {
        let Err(refusal) = world.cluster.apply(&policy(spec)) else { anyhow::bail!("{spec} was accepted") };
        let refusal = format!("{refusal:#}");
        ensure!(refusal.contains("is invalid") && refusal.contains(part), "{spec}: {refusal}");
    }
    Ok(())
}

/// An object of the previous version takes effect unchanged, is served in both versions, and stays when only its status is written.
fn alpha_objects(world: &InstalledCluster) -> Result<()> {
    let policy = |version: &str| {
        format!(
            "{{apiVersion: spillway.io/{version}, kind: EgressGatewayPolicy, metadata: {{name: old}}, spec: {{
               selectors: [{{podSelector: {{matchLabels: {{app: web}}}}}}], destinationCIDRs: [203.0.113.0/24],
               egressIPPool: {{name: public}}}}}}"
        )
    };
    let pods = world.deploy("web", 1)?;
    world.pool("public", 10, 10)?;
    let Err(refusal) = world.cluster.apply(&policy("v1beta1")) else { anyhow::bail!("a short form was accepted") };
    ensure!(format!("{refusal:#}").contains("write egressIPPools with one entry"), "{refusal:#}");
    world.cluster.apply(&policy("v1alpha1"))?;
    world.wait_sources(&pods[0], 0, &egress([10]))?;
    world.condition("old", "Ready", "True")?;
    for version in ["v1alpha1", "v1beta1"] {
        let object = world.cluster.get(&[&format!("egressgatewaypolicies.{version}.spillway.io"), "old"])?;
        ensure!(object["apiVersion"] == format!("spillway.io/{version}"), "{object}");
        ensure!(object["spec"]["egressIPPool"]["name"] == "public", "{version}: {object}");
    }
    Ok(())
}

fn exhaustion(world: &InstalledCluster) -> Result<()> {
    let pods = world.deploy("web", 1)?;
    world.pool("public", 10, 12)?;
    world.policy("first", "web", "203.0.113.7/32", 2)?;
    world.condition("first", "Ready", "True")?;
    world.policy("second", "web", "203.0.113.8/32", 2)?;
    let (reason, message) = world.condition("second", "Degraded", "True")?;
    ensure!(message.contains("public"), "the pool is named: {reason}: {message}");
    // The policy that has everything it asked for is unaffected, and the other one uses the rest.
    world.condition("first", "Degraded", "False")?;
    world.wait_sources(&pods[0], 1, &egress([12]))?;
    world.policy("first", "web", "203.0.113.7/32", 1)?;
    world.condition("second", "Degraded", "False")?;
    world.condition("second", "Ready", "True").map(drop)
}

fn every_example_applies_and_is_in_force(world: &InstalledCluster) -> Result<()> {
    let examples = world.manifests.join("examples");
    let mut names: Vec<String> = std::fs::read_dir(&examples)?
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.ends_with(".yaml"))
        .collect();
    names.sort();
    ensure!(names.len() >= 5, "{names:?}");
    for name in &names {
        world.cluster.kubectl(&["apply", "-f", &examples.join(name).display().to_string()])?;
    }
    let policies = world.cluster.get(&["egp"])?;
    let policies: Vec<&str> = policies["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|policy| policy["metadata"]["name"].as_str())
        .collect();
    ensure!(policies.len() >= 4, "{policies:?}");
    for policy in policies {
        world.condition(policy, "Ready", "True")?;
    }
    // The comments say: web has any of three addresses, and its partner an address of its own; ledger has one per pod;
    // mail has those that it names, by their weights.
    let (web, ledger, mail) = (world.deploy("web", 1)?, world.deploy("ledger", 3)?, world.deploy("mail", 1)?);
    world.wait_sources(&web[0], 0, &egress(10..=12))?;
    world.wait_sources(&web[0], 2, &egress([40]))?;
    world.wait_sources(&web[0], 1, &egress(10..=12))?;
    world.wait_sources(&mail[0], 0, &egress(30..=32))?;
    // The tolerance is four standard deviations of the largest share.
    let (count, tolerance) = (600, 49);
    let seen = world.sources(&mail[0], 0, 7001, count)?;
    for (address, sixths) in egress(30..=32).into_iter().zip([3, 2, 1]) {
        let (has, due) = (seen.get(&address).copied().unwrap_or(0), count * sixths / 6);
        ensure!(has.abs_diff(due) <= tolerance, "{address} has {has} of {count} connections, not {due}: {seen:?}");
    }
    let assigned = |node: &serde_json::Value| {
        let items = node["items"].as_array().into_iter().flatten().cloned().collect::<Vec<_>>();
        let all = items.iter().flat_map(|node| node["spec"]["assignments"].as_array().cloned().unwrap_or_default());
        all.filter(|one| one["egressIP"].as_str().is_some_and(|ip| ip.starts_with("192.0.2."))).collect::<Vec<_>>()
    };
    let nodes = world.until("each ledger pod has an address", &["egn"], |nodes| assigned(nodes).len() == 3)?;
    for one in assigned(&nodes) {
        let (ip, pod) =
            (one["egressIP"].as_str().unwrap_or_default(), one["endpoints"][0].as_str().unwrap_or_default());
        let name = pod.split('/').nth(1).unwrap_or_default();
        let Some(pod) = ledger.iter().find(|pod| pod.name == name) else { anyhow::bail!("{name} is no ledger pod") };
        world.wait_sources(pod, 0, &[ip.parse()?])?;
    }
    Ok(())
}

fn fifty_policies(world: &InstalledCluster) -> Result<()> {
    let gateways = ["worker1", "worker2", "gateway1", "gateway2", "gateway3"];
    let mut objects = format!(
        "{{apiVersion: spillway.io/v1beta1, kind: EgressIPPool, metadata: {{name: public}}, spec: {{
           ipRanges: [{{start: 192.0.2.10, end: 192.0.2.99}}],
           nodeSelector: {{matchExpressions: [{{key: kubernetes.io/hostname, operator: In, values: [{}]}}]}}}}}}\n",
        gateways.join(", ")
    );
    for number in 0..50 {
        objects += &format!(
            "---\n{{apiVersion: spillway.io/v1beta1, kind: EgressGatewayPolicy, metadata: {{name: p{number}}}, spec: {{
               selectors: [{{podSelector: {{matchLabels: {{app: p{number}}}}}}}], destinationCIDRs: [203.0.113.0/24],
               egressIPPools: [{{name: public, count: 1}}]}}}}\n"
        );
    }
    world.cluster.apply(&objects)?;
    let count = |owners: &std::collections::BTreeMap<_, (String, u64)>| {
        gateways.map(|gateway| owners.values().filter(|(node, _)| node == gateway).count())
    };
    let owners = || world.owners();
    lab::wait_until("ten egress IPs on each gateway", crate::world::PATIENCE, owners, |owners| count(owners) == [10; 5])
        .map(drop)
}
