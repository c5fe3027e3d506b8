//! The kinds that a store holds: their names in the API, their writers, and their Rust types.

use egress_objects::api::networks::{
    antrea::IPPool as AntreaIPPool,
    calico::IPPool as CalicoIPPool,
    cilium::{CiliumNode, CiliumPodIPPool},
    kube_ovn::Subnet as KubeOvnSubnet,
};
use egress_objects::api::{
    ALPHA, CiliumEgressGatewayPolicy, Egress, EgressGatewayPolicy, EgressIP, EgressIPPool, EgressNode, EgressPolicy,
    ExternalIPPool, GROUP, Pod, SHORT_FORMS,
};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{self, Namespace, Node};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::core::ApiResource;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// An object of any kind, behind an `Arc` of its Rust type.
pub(crate) type Erased = Arc<dyn Any + Send + Sync>;

macro_rules! kinds {
    ($($kind:ident = $name:literal: $version:literal,)*) => {
        /// A kind of object.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Kind { $( #[doc = concat!($name, " (", $version, ").")] $kind, )* }

        impl Kind {
            /// Every kind, in order.
            pub const ALL: [Kind; [$(Kind::$kind),*].len()] = [$(Kind::$kind),*];

            /// Returns the kind's name, as in the field `kind`.
            pub fn name(self) -> &'static str { match self { $(Kind::$kind => $name),* } }

            /// Returns the kind's group and version, as in the field `apiVersion`.
            pub fn api_version(self) -> &'static str { match self { $(Kind::$kind => $version),* } }

            /// Returns the kind's resource in the API.
            pub(crate) fn resource(self) -> ApiResource {
                match self { $(Kind::$kind => ApiResource::erase::<$kind>(&())),* }
            }

            /// Implements [`Kind::decode`] for every kind except Pod.
            fn typed(self, value: Value) -> Result<Erased, serde_json::Error> {
                match self { $(Kind::$kind => Ok(Arc::new(serde_json::from_value::<$kind>(value)?))),* }
            }

            /// Returns the JSON of an object of the kind; `None` if it is of another kind.
            pub(crate) fn encode(self, object: &Erased) -> Option<Value> {
                match self { $(Kind::$kind => serde_json::to_value(object.downcast_ref::<$kind>()?).ok()),* }
            }
        }

        $(impl Stored for $kind { const KIND: Kind = Kind::$kind; })*
    };
}

kinds! {
    Namespace = "Namespace": "v1",
    Node = "Node": "v1",
    Pod = "Pod": "v1",
    ServiceCIDR = "ServiceCIDR": "networking.k8s.io/v1",
    EgressGatewayPolicy = "EgressGatewayPolicy": "spillway.io/v1beta1",
    EgressPolicy = "EgressPolicy": "spillway.io/v1beta1",
    EgressIPPool = "EgressIPPool": "spillway.io/v1beta1",
    EgressIP = "EgressIP": "spillway.io/v1alpha1",
    EgressNode = "EgressNode": "spillway.io/v1alpha1",
    Lease = "Lease": "coordination.k8s.io/v1",
    CiliumEgressGatewayPolicy = "CiliumEgressGatewayPolicy": "cilium.io/v2",
    Egress = "Egress": "crd.antrea.io/v1beta1",
    ExternalIPPool = "ExternalIPPool": "crd.antrea.io/v1beta1",
    CalicoIPPool = "IPPool": "crd.projectcalico.org/v1",
    CiliumNode = "CiliumNode": "cilium.io/v2",
    CiliumPodIPPool = "CiliumPodIPPool": "cilium.io/v2alpha1",
    AntreaIPPool = "IPPool": "crd.antrea.io/v1beta1",
    KubeOvnSubnet = "Subnet": "kubeovn.io/v1",
}

impl Kind {
    /// Returns the kinds that every cluster with Spillway has.
    pub fn native() -> impl Iterator<Item = Kind> {
        Kind::ALL.into_iter().filter(|kind| !kind.is_foreign() && !kind.names_networks())
    }

    /// Returns the kinds in which CNIs name networks of pods.
    pub fn of_networks() -> impl Iterator<Item = Kind> {
        Kind::ALL.into_iter().filter(|kind| kind.names_networks())
    }

    /// Returns whether the kind belongs to another system. Such a kind is read on request.
    pub fn is_foreign(self) -> bool {
        matches!(self, Kind::CiliumEgressGatewayPolicy | Kind::Egress | Kind::ExternalIPPool)
    }

    /// Returns whether a CNI names networks of pods in the kind: it is read if the cluster has it, never required, and never written.
    pub fn names_networks(self) -> bool {
        use Kind::{AntreaIPPool, CalicoIPPool, CiliumNode, CiliumPodIPPool, KubeOvnSubnet};
        matches!(self, CalicoIPPool | CiliumNode | CiliumPodIPPool | AntreaIPPool | KubeOvnSubnet)
    }

    /// Returns whether a cluster may lack the kind. Kubernetes has served ServiceCIDR since 1.33.
    pub fn may_be_absent(self) -> bool {
        self.is_foreign() || self.names_networks() || self == Kind::ServiceCIDR
    }

    /// Returns whether objects of this version are objects of the kind. Both an API server and a directory convert them to the kind's
    /// version.
    pub fn reads(self, api_version: &str) -> bool {
        api_version == self.api_version() || self.has_alpha() && api_version == format!("{GROUP}/{ALPHA}")
    }

    /// Returns whether the previous version is served, too.
    fn has_alpha(self) -> bool {
        matches!(self, Kind::EgressGatewayPolicy | Kind::EgressPolicy | Kind::EgressIPPool)
    }

    /// Returns whether objects of the kind live in a namespace.
    pub fn is_namespaced(self) -> bool {
        matches!(self, Kind::Pod | Kind::Lease | Kind::EgressPolicy)
    }

    /// Returns whether users (or Kubernetes) write the objects. Spillway writes the objects of the other kinds.
    pub fn is_users(self) -> bool {
        !matches!(self, Kind::EgressIP | Kind::EgressNode | Kind::Lease)
    }

    /// Returns whether Spillway writes the status of the users' objects of the kind.
    pub(crate) fn has_our_status(self) -> bool {
        matches!(self, Kind::EgressGatewayPolicy | Kind::EgressPolicy | Kind::EgressIPPool) || self.is_foreign()
    }

    /// Returns the resource for writing an object's status. Kubernetes 1.32 validates the whole object on such a write, and only the
    /// previous version accepts short forms.
    pub(crate) fn resource_for_status(self, object: &Value) -> ApiResource {
        let resource = self.resource();
        let is_short = |(short, _): (&str, &str)| object["spec"].get(short).is_some_and(|said| !said.is_null());
        match self.has_alpha() && SHORT_FORMS.into_iter().any(is_short) {
            true => ApiResource { api_version: format!("{GROUP}/{ALPHA}"), version: ALPHA.to_owned(), ..resource },
            false => resource,
        }
    }

    /// Decodes `value` as the kind's Rust type.
    pub(crate) fn decode(self, value: Value) -> Result<Erased, serde_json::Error> {
        match self {
            Kind::Pod => Ok(Arc::new(Pod::from(serde_json::from_value::<v1::Pod>(value)?))),
            _ => self.typed(value),
        }
    }

    /// Returns `value` without the fields that the kind does not have.
    pub(crate) fn understood(self, value: Value) -> Result<Value, serde_json::Error> {
        match self {
            // The Rust type keeps only part of a Pod.
            Kind::Pod => serde_json::to_value(serde_json::from_value::<v1::Pod>(value)?),
            // The Rust type has hardly any of the kind's fields.
            _ if self.names_networks() => self.decode(value.clone()).map(|_| value),
            _ => Ok(self.encode(&self.decode(value)?).unwrap_or_default()),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The Rust type of a kind.
pub trait Stored:
    kube::Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + fmt::Debug + Send + Sync + 'static
{
    /// The kind.
    const KIND: Kind;
}

/// The name of an object within its kind. Ordered by namespace, then name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The namespace; empty for kinds without one.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl Key {
    /// Returns the key of an object without a namespace.
    pub fn cluster(name: &str) -> Self {
        Key { namespace: String::new(), name: name.to_owned() }
    }

    /// Returns the key of an object in a namespace.
    pub fn namespaced(namespace: &str, name: &str) -> Self {
        Key { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    /// Parses a key from the text that [`fmt::Display`] writes.
    pub fn parse(text: &str) -> Self {
        let (namespace, name) = text.split_once('/').unwrap_or(("", text));
        Key::namespaced(namespace, name)
    }

    /// Returns the key in an object's metadata.
    pub fn of<T: Stored>(object: &T) -> Self {
        let meta = object.meta();
        Key { namespace: meta.namespace.clone().unwrap_or_default(), name: meta.name.clone().unwrap_or_default() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.name)
    }
}

/// An object by kind and key: `EgressGatewayPolicy web`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectRef {
    /// The kind.
    pub kind: Kind,
    /// The namespace and name.
    pub key: Key,
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.key)
    }
}
