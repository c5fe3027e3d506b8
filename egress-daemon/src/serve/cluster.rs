//! The same page of all nodes at the controller's port: from namespaces through egress IPs and gateways.
//!
//! The controller knows only objects. While the page has viewers, it reads the agents' metrics, which show flows but not their pods and
//! destinations. So the page shows nothing that a client of this port could not read in the metrics.

use super::{Click, Feed, INTERVAL, PATHS, routes};
use crate::store::{Key, Store};
use anyhow::{Context as _, Result, bail};
use axum::{Router, body::Body};
use egress_core::model::{PolicyId, PolicyKind};
use egress_objects::api::{EgressGatewayPolicy, EgressIP, EgressPolicy, egress_ip_name};
use futures::{StreamExt as _, stream};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::Condition};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};

/// The number of agents that are queried concurrently, and the timeout of each query.
const AT_ONCE: usize = 16;
const PATIENCE: Duration = Duration::from_secs(2);
/// The maximum size of an agent's metrics, in bytes. Those of 2,048 accounts have about 2 MiB.
const LARGEST: usize = 16 << 20;

/// The maximum number of paths of all nodes together. It is limited because each viewer has a copy of them.
const ALL_PATHS: usize = 20_000;

/// Returns the page's routes. Agents serve their metrics at `port`. A task reads them while there are viewers, until the page is dropped.
pub fn page(store: Store, port: u16) -> Router {
    let feed = Feed::default();
    let told = feed.0.subscribe();
    let at = store.clone();
    let explain = move |click: &Click| explain(&at, click);
    tokio::spawn(async move {
        let client = Client::builder(TokioExecutor::new()).build_http();
        let mut nodes = BTreeMap::new();
        // The router has one receiver, and each viewer has another.
        while feed.0.receiver_count() > 0 {
            if feed.0.receiver_count() > 1 {
                look(&client, &store, port, &feed, &mut nodes).await;
            } else {
                // Forget all nodes, so that the next viewer sees no stale data.
                std::mem::take(&mut nodes).keys().for_each(|name| feed.forget(name));
            }
            sleep(INTERVAL).await;
        }
    });
    routes(told, Arc::new(explain))
}

/// The client for agents, with persistent connections.
type Http = Client<HttpConnector, Body>;

/// The time of an agent's last query, and its metrics.
type Before = (Instant, Metrics);

/// Queries all agents.
async fn look(client: &Http, store: &Store, port: u16, feed: &Feed, before: &mut BTreeMap<String, Before>) {
    let nodes = addresses(&store.list::<Node>());
    for gone in before.keys().filter(|name| !nodes.contains_key(*name)) {
        feed.forget(gone);
    }
    before.retain(|name, _| nodes.contains_key(name));
    let asked = nodes
        .into_iter()
        .map(|(name, address)| async move { (name, metrics(client, SocketAddr::new(address, port)).await) });
    let answers: Vec<_> = stream::iter(asked).buffer_unordered(AT_ONCE).collect().await;
    let carriers = carriers(&store.list::<EgressIP>());
    let most = PATHS.min(ALL_PATHS / answers.len().max(1));
    for (name, answer) in answers {
        match answer {
            Ok(now) => {
                let at = Instant::now();
                if let Some((then, old)) = before.get(&name) {
                    let view = view(&name, old, &now, at.duration_since(*then).as_secs_f64(), &carriers, most);
                    feed.take(&name, &view.to_string());
                }
                before.insert(name, (at, now));
            }
            Err(error) => {
                tracing::debug!("the metrics of {name}: {error:#}");
                before.remove(&name);
                feed.forget(&name);
            }
        }
    }
}

/// Returns the nodes with the addresses of their agents.
fn addresses(nodes: &[Arc<Node>]) -> BTreeMap<String, IpAddr> {
    let internal = |node: &Node| {
        let addresses = node.status.as_ref()?.addresses.as_ref()?;
        addresses.iter().filter(|one| one.type_ == "InternalIP").find_map(|one| one.address.parse().ok())
    };
    nodes.iter().filter_map(|node| Some((node.metadata.name.clone()?, internal(node)?))).collect()
}

/// Returns the node that carries each egress IP.
fn carriers(ips: &[Arc<EgressIP>]) -> BTreeMap<String, String> {
    ips.iter().filter_map(|ip| Some((ip.spec.address.clone(), ip.status.as_ref()?.node.clone()?))).collect()
}

async fn metrics(client: &Http, at: SocketAddr) -> Result<Metrics> {
    let exchange = async {
        let response = client.get(format!("http://{at}/metrics").parse()?).await?;
        let bytes = axum::body::to_bytes(Body::new(response.into_body()), LARGEST).await?;
        Ok(Metrics::read(&String::from_utf8_lossy(&bytes)))
    };
    timeout(PATIENCE, exchange).await.context("no answer in time")?
}

/// Policy, namespace and egress IP.
type Account = (String, String, String);

/// The metrics of an agent that the page needs.
#[derive(Debug, Default, PartialEq)]
struct Metrics {
    flows: BTreeMap<Account, f64>,
    opened: BTreeMap<Account, f64>,
    packets: BTreeMap<Account, f64>,
    dropped: BTreeMap<String, f64>,
}

impl Metrics {
    /// Parses the text format. Ignores lines that cannot be parsed.
    fn read(text: &str) -> Self {
        let mut all = Self::default();
        for (name, labels, value) in text.lines().filter_map(sample) {
            let label = |name: &str| labels.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            let account = || Some((label("policy")?, label("namespace")?, label("egress_ip")?));
            let map = match name {
                "spillway_policy_flows" => &mut all.flows,
                "spillway_policy_flows_opened_total" => &mut all.opened,
                "spillway_policy_packets_total" => &mut all.packets,
                "spillway_dropped_packets_total" => {
                    if let Some(reason) = label("reason") {
                        *all.dropped.entry(reason).or_default() += value;
                    }
                    continue;
                }
                _ => continue,
            };
            if let Some(account) = account() {
                *map.entry(account).or_default() += value;
            }
        }
        all
    }
}

/// Name, labels and value.
type Sample<'a> = (&'a str, Vec<(&'a str, &'a str)>, f64);

/// Parses one line. Spillway's label values contain neither quotes nor commas.
fn sample(line: &str) -> Option<Sample<'_>> {
    let (name, rest) = line.split_once('{')?;
    let (labels, value) = rest.rsplit_once('}')?;
    let labels = labels.split(',').filter_map(|pair| Some((pair.split_once('=')?.0, pair.split('"').nth(1)?)));
    Some((name, labels.collect(), value.trim().parse().ok()?))
}

/// Returns the view of one node in the form of `egressctl top --by path -o json`, with namespaces instead of pods and packets instead of
/// active flows. It has at most the `most` busiest paths.
fn view(
    node: &str,
    old: &Metrics,
    now: &Metrics,
    seconds: f64,
    carriers: &BTreeMap<String, String>,
    most: usize,
) -> Value {
    let seconds = seconds.max(0.1);
    // An agent's counters restart from zero with its maps.
    let rate = |old: Option<&f64>, now: Option<&f64>| {
        (now.copied().unwrap_or(0.0) - old.copied().unwrap_or(0.0)).max(0.0) / seconds
    };
    let accounts: BTreeSet<&Account> = now.flows.keys().chain(now.packets.keys()).collect();
    let row = |account: &Account| {
        let (policy, namespace, egress_ip) = account;
        let flows = now.flows.get(account).copied().unwrap_or(0.0);
        let packets = rate(old.packets.get(account), now.packets.get(account));
        let opened = rate(old.opened.get(account), now.opened.get(account));
        (flows > 0.0 || packets > 0.0 || opened > 0.0).then(|| {
            json!({
                "name": format!("namespace {namespace} by policy {policy} as {egress_ip}"),
                "path": {"pod": format!("namespace {namespace}"), "policy": policy, "egressIp": egress_ip,
                    "gateway": carriers.get(egress_ip), "to": "outside"},
                "flows": flows, "packetsPerSecond": packets, "openedPerSecond": opened,
            })
        })
    };
    let mut items: Vec<Value> = accounts.into_iter().filter_map(row).collect();
    let opened: f64 = items.iter().filter_map(|item| item["openedPerSecond"].as_f64()).sum();
    let packets = |item: &Value| item["packetsPerSecond"].as_f64().unwrap_or_default();
    items.sort_by(|a, b| packets(b).total_cmp(&packets(a)));
    items.truncate(most);
    let dropped = now.dropped.iter().map(|(name, count)| (name, rate(old.dropped.get(name), Some(count))));
    let dropped: Vec<Value> =
        dropped.filter(|(_, rate)| *rate > 0.0).map(|(name, rate)| json!({"name": name, "perSecond": rate})).collect();
    json!({
        "node": node,
        "flows": now.flows.values().sum::<f64>(),
        "openedPerSecond": opened,
        "dropped": dropped,
        "items": items,
    })
}

/// Explains a path by its objects, without the messages of conditions, because these name pods.
fn explain(store: &Store, click: &Click) -> Result<String> {
    let (Some(policy), Some(address)) = (&click.policy, &click.egress_ip) else { bail!("no policy is named") };
    let id: PolicyId = policy.parse()?;
    let key = Key::parse(&id.name);
    let conditions = match id.kind {
        PolicyKind::Native => {
            store.get::<EgressGatewayPolicy>(&key).and_then(|policy| Some(policy.status.as_ref()?.conditions.clone()))
        }
        PolicyKind::Namespaced => {
            store.get::<EgressPolicy>(&key).and_then(|policy| Some(policy.status.as_ref()?.conditions.clone()))
        }
        // Spillway reports on other projects' objects by events.
        PolicyKind::Cilium | PolicyKind::Antrea => None,
    };
    let mut text = format!("Policy {policy}:\n");
    for Condition { type_, status, reason, .. } in conditions.unwrap_or_default() {
        text += &format!("  {type_} is {status} ({reason})\n");
    }
    let ip = address.parse().ok().and_then(|ip| store.get::<EgressIP>(&Key::cluster(&egress_ip_name(ip))));
    let status = ip.as_ref().and_then(|ip| ip.status.as_ref());
    text += &match status.and_then(|status| Some((status.node.as_ref()?, status.epoch))) {
        Some((node, epoch)) => format!("{node} has carried {address} since epoch {epoch}.\n"),
        None => format!("No gateway carries {address}.\n"),
    };
    Ok(
        text + "For single pods: kubectl spillway serve, or kubectl spillway explain --pod NAMESPACE/NAME --to ADDR:PORT/tcp\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Files, Stored};

    const TEXT: &str = r#"# HELP spillway_policy_flows flows
spillway_policy_flows{policy="web",namespace="prod",egress_ip="192.0.2.10"} 4.0
spillway_policy_flows{policy="ns/prod/own",namespace="prod",egress_ip="192.0.2.11"} 0.0
spillway_policy_flows_opened_total{policy="web",namespace="prod",egress_ip="192.0.2.10"} 10
spillway_policy_packets_total{policy="web",namespace="prod",egress_ip="192.0.2.10",direction="sent"} 30
spillway_policy_packets_total{policy="web",namespace="prod",egress_ip="192.0.2.10",direction="received"} 10
spillway_policy_flows_refused_total{policy="web",namespace="prod",reason="no_port"} 2
spillway_dropped_packets_total{reason="no_port"} 3
spillway_build_info{version="0.1.0"} 1.0
# EOF
"#;

    #[test]
    fn view_shows_rates_between_two_reads_of_an_agents_metrics() {
        let now = Metrics::read(TEXT);
        let account = ("web".to_owned(), "prod".to_owned(), "192.0.2.10".to_owned());
        let mut old = Metrics::read(TEXT);
        *old.packets.get_mut(&account).unwrap() = 20.0;
        *old.opened.get_mut(&account).unwrap() = 9.0;
        old.dropped.clear();
        let view = view("n1", &old, &now, 2.0, &[("192.0.2.10".to_owned(), "gw1".to_owned())].into(), PATHS);
        assert_eq!(
            view,
            json!({
                "node": "n1", "flows": 4.0, "openedPerSecond": 0.5,
                "dropped": [{"name": "no_port", "perSecond": 1.5}],
                "items": [{
                    "name": "namespace prod by policy web as 192.0.2.10",
                    "path": {"pod": "namespace prod", "policy": "web", "egressIp": "192.0.2.10", "gateway": "gw1", "to": "outside"},
                    "flows": 4.0, "packetsPerSecond": 10.0, "openedPerSecond": 0.5,
                }],
            })
        );
        // Counters that restart from zero cause no negative rates.
        let view = super::view("n1", &now, &Metrics::default(), 2.0, &BTreeMap::new(), PATHS);
        assert_eq!(view["items"], json!([]));
        let view = super::view("n1", &Metrics::default(), &now, 2.0, &BTreeMap::new(), 0);
        assert_eq!(
            (&view["items"], &view["openedPerSecond"]),
            (&json!([]), &json!(5.0)),
            "nothing is lost of the sums"
        );
    }

    #[test]
    fn agents_are_at_their_nodes_internal_addresses() {
        let node = |name: &str, kind: &str| -> Arc<Node> {
            let status = json!({"addresses": [{"type": kind, "address": "10.0.0.1"}]});
            Arc::new(serde_json::from_value(json!({"metadata": {"name": name}, "status": status})).unwrap())
        };
        let found = addresses(&[node("a", "InternalIP"), node("b", "ExternalIP")]);
        assert_eq!(found, [("a".to_owned(), "10.0.0.1".parse().unwrap())].into());
    }

    /// Writes the condition Ready of a policy.
    async fn report<T: Stored>(store: &Store, key: &Key, reason: &str) {
        let mut object = serde_json::to_value(store.get::<T>(key).unwrap().as_ref()).unwrap();
        object["status"] = json!({"conditions": [{"type": "Ready", "status": "False", "reason": reason,
            "message": "pod a waits", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
        store.replace_status::<T>(&serde_json::from_value(object).unwrap()).await.unwrap();
    }

    #[tokio::test]
    async fn explain_finds_policies_by_the_names_of_the_metrics() {
        let dir = tempfile::tempdir().unwrap();
        let policy = |kind: &str, metadata: Value| {
            let (pools, to) = (json!([{"name": "public"}]), json!(["0.0.0.0/0"]));
            let spec = json!({"selectors": [{"podSelector": {}}], "destinationCIDRs": to, "egressIPPools": pools});
            json!({"apiVersion": "spillway.io/v1beta1", "kind": kind, "metadata": metadata, "spec": spec}).to_string()
        };
        let own = policy("EgressPolicy", json!({"name": "web", "namespace": "prod"}));
        let text = [policy("EgressGatewayPolicy", json!({"name": "web"})), own].join("\n---\n");
        std::fs::write(dir.path().join("policies.yaml"), text).unwrap();
        let store = Files::open(dir.path()).unwrap();
        report::<EgressGatewayPolicy>(&store, &Key::cluster("web"), "OfTheCluster").await;
        report::<EgressPolicy>(&store, &Key::namespaced("prod", "web"), "OfANamespace").await;
        let explained = |policy: &str| {
            let (policy, egress_ip) = (Some(policy.to_owned()), Some("192.0.2.10".to_owned()));
            explain(&store, &Click { policy, egress_ip, node: String::new(), pod: String::new(), to: String::new() })
        };
        let text = explained("web").unwrap();
        assert!(text.contains("Ready is False (OfTheCluster)") && !text.contains("pod a"), "{text}");
        let text = explained("ns/prod/web").unwrap();
        assert!(text.contains("Ready is False (OfANamespace)"), "{text}");
        assert!(!explained("cegp/web").unwrap().contains("Ready"), "no object of another kind");
        assert!(explained("prod/web").unwrap_err().to_string().contains("ns/NAMESPACE/NAME"));
    }
}
