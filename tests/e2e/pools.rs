//! Addresses of pools across policies, limits per node, and changes of nodes' own addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::{Context, Result};
use lab::{Family, Lab, PodSpec, StartOptions, wait_until};
use serde_json::Value;

use crate::support::{
    CALM, PATIENCE, WEB, calm, egress, named, of_app, owner, policy, pool, sources, start, start_with, wait_sources,
};

/// Returns the status of a policy from the store.
fn status(lab: &Lab, name: &str) -> Value {
    let text = lab.manifests().written("status/EgressGatewayPolicy", name).unwrap_or_default();
    serde_saphyr::from_str::<Value>(&text).map(|record| record["status"].clone()).unwrap_or_default()
}

/// Returns the node of each address in a policy's slots.
fn slots(status: &Value) -> BTreeMap<IpAddr, Option<String>> {
    let slot =
        |slot: &Value| Some((slot["egressIP"].as_str()?.parse().ok()?, slot["node"].as_str().map(str::to_owned)));
    status["slots"].as_array().into_iter().flatten().filter_map(slot).collect()
}

/// Adds an annotation to a Node object.
fn annotate(lab: &Lab, node: &str, key: &str, value: &str) -> Result<()> {
    let name = format!("node-{node}");
    let mut object: Value = serde_saphyr::from_str(&lab.manifests().read(&name)?)?;
    object["metadata"]["annotations"][key] = value.into();
    lab.manifests().write(&name, &object.to_string())
}

#[test]
fn addresses_of_several_pools_lie_on_different_nodes_over_all_policies() {
    Lab::builder().workers(1).run(|lab| {
        lab.manifests().write("a", &pool("a", 40, 45, Some("10s")))?;
        lab.manifests().write("b", &pool("b", 50, 55, Some("10s")))?;
        lab.manifests().write("web", &of_app("web", "\n  egressIPPools: [{name: a, count: 2}, {name: b}]"))?;
        lab.manifests().write("api", &of_app("api", "\n  egressIPPools: [{name: a}, {name: b, count: 2}]"))?;
        let web = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let api = lab.add_pod(PodSpec::new("api", "worker1").label("app", "api"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        let mut all: BTreeMap<String, usize> = BTreeMap::new();
        for (name, pod) in [("web", &web), ("api", &api)] {
            let nodes = |slots: &BTreeMap<IpAddr, Option<String>>, family: Family| -> BTreeSet<String> {
                let of_family = slots.iter().filter(|(ip, _)| ip.is_ipv4() == (family == Family::V4));
                of_family.filter_map(|(_, node)| node.clone()).collect()
            };
            // The first gateways to be ready carry everything at first.
            let served = wait_until(
                "three addresses a family, each on a node of its own",
                PATIENCE,
                || Ok(slots(&status(lab, name))),
                |slots| slots.len() == 6 && Family::BOTH.iter().all(|family| nodes(slots, *family).len() == 3),
            )?;
            for family in Family::BOTH {
                let of_family = served.keys().filter(|ip| ip.is_ipv4() == (family == Family::V4));
                wait_sources(&pod.ns, &server, family, &of_family.copied().collect::<Vec<_>>())?;
            }
            served.into_values().flatten().for_each(|node| *all.entry(node).or_default() += 1);
        }
        assert_eq!(all.into_values().collect::<Vec<_>>(), [4, 4, 4]);
        Ok(())
    });
}

#[test]
fn address_waits_at_the_pools_node_limit_until_there_is_room() {
    at_the_limit("\n  maxEgressIPsPerNode: 2", &calm());
}

#[test]
fn address_waits_at_the_configured_node_limit_until_there_is_room() {
    at_the_limit("", &StartOptions::new().config(&format!("{CALM}maxEgressIPsPerNode: 2\n")));
}

/// Allows at most two addresses on each of two gateways, by a field of the pool or by the configuration.
fn at_the_limit(field: &str, options: &StartOptions) {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let limited = format!("{}{field}\n", pool("public", 40, 45, Some("10s")).trim_end());
        lab.manifests().write("pool", &limited)?;
        lab.manifests().write("web", &of_app("web", "\n  egressIPPools: [{name: public, count: 3}]"))?;
        let web = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        start_with(lab, options)?;
        let server = lab.server("server1").clone();
        // Four of six addresses fit, two on each gateway.
        let at_capacity = |status: &Value| {
            let waits =
                |one: &Value| one["type"] == "Degraded" && one["status"] == "True" && one["reason"] == "AtCapacity";
            status["conditions"].as_array().is_some_and(|all| all.iter().any(waits))
                && slots(status).values().filter(|node| node.is_some()).count() == 4
        };
        let before = slots(&wait_until("two addresses wait", PATIENCE, || Ok(status(lab, "web")), at_capacity)?);
        let per_node = |slots: &BTreeMap<IpAddr, Option<String>>| -> Vec<usize> {
            let count = |node: &str| slots.values().filter(|owner| owner.as_deref() == Some(node)).count();
            ["gw1", "gw2"].map(count).to_vec()
        };
        assert_eq!(per_node(&before), [2, 2]);
        let carried = |slots: &BTreeMap<IpAddr, Option<String>>, family: Family| -> Vec<IpAddr> {
            let served = slots.iter().filter(|(ip, node)| node.is_some() && ip.is_ipv4() == (family == Family::V4));
            served.map(|(ip, _)| *ip).collect()
        };
        for family in Family::BOTH {
            wait_sources(&web.ns, &server, family, &carried(&before, family))?;
        }
        // Our annotation on one node and Antrea's on the other make room.
        annotate(lab, "gw1", "spillway.io/max-egress-ips", "3")?;
        annotate(lab, "gw2", "node.antrea.io/max-egress-ips", "3")?;
        let served = |slots: &BTreeMap<IpAddr, Option<String>>| slots.values().all(Option::is_some) && slots.len() == 6;
        let after = wait_until("all are served", PATIENCE, || Ok(slots(&status(lab, "web"))), served)?;
        assert_eq!(per_node(&after), [3, 3]);
        let stayed = before.iter().filter(|(_, node)| node.is_some()).all(|(ip, node)| after[ip] == *node);
        assert!(stayed, "{before:?} {after:?}");
        for family in Family::BOTH {
            wait_sources(&web.ns, &server, family, &carried(&after, family))?;
        }
        Ok(())
    });
}

#[test]
fn a_gateway_by_interface_follows_the_address_of_the_interface() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let spec = format!(
            "{WEB}\n  egressGateways: [{{nodeSelector: {{matchLabels: {{{}}}}}, interface: ext0}}]",
            named("gw1")
        );
        lab.manifests().write("web", &policy("web", &spec))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        let gateway = lab.node("gw1").clone();
        let old = egress(Family::V4, &[101])[0];
        wait_sources(&pod.ns, &server, Family::V4, &[old])?;
        for host in [61, 62] {
            let new = egress(Family::V4, &[host])[0];
            let before = owner_address(lab)?;
            gateway.ns.ip(&[format!("addr del {before}/24 dev ext0"), format!("addr add {new}/24 dev ext0")])?;
            wait_sources(&pod.ns, &server, Family::V4, &[new])?;
            assert_eq!(owner(lab, new).as_deref(), Some("gw1"));
        }
        // The node's own connections continue.
        assert_eq!(
            sources(&gateway.ns, &server, Family::V4, 10)?.into_keys().collect::<Vec<_>>(),
            egress(Family::V4, &[62])
        );
        Ok(())
    });
}

/// Returns the only IPv4 address in the policy's slots.
fn owner_address(lab: &Lab) -> Result<IpAddr> {
    slots(&status(lab, "web")).into_keys().find(IpAddr::is_ipv4).context("an IPv4 address")
}
