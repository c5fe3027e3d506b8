//! The part of a Pod that is kept. A cluster has many pods, and the type of k8s-openapi, with room
//! for every field, takes two kilobytes for each before any text.

use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::{Metadata, NamespaceResourceScope, Resource};
use serde::{Deserialize, Serialize};

/// A Pod (v1), reduced to the fields in use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pod {
    /// Names, uid and labels.
    pub metadata: ObjectMeta,
    /// The spec.
    #[serde(default)]
    pub spec: Option<PodSpec>,
    /// The status.
    #[serde(default)]
    pub status: Option<PodStatus>,
}

/// The spec.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    /// The node that it is on.
    pub node_name: Option<String>,
    /// Whether it uses the node's network.
    pub host_network: Option<bool>,
}

/// The status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    /// Its lifecycle phase.
    pub phase: Option<String>,
    /// Its first address.
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    /// All its addresses.
    #[serde(rename = "podIPs")]
    pub pod_ips: Option<Vec<v1::PodIP>>,
}

impl From<v1::Pod> for Pod {
    fn from(pod: v1::Pod) -> Self {
        Pod {
            metadata: pod.metadata,
            spec: pod.spec.map(|spec| PodSpec { node_name: spec.node_name, host_network: spec.host_network }),
            status: pod.status.map(|status| PodStatus {
                phase: status.phase,
                pod_ip: status.pod_ip,
                pod_ips: status.pod_ips,
            }),
        }
    }
}

impl Resource for Pod {
    const API_VERSION: &'static str = v1::Pod::API_VERSION;
    const GROUP: &'static str = v1::Pod::GROUP;
    const KIND: &'static str = v1::Pod::KIND;
    const VERSION: &'static str = v1::Pod::VERSION;
    const URL_PATH_SEGMENT: &'static str = v1::Pod::URL_PATH_SEGMENT;
    type Scope = NamespaceResourceScope;
}

impl Metadata for Pod {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
