//! Names of things, one type each, with their text form.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A text that is not a valid id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// A policy reference with an unknown kind before the slash.
    #[error("policy {0:?}: expected \"NAME\", \"ns/NAMESPACE/NAME\", \"cegp/NAME\" or \"egress/NAME\"")]
    Policy(String),
    /// A pool reference with an unknown kind before the slash.
    #[error("pool {0:?}: expected \"NAME\" or \"externalippool/NAME\"")]
    Pool(String),
    /// An endpoint reference that does not have three parts.
    #[error("endpoint {0:?}: expected \"NAMESPACE/NAME/UID\"")]
    Endpoint(String),
}

/// The kind of object that a policy was written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PolicyKind {
    /// EgressGatewayPolicy (`spillway.io`)
    Native,
    /// EgressPolicy (`spillway.io`), of a namespace
    Namespaced,
    /// CiliumEgressGatewayPolicy (`cilium.io`)
    Cilium,
    /// Egress (`crd.antrea.io`)
    Antrea,
}

/// A policy. Its text form is `web`, `ns/shop/web`, `cegp/web` or `egress/web`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PolicyId {
    /// The kind of object.
    pub kind: PolicyKind,
    /// `metadata.name`; for an EgressPolicy `NAMESPACE/NAME`
    pub name: Arc<str>,
}

impl PolicyId {
    /// Creates the id of the object of this kind and name.
    pub fn new(kind: PolicyKind, name: &str) -> Self {
        Self { kind, name: name.into() }
    }

    /// Returns the namespace of an EgressPolicy.
    pub fn namespace(&self) -> Option<&str> {
        let namespaced = (self.kind == PolicyKind::Namespaced).then(|| self.name.split_once('/'));
        namespaced.flatten().map(|(namespace, _)| namespace)
    }
}

impl fmt::Display for PolicyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            PolicyKind::Native => f.write_str(&self.name),
            PolicyKind::Namespaced => write!(f, "ns/{}", self.name),
            PolicyKind::Cilium => write!(f, "cegp/{}", self.name),
            PolicyKind::Antrea => write!(f, "egress/{}", self.name),
        }
    }
}

impl FromStr for PolicyId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let (kind, name) = match text.split_once('/') {
            None => (PolicyKind::Native, text),
            Some(("ns", name)) => (PolicyKind::Namespaced, name),
            Some(("cegp", name)) => (PolicyKind::Cilium, name),
            Some(("egress", name)) => (PolicyKind::Antrea, name),
            Some(_) => return Err(IdError::Policy(text.into())),
        };
        let mut parts = name.split('/');
        let first = usize::from(kind == PolicyKind::Namespaced);
        if parts.any(str::is_empty) || name.matches('/').count() != first {
            return Err(IdError::Policy(text.into()));
        }
        Ok(Self::new(kind, name))
    }
}

/// The kind of object that a pool was written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PoolKind {
    /// EgressIPPool (`spillway.io`)
    Native,
    /// ExternalIPPool (`crd.antrea.io`)
    Antrea,
}

/// A pool. Its text form is `public` or `externalippool/public`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PoolId {
    /// The kind of object.
    pub kind: PoolKind,
    /// `metadata.name`
    pub name: Arc<str>,
}

impl PoolId {
    /// Creates the id of the object of this kind and name.
    pub fn new(kind: PoolKind, name: &str) -> Self {
        Self { kind, name: name.into() }
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            PoolKind::Native => f.write_str(&self.name),
            PoolKind::Antrea => write!(f, "externalippool/{}", self.name),
        }
    }
}

impl FromStr for PoolId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let (kind, name) = match text.split_once('/') {
            None => (PoolKind::Native, text),
            Some(("externalippool", name)) => (PoolKind::Antrea, name),
            Some(_) => return Err(IdError::Pool(text.into())),
        };
        if name.is_empty() || name.contains('/') {
            return Err(IdError::Pool(text.into()));
        }
        Ok(Self::new(kind, name))
    }
}

/// A node's name.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeName(Arc<str>);

impl NodeName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for NodeName {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// A pod. The uid distinguishes a pod from its successor of the same name. Its text form is `NAMESPACE/NAME/UID`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EndpointId {
    /// `metadata.namespace`
    pub namespace: Arc<str>,
    /// `metadata.name`
    pub name: Arc<str>,
    /// `metadata.uid`
    pub uid: Arc<str>,
}

impl EndpointId {
    /// Creates the id of the pod of this namespace, name and uid.
    pub fn new(namespace: &str, name: &str, uid: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into(), uid: uid.into() }
    }
}

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.namespace, self.name, self.uid)
    }
}

impl FromStr for EndpointId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let mut parts = text.split('/');
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(namespace), Some(name), Some(uid), None) if !namespace.is_empty() && !name.is_empty() => {
                Ok(Self::new(namespace, name, uid))
            }
            _ => Err(IdError::Endpoint(text.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_survive_their_text_form() {
        for text in ["web", "ns/shop/web", "cegp/web", "egress/web"] {
            assert_eq!(text.parse::<PolicyId>().unwrap().to_string(), text);
        }
        for text in ["public", "externalippool/public"] {
            assert_eq!(text.parse::<PoolId>().unwrap().to_string(), text);
        }
        assert_eq!("a/b/c".parse::<EndpointId>().unwrap(), EndpointId::new("a", "b", "c"));
    }

    #[test]
    fn texts_that_are_no_ids_are_refused() {
        for text in ["", "x/web", "cegp/", "cegp/a/b", "ns/web", "ns//web", "ns/a/b/c"] {
            assert!(text.parse::<PolicyId>().is_err(), "{text}");
        }
        for text in ["", "egress/x"] {
            assert!(text.parse::<PoolId>().is_err(), "{text}");
        }
        for text in ["a/b", "a/b/c/d", "/b/c"] {
            assert!(text.parse::<EndpointId>().is_err(), "{text}");
        }
    }
}
