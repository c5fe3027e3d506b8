//! Gathers the facts of a cluster in which Spillway need not be installed yet. Asks the API server, and does not judge the facts.

use crate::store::Kubernetes;
use anyhow::{Context as _, Result};
use ipnet::IpNet;
use k8s_openapi::{
    api::{
        apps::v1::DaemonSet,
        core::v1::{Namespace, Node, Pod, Service},
        networking::v1::ServiceCIDR,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{Api, Client, api::ListParams, core::DynamicObject, discovery::ApiResource};
use std::{net::IpAddr, path::Path};

/// The maximum number of pods whose addresses are examined.
const PODS: u32 = 500;
/// The namespace that Spillway is installed into.
const NAMESPACE: &str = "spillway";

/// A node, according to its object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeFacts {
    /// The node's name.
    pub name: String,
    /// The kernel's release (`uname -r`).
    pub release: String,
    /// The operating system: `linux` or another.
    pub system: String,
    /// The architecture's name in Go: `amd64`, `arm64`.
    pub architecture: String,
}

/// The facts of a cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterFacts {
    /// The API server's version: `1.36`.
    pub version: String,
    /// The nodes.
    pub nodes: Vec<NodeFacts>,
    /// The number of examined pods.
    pub pods: usize,
    /// Those pods' addresses that are in no Node's `podCIDRs`.
    pub unnamed: Vec<IpAddr>,
    /// The networks of Services; `None` if the cluster does not know ServiceCIDRs.
    pub services: Option<Vec<String>>,
    /// The address of the Service `kubernetes`.
    pub api_server: Option<String>,
    /// The installed definitions of our kinds.
    pub definitions: Vec<String>,
    /// The names of known CNIs' DaemonSets.
    pub cnis: Vec<String>,
    /// The policies of other egress gateways: kind and number.
    pub others: Vec<(&'static str, usize)>,
    /// The PodSecurity level that Spillway's namespace enforces; absent if the namespace does not exist or sets none.
    pub pod_security: Option<String>,
    /// The facts that could not be read, with the reasons.
    pub unread: Vec<String>,
}

/// The DaemonSets of CNIs.
const CNIS: [&str; 8] =
    ["antrea-agent", "aws-node", "calico-node", "canal", "cilium", "kindnet", "kube-flannel-ds", "kube-router"];
/// Kinds of other egress gateways, with group, version and plural.
const OTHERS: [(&str, &str, &str, &str); 2] = [
    ("CiliumEgressGatewayPolicy", "cilium.io", "v2", "ciliumegressgatewaypolicies"),
    ("Egress", "crd.antrea.io", "v1beta1", "egresses"),
];

/// Asks the cluster of `kubeconfig`, the one that `kubectl` would use, or this pod's own. Fails if it does not answer at all.
pub(super) async fn gather(kubeconfig: Option<&Path>) -> Result<ClusterFacts> {
    let client = Kubernetes::client_as_kubectl(kubeconfig, None).await?;
    let version = client.apiserver_version().await.context("the API server does not answer")?;
    let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
    let version = format!("{}.{}", digits(&version.major), digits(&version.minor));
    let mut facts = ClusterFacts { version, ..ClusterFacts::default() };
    if let Err(error) = objects(&client, &mut facts).await {
        facts.unread.push(error.to_string());
    }
    Ok(facts)
}

async fn objects(client: &Client, facts: &mut ClusterFacts) -> Result<(), kube::Error> {
    let all = ListParams::default();
    let nodes = Api::<Node>::all(client.clone()).list(&all).await?.items;
    let mut networks: Vec<IpNet> = Vec::new();
    for node in nodes {
        let spec = node.spec.unwrap_or_default();
        let named = spec.pod_cidrs.into_iter().flatten().chain(spec.pod_cidr);
        networks.extend(named.filter_map(|net| net.parse::<IpNet>().ok()));
        let info = node.status.unwrap_or_default().node_info.unwrap_or_default();
        facts.nodes.push(NodeFacts {
            name: node.metadata.name.unwrap_or_default(),
            release: info.kernel_version,
            system: info.operating_system,
            architecture: info.architecture,
        });
    }
    let running = ListParams::default().fields("status.phase=Running").limit(PODS);
    for pod in Api::<Pod>::all(client.clone()).list(&running).await?.items {
        if pod.spec.is_none_or(|spec| spec.host_network == Some(true)) {
            continue;
        }
        facts.pods += 1;
        let ips = pod.status.and_then(|status| status.pod_ips).unwrap_or_default();
        let ips = ips.iter().filter_map(|ip| ip.ip.parse::<IpAddr>().ok());
        facts.unnamed.extend(ips.filter(|ip| !networks.iter().any(|net| net.contains(ip))));
    }
    let cidrs = if_known(Api::<ServiceCIDR>::all(client.clone()).list(&all).await)?;
    facts.services =
        cidrs.map(|list| list.items.into_iter().filter_map(|object| object.spec?.cidrs).flatten().collect::<Vec<_>>());
    let service = Api::<Service>::namespaced(client.clone(), "default").get_opt("kubernetes").await?;
    facts.api_server = service.and_then(|service| service.spec?.cluster_ip);
    let ours = format!(".{}", egress_objects::api::GROUP);
    let definitions = Api::<CustomResourceDefinition>::all(client.clone()).list_metadata(&all).await?.items;
    let names = definitions.into_iter().filter_map(|definition| definition.metadata.name);
    facts.definitions = names.filter(|name| name.ends_with(&ours)).collect();
    let daemons = Api::<DaemonSet>::all(client.clone()).list_metadata(&all).await?.items;
    let names = daemons.into_iter().filter_map(|daemon| daemon.metadata.name);
    facts.cnis = names.filter(|name| CNIS.contains(&name.as_str())).collect();
    for (kind, group, version, plural) in OTHERS {
        let resource = ApiResource {
            group: group.into(),
            version: version.into(),
            api_version: format!("{group}/{version}"),
            kind: kind.into(),
            plural: plural.into(),
        };
        let found = Api::<DynamicObject>::all_with(client.clone(), &resource).list_metadata(&all).await;
        facts.others.extend(if_known(found)?.map(|list| (kind, list.items.len())));
    }
    let namespace = Api::<Namespace>::all(client.clone()).get_opt(NAMESPACE).await?;
    let labels = namespace.and_then(|namespace| namespace.metadata.labels).unwrap_or_default();
    facts.pod_security = labels.get("pod-security.kubernetes.io/enforce").cloned();
    Ok(())
}

/// Turns an answer into `None` if the cluster does not know the kind.
fn if_known<T>(answer: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        answer => answer.map(Some),
    }
}
