//! Fills a real API server with a cluster that no machine holds, and changes it: `cargo xtask bench --scale` calls it.
//!
//! Nodes and pods are what kubelets would say of them, without any (as KWOK makes them). Every hundredth node is a gateway, whose lease is
//! renewed as its agent would. Prints `ready`, and then `done` for each line of input: `pods COUNT NUMBER APPLICATION NODE` (numbers and
//! nodes follow each other), `policy NUMBER APPLICATION`, or `node NUMBER`, which also writes what the agent of a joining node writes.

use anyhow::{Context, Result, bail};
use egress_daemon::{
    api::{EgressGatewayPolicy, EgressIPPool, EgressNode},
    store::lease::{LEASE_NAMESPACE, gateway_lease},
};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Namespace, Node, Pod, ServiceAccount},
};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client, Config, Resource,
    api::{DynamicObject, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    core::ApiResource,
};
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::sync::mpsc;

/// Every so many nodes there is a gateway.
const GATEWAY_EVERY: u32 = 100;
/// How often gateways renew their leases.
const RENEW_EVERY: Duration = Duration::from_secs(5);
const NAMESPACES: u32 = 50;
/// So many requests are under way at once.
const CONCURRENT: usize = 64;

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kubeconfig, sizes @ ..] = &arguments[..] else {
        bail!("usage: fill KUBECONFIG NODES PODS POLICIES EGRESS_IPS")
    };
    let sizes: Vec<u32> = sizes
        .iter()
        .map(|text| text.parse().with_context(|| format!("{text} is not a number")))
        .collect::<Result<_>>()?;
    let [nodes, pods, policies, egress_ips] = sizes[..] else { bail!("four sizes are needed") };
    let config = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
    let filler = Filler { client: Client::try_from(config)? };

    let namespaces = (0..NAMESPACES).map(|n| format!("team-{n}")).chain([LEASE_NAMESPACE.to_owned()]);
    filler.all(namespaces.map(|name| filler.namespace(name))).await?;
    filler.all((0..nodes).map(|n| filler.node(n))).await?;
    // The pods of an application are on nodes that are far apart, no two on one.
    let node_of = |n: u32| (n % policies + n / policies * 97) % nodes;
    filler.all((0..pods).map(|n| filler.pod(n, n % policies, node_of(n)))).await?;
    let gateways = nodes.div_ceil(GATEWAY_EVERY);
    filler.all((0..gateways).map(|n| filler.lease(n))).await?;
    filler.pool().await?;
    let share = |n: u32| (u64::from(n) * u64::from(egress_ips) / u64::from(policies)) as u32;
    filler.all((0..policies).map(|n| filler.policy(n, n, share(n + 1) - share(n)))).await?;
    println!("ready");

    let (send, mut lines) = mpsc::unbounded_channel();
    std::thread::spawn(move || std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
    let mut renew = tokio::time::interval(RENEW_EVERY);
    loop {
        let line = tokio::select! {
            line = lines.recv() => line,
            _ = renew.tick() => {
                // An API server that restarts answers later.
                if let Err(error) = filler.all((0..gateways).map(|n| filler.renew(n))).await {
                    eprintln!("a lease is not renewed: {error:#}");
                }
                continue;
            }
        };
        let Some(line) = line else { return Ok(()) };
        let words: Vec<&str> = line.split_whitespace().collect();
        let numbers: Vec<u32> = words.iter().skip(1).filter_map(|word| word.parse().ok()).collect();
        match (words.first(), &numbers[..]) {
            (Some(&"pods"), [count, number, application, node]) => {
                filler.all((0..*count).map(|n| filler.pod(number + n, *application, node + n))).await?;
            }
            (Some(&"policy"), [number, application]) => filler.policy(*number, *application, 1).await?,
            (Some(&"node"), [number]) => {
                filler.node(*number).await?;
                filler.agent(*number).await?;
            }
            _ => bail!("{line} is not understood"),
        }
        println!("done");
    }
}

struct Filler {
    client: Client,
}

impl Filler {
    async fn all(&self, requests: impl Iterator<Item = impl Future<Output = Result<()>>>) -> Result<()> {
        stream::iter(requests).buffer_unordered(CONCURRENT).try_collect().await
    }

    fn api<T: Resource<DynamicType = ()>>(&self, namespace: Option<&str>) -> Api<DynamicObject> {
        let kind = ApiResource::erase::<T>(&());
        match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &kind),
            None => Api::all_with(self.client.clone(), &kind),
        }
    }

    /// Creates an object, and gives it a status.
    async fn make<T: Resource<DynamicType = ()>>(
        &self,
        namespace: Option<&str>,
        mut object: Value,
        status: Option<Value>,
    ) -> Result<()> {
        let kind = ApiResource::erase::<T>(&());
        (object["apiVersion"], object["kind"]) = (kind.api_version.into(), kind.kind.into());
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let api = self.api::<T>(namespace);
        let made = api.create(&PostParams::default(), &serde_json::from_value(object)?).await;
        made.with_context(|| format!("{name} is not made"))?;
        if let Some(status) = status {
            let patch = Patch::Merge(json!({"status": status}));
            api.patch_status(&name, &PatchParams::default(), &patch)
                .await
                .with_context(|| format!("{name} has no status"))?;
        }
        Ok(())
    }

    async fn namespace(&self, name: String) -> Result<()> {
        self.make::<Namespace>(None, json!({"metadata": {"name": name}}), None).await?;
        // Nobody else makes it here, and pods need it.
        self.make::<ServiceAccount>(Some(&name), json!({"metadata": {"name": "default"}}), None).await
    }

    async fn node(&self, n: u32) -> Result<()> {
        let name = node_name(n);
        let labels = json!({
            "kubernetes.io/hostname": name,
            "topology.kubernetes.io/zone": format!("zone-{}", n % 3),
            "egress": n.is_multiple_of(GATEWAY_EVERY).to_string(),
        });
        let cidr = format!("{}/24", Ipv4Addr::from(0x0a00_0000 + (n << 8)));
        let status = json!({
            "addresses": [{"type": "InternalIP", "address": address(n)}],
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}],
        });
        let object =
            json!({"metadata": {"name": name, "labels": labels}, "spec": {"podCIDR": cidr, "podCIDRs": [cidr]}});
        self.make::<Node>(None, object, Some(status)).await?;
        // A new node is tainted until it is ready.
        let patch = Patch::Merge(json!({"spec": {"taints": null}}));
        self.api::<Node>(None).patch(&name, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    async fn pod(&self, n: u32, application: u32, node: u32) -> Result<()> {
        let metadata = json!({
            "name": format!("app-{application}-7d9c6f5b8-{n:06}"),
            "labels": {"app": format!("app-{application}"), "tier": "web", "pod-template-hash": "7d9c6f5b8"},
        });
        let requests = json!({"requests": {"cpu": "100m", "memory": "128Mi"}});
        let containers = json!([{"name": "main", "image": "registry.example/app:1", "resources": requests}]);
        let ip = Ipv4Addr::from(0x0a00_0000 + (node << 8) + 1 + n / 10_000 % 250).to_string();
        let status = json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [{"type": "Ready", "status": "True"}]});
        let spec =
            json!({"nodeName": node_name(node), "automountServiceAccountToken": false, "containers": containers});
        let namespace = format!("team-{}", application % NAMESPACES);
        self.make::<Pod>(Some(&namespace), json!({"metadata": metadata, "spec": spec}), Some(status)).await
    }

    /// A policy for the pods of an application, with so many egress IPs; every fourth one `PerEndpoint`.
    async fn policy(&self, n: u32, application: u32, egress_ips: u32) -> Result<()> {
        let spec = json!({
            "selectors": [{"podSelector": {"matchLabels": {"app": format!("app-{application}")}}}],
            "destinationCIDRs": ["0.0.0.0/0"],
            "distribution": if n.is_multiple_of(4) { "PerEndpoint" } else { "PerFlow" },
            "egressIPPools": [{"name": "public", "count": egress_ips}],
        });
        let object = json!({"metadata": {"name": format!("policy-{n:04}")}, "spec": spec});
        self.make::<EgressGatewayPolicy>(None, object, None).await
    }

    async fn pool(&self) -> Result<()> {
        let spec =
            json!({"ipRanges": [{"cidr": "198.18.0.0/15"}], "nodeSelector": {"matchLabels": {"egress": "true"}}});
        self.make::<EgressIPPool>(None, json!({"metadata": {"name": "public"}, "spec": spec}), None).await
    }

    /// The lease of a gateway.
    async fn lease(&self, n: u32) -> Result<()> {
        let node = node_name(n * GATEWAY_EVERY);
        let spec =
            json!({"holderIdentity": node, "leaseDurationSeconds": 3600, "leaseTransitions": 1, "renewTime": now()});
        let object = json!({"metadata": {"name": gateway_lease(&node)}, "spec": spec});
        self.make::<Lease>(Some(LEASE_NAMESPACE), object, None).await
    }

    async fn renew(&self, n: u32) -> Result<()> {
        let patch = Patch::Merge(json!({"spec": {"renewTime": now()}}));
        let name = gateway_lease(&node_name(n * GATEWAY_EVERY));
        self.api::<Lease>(Some(LEASE_NAMESPACE)).patch(&name, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// What the agent of a node writes when it starts for the first time.
    async fn agent(&self, n: u32) -> Result<()> {
        let status = json!({
            "tunnelAddresses": [address(n)],
            "addresses": [{"interface": "eth0", "cidr": format!("{}/16", address(n)), "defaultRoute": true}],
            "transport": "Auto",
            "receives": ["device", "direct", "vxlan"],
            "programmed": [],
        });
        self.make::<EgressNode>(None, json!({"metadata": {"name": node_name(n)}, "spec": {}}), Some(status)).await
    }
}

fn node_name(n: u32) -> String {
    format!("node-{n:05}")
}

fn address(n: u32) -> Ipv4Addr {
    Ipv4Addr::from(0xac10_0000 + n)
}

fn now() -> String {
    // Leases have microseconds.
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}
