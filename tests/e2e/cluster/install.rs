//! The installation itself: rights, restarts, upgrades.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::cluster::SERVERS;
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Capture, wait_until};
use serde_json::Value;

use crate::Test;
use crate::world::{PATIENCE, World, egress};

pub const TESTS: &[Test] = &[
    ("install::an_agent_may_not_write_for_another_node", an_agent_may_not_write_for_another_node),
    ("install::the_daemonset_is_rolled_under_load", the_daemonset_is_rolled_under_load),
    ("install::every_right_is_used_and_none_is_missing", every_right_is_used_and_none_is_missing),
];

/// The token of the agent on a node, as the kubelet would give it to its pod.
fn an_agent_may_not_write_for_another_node(world: &World) -> Result<()> {
    let pods = world.cluster.get(&["pods", "-n", "spillway", "-l", "app.kubernetes.io/component=agent"])?;
    let pods = pods["items"].as_array().cloned().unwrap_or_default();
    let pod = pods.iter().find(|pod| pod["spec"]["nodeName"] == "worker1").context("no agent on worker1")?;
    let (name, uid) = (pod["metadata"]["name"].as_str().unwrap_or_default(), pod["metadata"]["uid"].as_str());
    let bound = ["--bound-object-kind=Pod", &format!("--bound-object-name={name}")].map(ToOwned::to_owned);
    let uid = format!("--bound-object-uid={}", uid.unwrap_or_default());
    let token =
        world.cluster.kubectl(&["create", "token", "-n", "spillway", "spillway-agent", &bound[0], &bound[1], &uid])?;
    let token = format!("--token={}", token.trim());
    let try_on = |node: &str| {
        let object = world.cluster.kubectl(&["get", "egn", node, "-o", "json"])?;
        let path = format!("/apis/spillway.io/v1alpha1/egressnodes/{node}/status");
        let file = world.cluster.dir().join("egressnode.json");
        std::fs::write(&file, object)?;
        // kubectl prefers the kubeconfig's credentials to --token: without them, the token alone counts.
        let anonymous = world.cluster.dir().join("anonymous.kubeconfig");
        let whole = std::fs::read_to_string(world.cluster.dir().join("kubeconfig"))?;
        std::fs::write(&anonymous, whole.replace("{token: admintoken}", "{}"))?;
        let mut command = world.cluster.kubectl_command()?;
        command.args(["--kubeconfig", &anonymous.display().to_string(), &token, "replace", "--raw", &path, "-f"]);
        let output = command.arg(&file).output()?;
        anyhow::Ok((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
    };
    let (done, error) = try_on("gateway1")?;
    ensure!(!done && error.contains("its own node"), "{error}");
    // Its own object changes all the time, so that only the reason matters.
    let (_, error) = try_on("worker1")?;
    ensure!(!error.contains("its own node") && !error.contains("orbidden"), "{error}");
    Ok(())
}

fn the_daemonset_is_rolled_under_load(world: &World) -> Result<()> {
    let pods = world.deploy("web", 3)?;
    world.pool("public", 10, 12)?;
    world.policy("web", "web", "203.0.113.0/24", 3)?;
    for pod in &pods {
        world.wait_sources(pod, 0, &egress(10..=12))?;
    }
    let outside = world.outside()?;
    let target = std::net::SocketAddr::new(SERVERS[0].parse()?, 80);
    let server = TcpServer::start(&outside, &[target], ServerMode::Stream)?;
    let captures = [Capture::start(&outside, "ext")?, Capture::start(&outside, "nodes")?];
    let mut clients = Vec::new();
    for pod in &pods {
        let options = TcpOptions { interval: Duration::from_millis(50), ..TcpOptions::default() };
        clients.push(TcpClients::establish(&pod.ns, target, 30, options)?);
    }
    // The image under another name is what an upgrade is to Kubernetes.
    world.cluster.kubectl(&["rollout", "restart", "-n", "spillway", "daemonset/spillway-agent"])?;
    world.wait_installed()?;
    for clients in &clients {
        clients.wait_progress(5, PATIENCE)?;
    }
    drop(server.connections());
    for clients in clients {
        let reports = clients.close()?;
        let broken: Vec<_> = reports.iter().filter(|one| !one.intact()).collect();
        ensure!(broken.is_empty(), "{} of 30 connections broke: {:?}", broken.len(), broken.first());
    }
    for capture in captures {
        let strangers = capture.finish()?.strangers_towards(target.ip(), &egress(10..=12));
        ensure!(strangers.is_empty(), "packets with other addresses: {strangers:?}");
    }
    Ok(())
}

/// What the API server noted of Spillway's requests is what the roles allow: nothing was refused, and nothing is unused.
fn every_right_is_used_and_none_is_missing(world: &World) -> Result<()> {
    // Everything happens once: a controller takes over, addresses come and go, a node goes.
    world.pool("public", 10, 12)?;
    world.policy("web", "web", "203.0.113.0/24", 2)?;
    world.condition("web", "Ready", "True")?;
    world.policy("web", "web", "203.0.113.0/24", 1)?;
    world.wait_owners(1, "")?;
    // An agent makes its object anew when somebody has deleted it; one without a node is removed.
    world.cluster.kubectl(&["delete", "egn", "worker1", "--wait=false"])?;
    world.cluster.apply("{apiVersion: spillway.io/v1alpha1, kind: EgressNode, metadata: {name: nobody}, spec: {}}")?;
    world.until("the object of no node is gone", &["egn"], |nodes| {
        let names =
            nodes["items"].as_array().into_iter().flatten().filter_map(|node| node["metadata"]["name"].as_str());
        let names: Vec<&str> = names.collect();
        names.contains(&"worker1") && !names.contains(&"nobody")
    })?;
    for account in ["spillway-agent", "spillway-controller"] {
        let look = || {
            let (used, refused) = used(world, account)?;
            ensure!(refused.is_empty(), "{account} may not: {refused:?}");
            let granted = granted(world, account)?;
            Ok(granted.difference(&used).cloned().collect::<Vec<_>>())
        };
        // A watch is noted when it ends, and series of events are rare: those need more patience than a test has.
        let rest = |unused: &Vec<Right>| {
            unused.iter().all(|right| {
                right.2 == "watch"
                    || right.2 == "create" && right.1 == "egressnodes"
                    || right.1 == "events" && right.2 == "patch"
            })
        };
        wait_until(&format!("{account} uses every right"), PATIENCE, look, rest)?;
    }
    Ok(())
}

/// Group, resource (with its part, such as `egressnodes/status`), verb.
type Right = (String, String, String);

fn used(world: &World, account: &str) -> Result<(BTreeSet<Right>, BTreeMap<Right, String>)> {
    let user = format!("system:serviceaccount:spillway:{account}");
    let (mut used, mut refused) = (BTreeSet::new(), BTreeMap::new());
    for line in std::fs::read_to_string(world.cluster.dir().join("audit.log"))?.lines() {
        let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
        let object = &event["objectRef"];
        if event["user"]["username"] != user.as_str() || object.is_null() {
            continue;
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut resource = text(&object["resource"]);
        if let Some(part) = object["subresource"].as_str() {
            resource = format!("{resource}/{part}");
        }
        let right = (text(&object["apiGroup"]), resource, text(&event["verb"]));
        // Other tests ask for what an agent may not do, as an agent.
        let by_us = event["userAgent"].as_str().is_some_and(|agent| agent.starts_with("kubectl"));
        if by_us {
            continue;
        }
        if event["responseStatus"]["code"] == 403 {
            refused.insert(right, text(&event["requestURI"]));
        } else {
            used.insert(right);
        }
    }
    Ok((used, refused))
}

fn granted(world: &World, account: &str) -> Result<BTreeSet<Right>> {
    let mut granted = BTreeSet::new();
    for roles in [&["clusterroles"][..], &["roles", "-A"]] {
        let list = world.cluster.get(roles)?;
        for role in list["items"].as_array().into_iter().flatten() {
            if !role["metadata"]["name"].as_str().is_some_and(|name| name.starts_with(account)) {
                continue;
            }
            for rule in role["rules"].as_array().into_iter().flatten() {
                let all = |field: &str| {
                    let values = rule[field].as_array().into_iter().flatten();
                    values.filter_map(Value::as_str).map(ToOwned::to_owned).collect::<Vec<_>>()
                };
                for group in all("apiGroups") {
                    for resource in all("resources") {
                        granted.extend(all("verbs").into_iter().map(|verb| (group.clone(), resource.clone(), verb)));
                    }
                }
            }
        }
    }
    ensure!(!granted.is_empty(), "{account} has no role");
    Ok(granted)
}
