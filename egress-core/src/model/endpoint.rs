//! A pod that could be selected.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::{EndpointId, Labels, NodeName};

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Its namespace, name and uid.
    pub id: EndpointId,
    /// The node that it runs on.
    pub node: NodeName,
    /// Its addresses; empty while it is starting.
    pub ips: BTreeSet<IpAddr>,
    /// Its labels.
    pub labels: Labels,
}
