//! Egress and ExternalIPPool: Antrea manifests work unchanged, and so do the plural fields.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context, Result};
use lab::{Family, Lab, PodSpec, wait_until};
use serde_json::Value;

use crate::support::{PATIENCE, egress, owner, start, wait_owner, wait_sources};

const V4: Family = Family::V4;

fn object(kind: &str, name: &str, spec: &str) -> String {
    format!("apiVersion: crd.antrea.io/v1beta1\nkind: {kind}\nmetadata:\n  name: {name}\nspec:\n{spec}\n")
}

/// A pool of a CIDR on the lab's gateways.
fn pool(name: &str, cidr: &str) -> String {
    object(
        "ExternalIPPool",
        name,
        &format!("  ipRanges:\n  - cidr: {cidr}\n  nodeSelector:\n    matchLabels:\n      egress: \"true\""),
    )
}

/// An Egress for the pods with this value of the label `app`.
fn of_app(name: &str, app: &str, rest: &str) -> String {
    object("Egress", name, &format!("  appliedTo:\n    podSelector:\n      matchLabels:\n        app: {app}\n{rest}"))
}

/// Returns the status of an object from the store.
fn status(lab: &Lab, kind: &str, name: &str) -> Result<Value> {
    let text = lab.manifests().written(&format!("status/{kind}"), name).context("no record yet")?;
    let record: Value = serde_saphyr::from_str(&text)?;
    Ok(record["status"].clone())
}

/// Returns the `status` field of one condition.
fn condition<'a>(status: &'a Value, kind: &str) -> Option<&'a str> {
    let all = status["conditions"].as_array()?;
    all.iter().find(|condition| condition["type"] == kind)?["status"].as_str()
}

fn wait_status(lab: &Lab, kind: &str, name: &str, good: impl Fn(&Value) -> bool) -> Result<Value> {
    let look = || Ok(status(lab, kind, name).unwrap_or_default());
    wait_until(&format!("the status of {kind} {name}"), PATIENCE, look, good)
}

#[test]
fn egress_gets_a_pool_address_and_its_status_names_address_and_node() {
    Lab::builder().workers(1).run(|lab| {
        lab.manifests().write("pool", &pool("prod-external-ip-pool", "192.0.2.32/28"))?;
        lab.manifests().write("empty-pool", &pool("too-small", "192.0.2.64/31"))?;
        lab.manifests().write("egress", &of_app("egress-web", "web", "  externalIPPool: prod-external-ip-pool"))?;
        lab.manifests().write(
            "both",
            &of_app("egress-both", "both", "  externalIPPool: prod-external-ip-pool\n  egressIP: 192.0.2.40"),
        )?;
        lab.manifests().write("starved", &of_app("egress-starved", "starved", "  externalIPPool: too-small"))?;
        lab.manifests()
            .write("nobody", &object("Egress", "nobody", "  appliedTo: {}\n  externalIPPool: prod-external-ip-pool"))?;
        let [web, both, none] = ["web", "both", "none"].map(|app| PodSpec::new(app, "worker1").label("app", app));
        let (web, both, none) = (lab.add_pod(web)?, lab.add_pod(both)?, lab.add_pod(none)?);
        start(lab)?;
        let server = lab.server("server1").clone();
        // `Ready` follows once the datapath has the egress IP.
        let is_served =
            |status: &Value| ["IPAssigned", "Ready"].iter().all(|kind| condition(status, kind) == Some("True"));
        let served = wait_status(lab, "Egress", "egress-web", is_served)?;
        let ip: IpAddr = served["egressIP"].as_str().context("an address")?.parse()?;
        assert!((33..=46).map(|host| IpAddr::from([192, 0, 2, host])).any(|one| one == ip), "{ip}");
        assert_eq!(served["egressNode"].as_str(), owner(lab, ip).as_deref());
        assert_eq!((condition(&served, "IPAllocated"), condition(&served, "Ready")), (Some("True"), Some("True")));
        wait_sources(&web.ns, &server, V4, &[ip])?;
        wait_sources(&both.ns, &server, V4, &["192.0.2.40".parse()?])?;
        // Its pool is IPv4-only: as with Antrea, the Egress does not apply to IPv6.
        wait_sources(&web.ns, &server, Family::V6, &[lab.node("worker1").underlay.ip(Family::V6)])?;
        wait_sources(&none.ns, &server, V4, &[lab.node("worker1").underlay.ip(V4)])?;
        // Of a /28, 14 addresses can be assigned; of a /31, none.
        let usage = |total: u64, used: u64| {
            move |status: &Value| status["usage"]["total"] == total && status["usage"]["used"] == used
        };
        wait_status(lab, "ExternalIPPool", "prod-external-ip-pool", usage(14, 3))?;
        wait_status(lab, "ExternalIPPool", "too-small", usage(0, 0))?;
        let starved =
            wait_status(lab, "Egress", "egress-starved", |status| condition(status, "Ready") == Some("False"))?;
        assert_eq!(
            (condition(&starved, "IPAllocated"), condition(&starved, "IPAssigned")),
            (Some("False"), Some("False"))
        );
        assert!(starved["egressIP"].is_null(), "{starved}");
        Ok(())
    });
}

#[test]
fn egress_with_only_an_address_follows_the_node_that_has_it() {
    Lab::builder().workers(1).run(|lab| {
        let own = egress(V4, &[50])[0];
        lab.manifests().write("egress", &of_app("egress-web", "web", &format!("  egressIP: {own}")))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        // No node has the address: nothing leaves.
        wait_until(
            "it is not assigned",
            PATIENCE,
            || Ok(status(lab, "Egress", "egress-web").unwrap_or_default()),
            |status| condition(status, "IPAssigned") == Some("False"),
        )?;
        wait_until(
            "nothing leaves",
            PATIENCE,
            || crate::support::sources(&pod.ns, &server, V4, 4),
            |seen| seen.is_empty(),
        )?;
        let mut epoch = 0;
        for node in ["gw2", "gw3"] {
            lab.node(node).ns.ip(&[format!("addr add {own}/24 dev ext0")])?;
            wait_owner(lab, own, |owner| owner == node)?;
            // The server still has the neighbour entry of the previous node. An administrator who moves an address announces it.
            server.ns.ip(&["neigh flush all".to_owned()])?;
            wait_sources(&pod.ns, &server, V4, &[own])?;
            let slots = wait_status(lab, "Egress", "egress-web", |status| status["egressNode"] == node)?;
            let now = slots["slots"][0]["epoch"].as_u64().context("an epoch")?;
            assert!(now > epoch, "{slots}");
            epoch = now;
            lab.node(node).ns.ip(&[format!("addr del {own}/24 dev ext0")])?;
        }
        wait_status(lab, "Egress", "egress-web", |status| condition(status, "IPAssigned") == Some("False")).map(drop)
    });
}

#[test]
fn several_pools_and_several_addresses_serve_one_egress() {
    Lab::builder().workers(1).run(|lab| {
        for (name, cidr) in [("a", "192.0.2.32/30"), ("b", "192.0.2.48/28"), ("six", "2001:db8:2::40/124")] {
            lab.manifests().write(name, &pool(name, cidr))?;
        }
        lab.manifests().write("egress", &of_app("plural", "web", "  externalIPPools: [a, b, six]"))?;
        lab.manifests().write(
            "named",
            &of_app("named", "named", "  externalIPPools: [a, b]\n  egressIPs: [192.0.2.60, 192.0.2.34, 192.0.2.61]"),
        )?;
        let web = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let named = lab.add_pod(PodSpec::new("named", "worker1").label("app", "named"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        let v4 = |hosts: &[u8]| hosts.iter().map(|host| IpAddr::from([192, 0, 2, *host])).collect::<Vec<_>>();
        wait_sources(&web.ns, &server, V4, &v4(&[33, 49]))?;
        wait_sources(&web.ns, &server, Family::V6, &["2001:db8:2::41".parse()?])?;
        wait_sources(&named.ns, &server, V4, &v4(&[34, 60, 61]))?;
        let owners: BTreeSet<Option<String>> = v4(&[34, 60, 61]).into_iter().map(|ip| owner(lab, ip)).collect();
        assert_eq!(owners.len(), 3, "on different nodes: {owners:?}");
        Ok(())
    });
}
