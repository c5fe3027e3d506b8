//! The installation itself: rights, restarts, upgrades.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use lab::cluster::SERVERS;
use lab::traffic::{ConnectRate, ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Capture, wait_until};
use serde_json::Value;

use crate::Test;
use crate::world::{InstalledCluster, PATIENCE, egress};

pub const TESTS: &[Test] = &[
    ("install::beside_flannel_traffic_between_pods_is_left_alone", flannel_is_left_alone),
    ("install::an_agent_may_not_write_for_another_node", an_agent_may_not_write_for_another_node),
    ("install::the_daemonset_is_rolled_under_load", the_daemonset_is_rolled_under_load),
    ("install::a_job_reports_beforehand_that_the_cluster_is_suitable", a_job_says_that_the_cluster_will_do),
    ("install::every_right_is_used_and_none_is_missing", every_right_is_used_and_none_is_missing),
    // This test removes rights before agents, so refusals after that are no failures.
    ("install::uninstalling_leaves_every_node_clean_and_keeps_the_logs", uninstalling_leaves_every_node_clean),
];

/// Runs the Job of manifests/pre as shipped: it has all the rights that it needs, and reports no failure on this cluster.
fn a_job_says_that_the_cluster_will_do(world: &InstalledCluster) -> Result<()> {
    let file = world.manifests.join("pre/check.yaml").display().to_string();
    let kubectl = |arguments: &[&str]| world.cluster.kubectl(arguments);
    kubectl(&["apply", "-f", &file])?;
    let waited = kubectl(&["wait", "job/spillway-check", "--for=jsonpath={.status.conditions}", "--timeout=90s"]);
    let said = kubectl(&["logs", "job/spillway-check"]);
    kubectl(&["delete", "-f", &file, "--wait=true"])?;
    let (_, said) = (waited?, said?);
    ensure!(said.contains("Kubernetes 1.") && said.contains("0 failures"), "{said}");
    // Before Kubernetes 1.33, no object names the network of Services.
    let unnamed = said.contains("Kubernetes 1.32") && said.contains("no object names the network of Services");
    ensure!(said.contains("Services are in 10.96.0.0/16") || unnamed, "{said}");
    ensure!(!said.contains("access"), "{said}");
    Ok(())
}

/// Lists the remains of Spillway on a node: pins, run files, the tunnel device, nftables tables, rules, routes, filters at interfaces.
const LEFT: &str = "find /sys/fs/bpf/spillway 2>/dev/null; find /run/spillway -mindepth 1 2>/dev/null; \
                    ip -o link show spillway0 2>/dev/null; nft list tables | grep spillway; \
                    for f in -4 -6; do ip $f rule show | grep '^37712:'; \
                    for t in 21328 83; do ip $f route show table $t 2>/dev/null; done; done; \
                    for i in $(ls /sys/class/net); do tc filter show dev $i ingress; tc filter show dev $i egress; done 2>/dev/null | \
                    grep -i spillway; true";

/// Runs a script on a node and returns its output. Fails if the script fails.
fn left_on(world: &InstalledCluster, node: &str, script: &str) -> Result<String> {
    let text = lab::command::output(world.cluster.on_node(node)?.args(["sh", "-c", script]));
    Ok(text.with_context(|| format!("{node}: {script}"))?.trim().to_owned())
}

/// Uninstalls as docs/install.md says, with kubectl and with Helm.
fn uninstalling_leaves_every_node_clean(world: &InstalledCluster) -> Result<()> {
    let manifests = world.manifests.display().to_string();
    let kubectl = || world.cluster.kubectl(&["delete", "-k", &manifests, "--wait=true", "--timeout=120s"]);
    let clean = leaves_every_node_clean(world, kubectl).and_then(|()| helm_installs_upgrades_and_uninstalls(world));
    world.cluster.install(&world.manifests)?;
    clean
}

fn helm_installs_upgrades_and_uninstalls(world: &InstalledCluster) -> Result<()> {
    let chart = world.manifests.join("chart").display().to_string();
    let helm = |verb: &str, more: &[&str]| {
        world.cluster.helm(&[&[verb, "spillway", "--namespace", "spillway", "--wait", "--timeout=180s"], more].concat())
    };
    helm("install", &[&chart, "--create-namespace"])?;
    world.wait_installed()?;
    helm("upgrade", &[&chart, "--reset-then-reuse-values", "--set", "config.drainTimeout=30m"])?;
    world.wait_installed()?;
    leaves_every_node_clean(world, || helm("uninstall", &[]))
}

/// Removes Spillway while a policy is in use.
fn leaves_every_node_clean(world: &InstalledCluster, uninstall: impl FnOnce() -> Result<String>) -> Result<()> {
    let pods = world.deploy("web", 1)?;
    world.pool("public", 10, 11)?;
    world.policy("web", "web", "203.0.113.0/24", 2)?;
    world.wait_sources(&pods[0], 0, &egress([10, 11]))?;
    let nodes: Vec<&str> = world.cluster.nodes().iter().map(|node| node.name.as_str()).collect();
    for node in &nodes {
        ensure!(
            left_on(world, node, LEFT)?.contains("/sys/fs/bpf/spillway"),
            "{node}: the test sees no trace of Spillway while it is installed"
        );
    }
    uninstall()?;
    let look = || nodes.iter().map(|node| Ok((*node, left_on(world, node, LEFT)?))).collect::<Result<BTreeMap<_, _>>>();
    wait_until("every node is clean", PATIENCE, look, |all| all.values().all(String::is_empty))?;
    // Only gateways have a log of leases.
    let logs = |node: &&str| left_on(world, node, "find /var/lib/spillway -type f");
    let logs = nodes.iter().map(logs).collect::<Result<String>>()?;
    ensure!(!logs.is_empty(), "the logs are gone");
    // A pod that was selected continues as if there had never been a policy.
    world.wait_sources(&pods[0], 0, &[world.plain(&pods[0].node)])
}

/// Next to another CNI (flannel with its own VXLAN device and masquerading) and kube-proxy with nftables, a policy for
/// everything leaves traffic between pods and to Services alone.
fn flannel_is_left_alone(world: &InstalledCluster) -> Result<()> {
    let world = world.beside_flannel()?;
    leaves_pods_and_services_alone(&world).map_err(|error| anyhow!("{error:#}\n{}", world.picture()))
}

fn leaves_pods_and_services_alone(world: &InstalledCluster) -> Result<()> {
    let pods = world.deploy("web", 2)?;
    let [a, b] = &pods[..] else { bail!("{pods:?}") };
    ensure!(a.node != b.node, "both on {}", a.node);
    world.pool("public", 10, 11)?;
    world.policy("web", "web", "0.0.0.0/0", 2)?;
    for pod in &pods {
        world.wait_sources(pod, 0, &egress([10, 11]))?;
        world.reaches_the_api_server(pod)?;
        let rules = world.cluster.netns(&pod.node)?.sh("nft list tables")?;
        ensure!(rules.contains("table ip kube-proxy"), "{}: not nftables: {rules}", pod.node);
    }
    let outside = world.outside()?;
    let target = SocketAddr::new(SERVERS[0].parse()?, 80);
    let neighbor = SocketAddr::new(b.ip.into(), 8000);
    let (server, near) = (
        TcpServer::start(&outside, &[target], ServerMode::Stream)?,
        TcpServer::start(&b.ns, &[neighbor], ServerMode::Stream)?,
    );
    let captures = [Capture::start(&outside, "ext")?, Capture::start(&outside, "nodes")?];
    let options = || TcpOptions { interval: Duration::from_millis(50), ..TcpOptions::default() };
    let clients =
        [TcpClients::establish(&a.ns, target, 20, options())?, TcpClients::establish(&a.ns, neighbor, 20, options())?];
    clients.iter().try_for_each(|clients| clients.wait_progress(10, PATIENCE))?;
    ensure!(near.sources().into_keys().eq([IpAddr::from(a.ip)]), "{:?} is not {}", near.sources(), a.ip);
    // The egress IPs of one gateway move to the other.
    let (_, (gone, _)) = world.wait_owners(2, "")?.into_iter().next().context("no owner")?;
    world.cluster.partition(&gone, true)?;
    world.wait_owners(2, &gone)?;
    clients.iter().try_for_each(|clients| clients.wait_progress(10, PATIENCE))?;
    world.cluster.partition(&gone, false)?;
    for clients in clients {
        ensure!(clients.close()?.iter().all(lab::traffic::ConnectionReport::intact), "connections broke");
    }
    drop(server);
    for capture in captures {
        let strangers = capture.finish()?.unexpected_sources_towards(target.ip(), &egress([10, 11]));
        ensure!(strangers.is_empty(), "packets with other addresses: {strangers:?}");
    }
    Ok(())
}

/// Uses the token of an agent, as the kubelet would give it to the agent's pod.
fn an_agent_may_not_write_for_another_node(world: &InstalledCluster) -> Result<()> {
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
        // kubectl prefers the kubeconfig's credentials to --token, so they are removed.
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
    // The agent's own object changes all the time, so only the reason of the error matters.
    let (_, error) = try_on("worker1")?;
    ensure!(!error.contains("its own node") && !error.contains("orbidden"), "{error}");
    // The spec, with which the controller leases port blocks, is never an agent's to write.
    let right = |(group, resource, _): &Right| (group.as_str(), resource.as_str()) == ("spillway.io", "egressnodes");
    let verbs = granted(world, "spillway-agent")?.into_iter().filter(right).map(|(_, _, verb)| verb);
    let writes: Vec<String> = verbs.filter(|verb| verb != "list" && verb != "watch").collect();
    ensure!(writes.is_empty(), "an agent may {writes:?} EgressNodes");
    Ok(())
}

/// Rolls the agents to another image and back to the previous one under load.
fn the_daemonset_is_rolled_under_load(world: &InstalledCluster) -> Result<()> {
    let pods = world.deploy("web", 3)?;
    world.pool("public", 10, 12)?;
    world.policy("web", "web", "203.0.113.0/24", 3)?;
    for pod in &pods {
        world.wait_sources(pod, 0, &egress(10..=12))?;
    }
    let outside = world.outside()?;
    let (target, fresh) = (SocketAddr::new(SERVERS[0].parse()?, 80), SocketAddr::new(SERVERS[0].parse()?, 81));
    let _servers = [
        TcpServer::start(&outside, &[target], ServerMode::Stream)?,
        TcpServer::start(&outside, &[fresh], ServerMode::Echo)?,
    ];
    let captures = [Capture::start(&outside, "ext")?, Capture::start(&outside, "nodes")?];
    let (mut clients, mut newcomers) = (Vec::new(), Vec::new());
    for pod in &pods {
        let options = TcpOptions { interval: Duration::from_millis(50), ..TcpOptions::default() };
        clients.push(TcpClients::establish(&pod.ns, target, 30, options)?);
        let rate = ConnectRate { per_second: 20, timeout: Duration::from_secs(10), ..ConnectRate::default() };
        newcomers.push(rate.start(&pod.ns, fresh)?);
    }
    world.cluster.load_image(&world.next_image)?;
    let before = agents(world)?;
    let repository = before.keys().next().and_then(|image| image.rsplit_once(':')).context("no agent runs")?.0;
    roll(world, &format!("{repository}:next"))?;
    let during = agents(world)?;
    ensure!(during.len() == 1 && during.values().ne(before.values()), "not another image: {before:?} {during:?}");
    clients.iter().try_for_each(|clients| clients.wait_progress(5, PATIENCE))?;
    roll(world, before.keys().next().context("no agent runs")?)?;
    ensure!(agents(world)? == before, "not the previous image");
    for clients in &clients {
        clients.wait_progress(5, PATIENCE)?;
    }
    for clients in clients {
        let reports = clients.close()?;
        let broken: Vec<_> = reports.iter().filter(|one| !one.intact()).collect();
        ensure!(broken.is_empty(), "{} of 30 connections broke: {:?}", broken.len(), broken.first());
    }
    for newcomers in newcomers {
        let report = newcomers.finish()?;
        ensure!(report.failures() == 0, "of {} new connections {:?}", report.opened, report.failed);
    }
    for capture in captures {
        let strangers = capture.finish()?.unexpected_sources_towards(target.ip(), &egress(10..=12));
        ensure!(strangers.is_empty(), "packets with other addresses: {strangers:?}");
    }
    Ok(())
}

/// Rolls all agents to an image, one by one.
fn roll(world: &InstalledCluster, image: &str) -> Result<()> {
    let image = format!("agent={image}");
    world.cluster.kubectl(&["set", "image", "-n", "spillway", "daemonset/spillway-agent", &image])?;
    world.wait_installed()
}

/// Returns the images that agents run, each with the digests that it has on the nodes.
fn agents(world: &InstalledCluster) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let pods = world.cluster.get(&["pods", "-n", "spillway", "-l", "app.kubernetes.io/component=agent"])?;
    let mut images: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for pod in pods["items"].as_array().into_iter().flatten() {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let digest = text(&pod["status"]["containerStatuses"][0]["imageID"]);
        images.entry(text(&pod["spec"]["containers"][0]["image"])).or_default().insert(digest);
    }
    Ok(images)
}

/// Compares the audit log of Spillway's requests with the roles: nothing is refused, and no right is unused.
fn every_right_is_used_and_none_is_missing(world: &InstalledCluster) -> Result<()> {
    // Each kind of change happens once: a controller takes over, addresses are added and removed, a node is removed.
    world.pool("public", 10, 12)?;
    world.policy("web", "web", "203.0.113.0/24", 2)?;
    world.condition("web", "Ready", "True")?;
    world.policy("web", "web", "203.0.113.0/24", 1)?;
    world.wait_owners(1, "")?;
    world.team("team-a", true)?;
    // The controller creates a deleted object again. It removes an object without a node, and its lease.
    world.cluster.kubectl(&["delete", "egn", "worker1", "--wait=false"])?;
    let metadata = "{name: spillway-gateway-nobody, namespace: spillway}";
    world
        .cluster
        .apply(&format!("{{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {metadata}, spec: {{}}}}"))?;
    world.cluster.apply("{apiVersion: spillway.io/v1alpha1, kind: EgressNode, metadata: {name: nobody}, spec: {}}")?;
    world.until("the object without a node is gone", &["egn"], |nodes| {
        let names =
            nodes["items"].as_array().into_iter().flatten().filter_map(|node| node["metadata"]["name"].as_str());
        let names: Vec<&str> = names.collect();
        names.contains(&"worker1") && !names.contains(&"nobody")
    })?;
    for account in ["spillway-agent", "spillway-controller"] {
        let look = || {
            let (used, refused) = used(world, account)?;
            ensure!(refused.is_empty(), "{account} was refused: {refused:?}");
            let granted = granted(world, account)?;
            Ok(granted.difference(&used).cloned().collect::<Vec<_>>())
        };
        // A watch is logged when it ends, which takes longer than the test waits.
        let rest = |unused: &Vec<Right>| unused.iter().all(|right| right.2 == "watch");
        wait_until(&format!("{account} uses every right"), PATIENCE, look, rest)?;
    }
    Ok(())
}

/// Group, resource (with its subresource, such as `egressnodes/status`), verb.
type Right = (String, String, String);

fn used(world: &InstalledCluster, account: &str) -> Result<(BTreeSet<Right>, BTreeMap<Right, String>)> {
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
        // Other tests use an agent's account to request what an agent may not do.
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

fn granted(world: &InstalledCluster, account: &str) -> Result<BTreeSet<Right>> {
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
