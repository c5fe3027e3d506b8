//! Fills a real API server with the objects of a cluster too large for one machine, and changes them. `cargo xtask bench --scale` runs it.
//!
//! KWOK replaces the kubelets; `tests/cluster/kwok/kwok.yaml` reads addresses from annotations. Every Nth node is a gateway, where N is the
//! last argument. Prints `ready`, and then `done` for each line of input: `pods COUNT NUMBER APPLICATION NODE` (NUMBER and NODE increase by
//! one for each pod), `policy NUMBER APPLICATION`, or `node NUMBER`.

use anyhow::{Context, Result, bail};
use egress_daemon::store::lease::LEASE_NAMESPACE;
use egress_objects::api::{EgressGatewayPolicy, EgressIPPool};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use kube::{
    Api, Client, Config, Resource,
    api::{DynamicObject, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    core::ApiResource,
};
use serde_json::{Value, json};
use std::{io::BufRead, net::Ipv4Addr};

const NAMESPACES: u32 = 50;
/// The first node's address. `POD_NETWORKS` is the first address of the pod networks; each node has a /24.
const NODES: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 0);
const POD_NETWORKS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 0);
/// The number of concurrent requests.
const CONCURRENT: usize = 64;

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kubeconfig, sizes @ ..] = &arguments[..] else {
        bail!("usage: fill KUBECONFIG NODES PODS POLICIES EGRESS_IPS GATEWAY_EVERY")
    };
    let sizes: Vec<u32> = sizes
        .iter()
        .map(|text| text.parse().with_context(|| format!("{text} is not a number")))
        .collect::<Result<_>>()?;
    let [nodes, pods, policies, egress_ips, gateway_every] = sizes[..] else { bail!("five numbers are needed") };
    let config = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
    let filler = Filler { client: Client::try_from(config)?, gateway_every };

    let namespaces = (0..NAMESPACES).map(|n| format!("team-{n}")).chain([LEASE_NAMESPACE.to_owned()]);
    filler.all(namespaces.map(|name| filler.namespace(name))).await?;
    filler.all((0..nodes).map(|n| filler.node(n))).await?;
    // An application's pods are on different nodes, 97 nodes apart. A node's pods belong to different rounds of policies.
    let node_of = |n: u32| (n % policies + n / policies * 97) % nodes;
    let address = |n: u32, node: u32| Ipv4Addr::from(POD_NETWORKS.to_bits() + (node << 8) + 1 + n / policies);
    let pod = |n: u32, application: u32, node: u32| filler.pod(n, application, node, address(n, node));
    filler.all((0..pods).map(|n| pod(n, n % policies, node_of(n)))).await?;
    filler.pool().await?;
    let share = |n: u32| (u64::from(n) * u64::from(egress_ips) / u64::from(policies)) as u32;
    filler.all((0..policies).map(|n| filler.policy(n, n, share(n + 1) - share(n)))).await?;
    println!("ready");

    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let numbers: Vec<u32> = words.iter().skip(1).filter_map(|word| word.parse().ok()).collect();
        match (words.first(), &numbers[..]) {
            (Some(&"pods"), [count, number, application, node]) => {
                filler.all((0..*count).map(|n| pod(number + n, *application, node + n))).await?;
            }
            (Some(&"policy"), [number, application]) => filler.policy(*number, *application, 1).await?,
            (Some(&"node"), [number]) => filler.node(*number).await?,
            _ => bail!("unknown request: {line}"),
        }
        println!("done");
    }
    Ok(())
}

struct Filler {
    client: Client,
    gateway_every: u32,
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

    async fn make<T: Resource<DynamicType = ()>>(&self, namespace: Option<&str>, mut object: Value) -> Result<()> {
        let kind = ApiResource::erase::<T>(&());
        (object["apiVersion"], object["kind"]) = (kind.api_version.into(), kind.kind.into());
        let object: DynamicObject = serde_json::from_value(object)?;
        let made = self.api::<T>(namespace).create(&PostParams::default(), &object).await;
        made.map(drop).with_context(|| format!("cannot create {}", object.metadata.name.unwrap_or_default()))
    }

    async fn namespace(&self, name: String) -> Result<()> {
        self.make::<Namespace>(None, json!({"metadata": {"name": name}})).await?;
        // Pods need a default service account, and no controller creates one here.
        self.make::<ServiceAccount>(Some(&name), json!({"metadata": {"name": "default"}})).await
    }

    async fn node(&self, n: u32) -> Result<()> {
        let name = node_name(n);
        let labels = json!({
            "kubernetes.io/hostname": name,
            "topology.kubernetes.io/zone": format!("zone-{}", n % 3),
            "egress": n.is_multiple_of(self.gateway_every).to_string(),
        });
        let annotations = json!({"lab/address": Ipv4Addr::from(NODES.to_bits() + n)});
        let cidr = format!("{}/24", Ipv4Addr::from(POD_NETWORKS.to_bits() + (n << 8)));
        let metadata = json!({"name": name, "labels": labels, "annotations": annotations});
        let spec = json!({"podCIDR": cidr, "podCIDRs": [cidr]});
        self.make::<Node>(None, json!({"metadata": metadata, "spec": spec})).await?;
        // The API server taints a new node until it is ready.
        let patch = Patch::Merge(json!({"spec": {"taints": null}}));
        self.api::<Node>(None).patch(&name, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    async fn pod(&self, n: u32, application: u32, node: u32, address: Ipv4Addr) -> Result<()> {
        let metadata = json!({
            "annotations": {"lab/address": address},
            "name": format!("app-{application}-7d9c6f5b8-{n:06}"),
            "labels": {"app": format!("app-{application}"), "tier": "web", "pod-template-hash": "7d9c6f5b8"},
        });
        let requests = json!({"requests": {"cpu": "100m", "memory": "128Mi"}});
        let containers = json!([{"name": "main", "image": "registry.example/app:1", "resources": requests}]);
        let spec =
            json!({"nodeName": node_name(node), "automountServiceAccountToken": false, "containers": containers});
        let namespace = format!("team-{}", application % NAMESPACES);
        self.make::<Pod>(Some(&namespace), json!({"metadata": metadata, "spec": spec})).await
    }

    /// Creates a policy for an application's pods, with `egress_ips` egress IPs. Every fourth policy is `PerEndpoint`.
    async fn policy(&self, n: u32, application: u32, egress_ips: u32) -> Result<()> {
        let spec = json!({
            "selectors": [{"podSelector": {"matchLabels": {"app": format!("app-{application}")}}}],
            "destinationCIDRs": ["0.0.0.0/0"],
            "distribution": if n.is_multiple_of(4) { "PerEndpoint" } else { "PerFlow" },
            "egressIPPools": [{"name": "public", "count": egress_ips}],
        });
        let object = json!({"metadata": {"name": format!("policy-{n:04}")}, "spec": spec});
        self.make::<EgressGatewayPolicy>(None, object).await
    }

    async fn pool(&self) -> Result<()> {
        let spec =
            json!({"ipRanges": [{"cidr": "198.18.0.0/15"}], "nodeSelector": {"matchLabels": {"egress": "true"}}});
        self.make::<EgressIPPool>(None, json!({"metadata": {"name": "public"}, "spec": spec})).await
    }
}

fn node_name(n: u32) -> String {
    format!("node-{n:05}")
}
