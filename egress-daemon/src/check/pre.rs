//! Gathers the facts of a cluster in which Spillway need not be installed yet. Asks the API server, and decides
//! nothing.

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

/// How many pods are examined for the networks that they are in.
const PODS: u32 = 500;
/// The namespace that Spillway is installed into.
const NAMESPACE: &str = "spillway";

/// A node, according to its object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeFacts {
    /// Its name.
    pub name: String,
    /// `uname -r`.
    pub release: String,
    /// `linux` or another system.
    pub system: String,
    /// As Go names it: `amd64`, `arm64`.
    pub architecture: String,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterFacts {
    /// Of the API server: `1.36`.
    pub version: String,
    /// The nodes.
    pub nodes: Vec<NodeFacts>,
    /// Pods that were examined, and those of them that are in no Node's `podCIDRs`.
    pub pods: usize,
    /// As above.
    pub unnamed: Vec<IpAddr>,
    /// Networks of Services; absent where the cluster has no such objects.
    pub services: Option<Vec<String>>,
    /// The address of the Service `kubernetes`.
    pub api_server: Option<String>,
    /// The definitions of our kinds that are installed.
    pub definitions: Vec<String>,
    /// The names of DaemonSets of CNIs that are known here.
    pub cnis: Vec<String>,
    /// Policies of other egress gateways: kind, and how many.
    pub others: Vec<(&'static str, usize)>,
    /// The PodSecurity level that Spillway's namespace enforces; absent if the namespace does not exist or sets none.
    pub pod_security: Option<String>,
    /// What could not be read, and why.
    pub unread: Vec<String>,
}

/// DaemonSets of CNIs.
const CNIS: [&str; 8] =
    ["antrea-agent", "aws-node", "calico-node", "canal", "cilium", "kindnet", "kube-flannel-ds", "kube-router"];
/// Kinds of other egress gateways, with group, version and plural.
const OTHERS: [(&str, &str, &str, &str); 2] = [
    ("CiliumEgressGatewayPolicy", "cilium.io", "v2", "ciliumegressgatewaypolicies"),
    ("Egress", "crd.antrea.io", "v1beta1", "egresses"),
];

/// Asks the cluster of a kubeconfig, or the one that `kubectl` would use, or this pod's own. Fails if it does not answer at all.
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

/// `None` if the cluster does not know the kind.
fn if_known<T>(answer: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        answer => answer.map(Some),
    }
}
