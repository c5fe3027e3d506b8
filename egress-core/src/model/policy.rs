//! A policy as the planner sees it, whatever kind of object it was written as.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use super::{Family, Labels, PolicyId, PolicyKind, PoolId, Selector};

/// Selects pods. At least one of `pod` and `namespace` is present.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointSelector {
    /// Requirements on the pod's labels; absent: any pod.
    pub pod: Option<Selector>,
    /// Requirements on the labels of the pod's namespace; absent: any namespace.
    pub namespace: Option<Selector>,
    /// Requirements on the labels of the pod's node; absent: any node.
    pub node: Option<Selector>,
}

impl EndpointSelector {
    /// Returns whether it selects a pod with these labels, in a namespace and on a node with these labels.
    pub fn matches(&self, pod: &Labels, namespace: &Labels, node: &Labels) -> bool {
        let holds = |selector: &Option<Selector>, labels| selector.as_ref().is_none_or(|s| s.matches(labels));
        holds(&self.pod, pod) && holds(&self.namespace, namespace) && holds(&self.node, node)
    }
}

/// The source of a gateway entry's egress IP.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AddressSource {
    /// This address: on the node that has it configured, or else floating over the selected nodes.
    Ip(IpAddr),
    /// This address, on whichever selected node has it configured; it never floats.
    Configured(IpAddr),
    /// The first address of this interface on each selected node.
    Interface(String),
    /// The first address of the interface of the default route on each selected node.
    DefaultRoute,
}

/// Which of the selected nodes an entry without its own address stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeChoice {
    /// Every selected node contributes its address.
    Every,
    /// One of them, preferably the first by name (Cilium's rule).
    First,
}

/// One entry of `egressGateways`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// The nodes that may be this gateway.
    pub nodes: Selector,
    /// The address that it sends from.
    pub address: AddressSource,
    /// Which of the selected nodes count.
    pub choice: NodeChoice,
    /// Its share of new flows relative to the others; at least 1.
    pub weight: u32,
}

/// One entry of `egressIPPools`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRequest {
    /// The pool.
    pub pool: PoolId,
    /// How many addresses to take, in each family that the policy's destinations and the pool have in common.
    pub count: u32,
    /// Particular addresses wanted; they count towards `count`.
    pub ips: BTreeSet<IpAddr>,
}

/// The source of a policy's egress IPs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Named gateways.
    Gateways(Vec<Gateway>),
    /// Floating addresses from pools; each pool at most once.
    Pools(Vec<PoolRequest>),
}

/// How traffic is spread over the egress IPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distribution {
    /// Each flow is hashed.
    PerFlow,
    /// Each pod is assigned to one.
    PerEndpoint,
}

/// How the zone of the source node restricts the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZoneMode {
    /// Not at all.
    Any,
    /// Egress IPs owned in the same zone, while there are any.
    Prefer,
    /// Only egress IPs owned in the same zone.
    Require,
}

/// What happens to matching traffic when no gateway is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnNoGateway {
    /// It is dropped.
    Drop,
    /// It leaves with the node's address.
    NodeIp,
}

/// What happens to connections that existed before the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// They stay on their old path.
    Keep,
    /// They are dropped.
    Drop,
}

/// A limit per egress IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bandwidth {
    /// Bits per second.
    pub rate_bps: u64,
    /// Bytes that may pass in one burst.
    pub burst_bytes: u64,
}

/// The identity of one version of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// `metadata.uid`
    pub uid: String,
    /// `metadata.generation`
    pub generation: i64,
}

/// A policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Its kind and name.
    pub id: PolicyId,
    /// `metadata.uid`
    pub uid: String,
    /// `metadata.generation`; grows with each change of the specification.
    pub generation: i64,
    /// `metadata.creationTimestamp` in Unix seconds; the older of two policies wins.
    pub created: i64,
    /// The pods that it selects: those that match any of these.
    pub selectors: Vec<EndpointSelector>,
    /// The destinations that it steers. Prefixes have no host bits.
    pub destinations: Vec<IpNet>,
    /// The destinations that are excluded from this policy again. Prefixes have no host bits.
    pub excluded: Vec<IpNet>,
    /// The source of its egress IPs.
    pub source: Source,
    /// How traffic is spread over the egress IPs.
    pub distribution: Distribution,
    /// How zones restrict the choice.
    pub zone: ZoneMode,
    /// Whether an egress IP owned by the pod's own node is preferred.
    pub prefer_local_node: bool,
    /// What happens without a gateway.
    pub on_no_gateway: OnNoGateway,
    /// What happens to older connections.
    pub existing: Existing,
    /// Limit of each egress IP.
    pub bandwidth: Option<Bandwidth>,
}

impl Policy {
    /// Its version.
    pub fn version(&self) -> Version {
        Version { uid: self.uid.clone(), generation: self.generation }
    }

    /// Returns whether the policy has this version.
    pub fn is(&self, version: &Version) -> bool {
        self.uid == version.uid && self.generation == version.generation
    }

    /// Orders policies by precedence where both match with prefixes of the same length: the older one first, then by name.
    pub fn precedence(&self, other: &Self) -> Ordering {
        let key = |p: &Self| (p.created, p.id.name.clone(), p.id.kind);
        key(self).cmp(&key(other))
    }

    /// Returns whether it selects a pod with these labels, in a namespace and on a node with these labels.
    pub fn selects(&self, pod: &Labels, namespace: &Labels, node: &Labels) -> bool {
        self.selectors.iter().any(|selector| selector.matches(pod, namespace, node))
    }

    /// Returns whether packets of pods that all policies of `class` select leave with the node's address while this policy has no gateway.
    /// A namespaced policy does not release a pod from a cluster-scoped one: it drops the pod's packets there.
    pub fn leaves_as_node<'a>(&self, class: impl IntoIterator<Item = &'a PolicyId>) -> bool {
        let is_own = |id: &PolicyId| id.kind == PolicyKind::Namespaced;
        self.on_no_gateway == OnNoGateway::NodeIp && (!is_own(&self.id) || class.into_iter().all(is_own))
    }

    /// Returns whether it steers destinations of this family.
    pub fn serves(&self, family: Family) -> bool {
        self.destinations.iter().any(|net| Family::of_net(net) == family)
    }
}

/// The delay after which a gateway that came back gets its floating addresses back, unless a pool says otherwise.
pub const DEFAULT_FAILBACK_DELAY: Duration = Duration::from_secs(10);
