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
use kube::{
    Api, Client,
    api::ListParams,
    core::{DynamicObject, PartialObjectMeta},
    discovery::ApiResource,
};
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

/// The running pods, as far as they were examined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PodFacts {
    /// The number of examined pods.
    pub examined: usize,
    /// Those pods' addresses that are in no Node's `podCIDRs`.
    pub unnamed: Vec<IpAddr>,
}

/// The facts of a cluster. A fact that could not be read is absent (`None`), and nothing may be concluded from it.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterFacts {
    /// The API server's version: `1.36`.
    pub version: String,
    /// The nodes.
    pub nodes: Option<Vec<NodeFacts>>,
    /// The running pods.
    pub pods: Option<PodFacts>,
    /// The networks of Services; empty if the cluster does not know ServiceCIDRs.
    pub services: Option<Vec<String>>,
    /// The address of the Service `kubernetes`.
    pub api_server: Option<String>,
    /// The installed definitions of our kinds.
    pub definitions: Option<Vec<String>>,
    /// The names of known CNIs' DaemonSets.
    pub cnis: Option<Vec<String>>,
    /// The policies of other egress gateways: kind and number. Kinds that the cluster does not know or does not show are left out.
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
    nodes_and_pods(&client, &mut facts).await;
    services(&client, &mut facts).await;
    installed(&client, &mut facts).await;
    Ok(facts)
}

impl ClusterFacts {
    /// Returns the answer to a question. Without an answer, records why, so that the other questions are asked nevertheless.
    fn read<T>(&mut self, what: &str, answer: Result<T, kube::Error>) -> Option<T> {
        answer.inspect_err(|error| self.unread.push(format!("{what}: {error}"))).ok()
    }
}

async fn nodes_and_pods(client: &Client, facts: &mut ClusterFacts) {
    let nodes = Api::<Node>::all(client.clone()).list(&ListParams::default()).await;
    let Some(nodes) = facts.read("Nodes", nodes) else { return };
    let mut networks: Vec<IpNet> = Vec::new();
    let mut found = Vec::new();
    for node in nodes.items {
        let spec = node.spec.unwrap_or_default();
        let named = spec.pod_cidrs.into_iter().flatten().chain(spec.pod_cidr);
        networks.extend(named.filter_map(|net| net.parse::<IpNet>().ok()));
        let info = node.status.unwrap_or_default().node_info.unwrap_or_default();
        found.push(NodeFacts {
            name: node.metadata.name.unwrap_or_default(),
            release: info.kernel_version,
            system: info.operating_system,
            architecture: info.architecture,
        });
    }
    facts.nodes = Some(found);
    let running = ListParams::default().fields("status.phase=Running").limit(PODS);
    let pods = Api::<Pod>::all(client.clone()).list(&running).await;
    let Some(pods) = facts.read("Pods", pods) else { return };
    let mut examined = PodFacts::default();
    for pod in pods.items {
        if pod.spec.is_none_or(|spec| spec.host_network == Some(true)) {
            continue;
        }
        examined.examined += 1;
        let ips = pod.status.and_then(|status| status.pod_ips).unwrap_or_default();
        let ips = ips.iter().filter_map(|ip| ip.ip.parse::<IpAddr>().ok());
        examined.unnamed.extend(ips.filter(|ip| !networks.iter().any(|net| net.contains(ip))));
    }
    facts.pods = Some(examined);
}

async fn services(client: &Client, facts: &mut ClusterFacts) {
    let cidrs = Api::<ServiceCIDR>::all(client.clone()).list(&ListParams::default()).await;
    let cidrs = facts.read("ServiceCIDRs", if_known(cidrs));
    let named = |object: ServiceCIDR| object.spec?.cidrs;
    facts.services = cidrs.map(|list| list.into_iter().flatten().filter_map(named).flatten().collect());
    let service = Api::<Service>::namespaced(client.clone(), "default").get_opt("kubernetes").await;
    let service = facts.read("the Service kubernetes", service).flatten();
    facts.api_server = service.and_then(|service| service.spec?.cluster_ip);
}

/// Reads what is installed in the cluster.
async fn installed(client: &Client, facts: &mut ClusterFacts) {
    let all = ListParams::default();
    let ours = format!(".{}", egress_objects::api::GROUP);
    let definitions = Api::<CustomResourceDefinition>::all(client.clone()).list_metadata(&all).await;
    let definitions = facts.read("CustomResourceDefinitions", definitions);
    let name = |definition: PartialObjectMeta<CustomResourceDefinition>| definition.metadata.name;
    facts.definitions =
        definitions.map(|list| list.items.into_iter().filter_map(name).filter(|name| name.ends_with(&ours)).collect());
    let daemons = Api::<DaemonSet>::all(client.clone()).list_metadata(&all).await;
    let daemons = facts.read("DaemonSets", daemons);
    let name = |daemon: PartialObjectMeta<DaemonSet>| daemon.metadata.name;
    facts.cnis = daemons
        .map(|list| list.items.into_iter().filter_map(name).filter(|name| CNIS.contains(&name.as_str())).collect());
    for (kind, group, version, plural) in OTHERS {
        let resource = ApiResource {
            group: group.into(),
            version: version.into(),
            api_version: format!("{group}/{version}"),
            kind: kind.into(),
            plural: plural.into(),
        };
        let found = Api::<DynamicObject>::all_with(client.clone(), &resource).list_metadata(&all).await;
        let found = facts.read(plural, if_known(found)).flatten();
        facts.others.extend(found.map(|list| (kind, list.items.len())));
    }
    let namespace = Api::<Namespace>::all(client.clone()).get_opt(NAMESPACE).await;
    let namespace = facts.read("the Namespace spillway", namespace).flatten();
    let labels = namespace.and_then(|namespace| namespace.metadata.labels).unwrap_or_default();
    facts.pod_security = labels.get("pod-security.kubernetes.io/enforce").cloned();
}

/// Turns an answer into `None` if the cluster does not know the kind.
fn if_known<T>(answer: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        answer => answer.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::{Router, routing::get};
    use serde_json::json;

    /// This API server answers only one of the questions.
    #[tokio::test]
    async fn a_refused_list_does_not_stop_the_others() {
        let daemons = json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": {}, "items": [
            {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": {"name": "cilium", "namespace": "kube-system"}}]});
        let daemons = get(move || std::future::ready(daemons.to_string()));
        let client = Client::new(Router::new().route("/apis/apps/v1/daemonsets", daemons), "default");
        let mut facts = ClusterFacts::default();
        nodes_and_pods(&client, &mut facts).await;
        installed(&client, &mut facts).await;
        assert_eq!(facts.cnis, Some(vec!["cilium".to_owned()]));
        assert_eq!((&facts.nodes, &facts.pods, &facts.definitions), (&None, &None, &None));
        assert!(facts.unread.iter().any(|why| why.starts_with("Nodes: ")), "{:?}", facts.unread);
    }
}
