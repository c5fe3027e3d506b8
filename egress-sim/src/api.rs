//! The API server as a log of versions, and a process's view of it.
//!
//! Each kind has its own watch: a process sees the versions of one kind in order, and each watch lags independently. A starting process
//! lists the objects from a server's cache, which may be stale.

use egress_daemon::agent::facts::ObservedObjects;
use egress_objects::{
    api::{EgressIP, EgressNode, Pod},
    snapshot::ApiObjects,
};
use k8s_openapi::{
    api::{coordination::v1::Lease, core::v1::Node},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

#[derive(Clone, Debug)]
pub enum Object {
    Node(Arc<Node>),
    Pod(Arc<Pod>),
    EgressIp(Arc<EgressIP>),
    EgressNode(Arc<EgressNode>),
    Lease(Arc<Lease>),
}

/// The number of kinds. The following constants are the indices of some.
pub const KINDS: usize = 5;
const EGRESS_IPS: usize = 2;
pub const EGRESS_NODES: usize = 3;
pub const LEASES: usize = 4;
/// The time in which an agent lists all EgressNodes.
pub const LISTING: Duration = Duration::from_millis(100);

/// The positions in the logs of all kinds.
pub type Ends = [usize; KINDS];

impl Object {
    pub fn kind(&self) -> usize {
        match self {
            Object::Node(_) => 0,
            Object::Pod(_) => 1,
            Object::EgressIp(_) => EGRESS_IPS,
            Object::EgressNode(_) => EGRESS_NODES,
            Object::Lease(_) => LEASES,
        }
    }

    fn metadata(&self) -> &ObjectMeta {
        match self {
            Object::Node(object) => &object.metadata,
            Object::Pod(object) => &object.metadata,
            Object::EgressIp(object) => &object.metadata,
            Object::EgressNode(object) => &object.metadata,
            Object::Lease(object) => &object.metadata,
        }
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        match self {
            Object::Node(object) => &mut Arc::make_mut(object).metadata,
            Object::Pod(object) => &mut Arc::make_mut(object).metadata,
            Object::EgressIp(object) => &mut Arc::make_mut(object).metadata,
            Object::EgressNode(object) => &mut Arc::make_mut(object).metadata,
            Object::Lease(object) => &mut Arc::make_mut(object).metadata,
        }
    }

    fn key(&self) -> Key {
        (self.kind(), self.metadata().name.clone().unwrap_or_default())
    }
}

type Key = (usize, String);

/// An object with its version.
#[derive(Clone, Debug)]
pub struct Stored {
    version: u64,
    at: Duration,
    pub object: Object,
}

impl Stored {
    fn lease(&self) -> Option<&Lease> {
        match &self.object {
            Object::Lease(lease) => Some(lease.as_ref()),
            _ => None,
        }
    }
}

#[derive(Default)]
pub struct Server {
    pub now: Duration,
    version: u64,
    current: BTreeMap<Key, Stored>,
    log: [Vec<Stored>; KINDS],
}

impl Server {
    /// Creates an object that has no version, or replaces the object that has its version. Returns `None` on a conflict.
    pub fn write(&mut self, mut object: Object) -> Option<Stored> {
        let key = object.key();
        let present = self.current.get(&key).map(|stored| stored.version.to_string());
        if object.metadata().resource_version != present {
            return None;
        }
        self.version += 1;
        object.metadata_mut().resource_version = Some(self.version.to_string());
        let stored = Stored { version: self.version, at: self.now, object };
        self.log[key.0].push(stored.clone());
        self.current.insert(key, stored.clone());
        Some(stored)
    }

    /// Returns the number of versions of each kind so far.
    pub fn ends(&self) -> Ends {
        std::array::from_fn(|kind| self.log[kind].len())
    }

    /// Returns the versions of EgressNodes after position `from`, and moves `from` past them.
    pub fn egress_nodes(&self, from: &mut usize) -> impl Iterator<Item = &EgressNode> {
        let news = &self.log[EGRESS_NODES][*from..];
        *from += news.len();
        news.iter().filter_map(|stored| match &stored.object {
            Object::EgressNode(object) => Some(object.as_ref()),
            _ => None,
        })
    }

    pub fn all(&self) -> impl Iterator<Item = &Object> {
        self.current.values().map(|stored| &stored.object)
    }
}

/// The objects that a process has seen.
#[derive(Clone, Default)]
pub struct Client {
    ends: Ends,
    /// The last version of each object, by kind and name.
    seen: [BTreeMap<String, Stored>; KINDS],
    /// The agent's node while it follows only some EgressNodes.
    part_of: Option<String>,
    /// The time at which it began to list all EgressNodes.
    listing: Option<Duration>,
}

impl Client {
    /// Lists each kind as a starting process does, in the state of `late` ago.
    pub fn list(server: &Server, late: Duration) -> Self {
        let mut client = Self::default();
        let at = server.now.saturating_sub(late);
        let ends = std::array::from_fn(|kind| server.log[kind].partition_point(|stored| stored.at <= at));
        client.follow_to(server, ends);
        client
    }

    /// Like [`Self::list`] for the agent of a node.
    pub fn list_for_agent(server: &Server, late: Duration, node: &str) -> Self {
        let mut client = Self::list(server, late);
        client.part_of = Some(node.to_owned()).filter(|node| !client.must_follow_all(node));
        client
    }

    fn must_follow_all(&self, node: &str) -> bool {
        let own = self.seen[EGRESS_NODES].get(node).map(|stored| &stored.object);
        let names =
            |stored: &Stored| matches!(&stored.object, Object::EgressIp(ip) if ip.carriers().any(|name| name == node));
        matches!(own, Some(Object::EgressNode(own)) if own.follows_all()) || self.seen[EGRESS_IPS].values().any(names)
    }

    /// Returns whether the process follows an object.
    fn follows(&self, object: &Object) -> bool {
        match (&self.part_of, object) {
            (Some(node), Object::EgressNode(object)) => object.is_followed_from(node),
            _ => true,
        }
    }

    /// Returns the objects that it follows, by kind and name.
    fn followed(&self) -> impl Iterator<Item = &Stored> {
        self.seen.iter().flat_map(BTreeMap::values).filter(|stored| self.follows(&stored.object))
    }

    /// Returns whether it follows only some EgressNodes.
    pub fn is_partial(&self) -> bool {
        self.part_of.is_some()
    }

    /// Delivers the pending versions of a kind's watch. Returns whether there were any.
    pub fn follow(&mut self, server: &Server, kind: usize) -> bool {
        let mut ends = self.ends;
        ends[kind] = server.log[kind].len();
        let before = (self.ends, self.is_partial());
        self.follow_to(server, ends);
        self.list_all(server.now);
        before != (self.ends, self.is_partial())
    }

    /// Reads up to these positions.
    pub fn follow_to(&mut self, server: &Server, ends: Ends) {
        for (kind, end) in ends.into_iter().enumerate() {
            let end = end.max(self.ends[kind]);
            let news = &server.log[kind][self.ends[kind]..end];
            self.ends[kind] = end;
            news.iter().for_each(|stored| self.note(stored.clone()));
        }
    }

    /// Records a version unless a later one is known.
    pub fn note(&mut self, stored: Stored) {
        let (kind, name) = stored.object.key();
        if self.seen[kind].get(&name).is_none_or(|seen| seen.version < stored.version) {
            self.seen[kind].insert(name, stored);
        }
    }

    /// Returns whether it is listing all EgressNodes, which takes [`LISTING`].
    pub fn is_listing(&self) -> bool {
        self.is_partial() && self.listing.is_some()
    }

    /// Starts to follow all EgressNodes [`LISTING`] after this has become necessary.
    fn list_all(&mut self, now: Duration) {
        if self.part_of.as_ref().is_none_or(|node| !self.must_follow_all(node)) {
            self.listing = None;
        } else if now >= *self.listing.get_or_insert(now) + LISTING {
            self.part_of = None;
        }
    }

    /// Returns the number of versions of each kind that it has seen.
    pub fn versions_end(&self) -> Ends {
        self.ends
    }

    /// Returns the versions of all objects that it follows, except leases.
    pub fn versions(&self) -> Vec<u64> {
        self.followed().filter(|stored| stored.lease().is_none()).map(|stored| stored.version).collect()
    }

    /// Returns the number of versions of leases that it has seen.
    pub fn heard(&self) -> u64 {
        self.ends[LEASES] as u64
    }

    pub fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.seen[LEASES].values().filter_map(Stored::lease)
    }

    pub fn lease(&self, name: &str) -> Option<&Lease> {
        self.seen[LEASES].get(name).and_then(Stored::lease)
    }

    /// Returns all objects that a plan is made from. `fixed` has the objects that are never written.
    pub fn objects(&self, fixed: &ApiObjects) -> ApiObjects {
        let mut objects = fixed.clone();
        for stored in self.followed() {
            match &stored.object {
                Object::Node(object) => objects.nodes.push(object.clone()),
                Object::Pod(object) => objects.pods.push(object.clone()),
                Object::EgressIp(object) => objects.egress_ips.push(object.clone()),
                Object::EgressNode(object) => objects.egress_nodes.push(object.clone()),
                Object::Lease(_) => {}
            }
        }
        objects
    }
}

/// The translated objects, which processes share.
pub struct SharedObjects {
    pub observed: ObservedObjects,
    /// Changes if the leases of blocks differ from those of the previous read.
    pub leases: u64,
}

/// Translates objects, once for all processes that have seen the same versions.
#[derive(Default)]
pub struct Reader {
    pub fixed: ApiObjects,
    known: HashMap<(Vec<u64>, bool), Rc<SharedObjects>>,
    last: Option<Rc<SharedObjects>>,
}

impl Reader {
    pub fn read(&mut self, client: &Client) -> Rc<SharedObjects> {
        let versions = (client.versions(), client.is_partial());
        if let Some(view) = self.known.get(&versions) {
            return view.clone();
        }
        let mut observed = ObservedObjects::default();
        observed.take(client.objects(&self.fixed), client.is_partial());
        let same = self.last.as_ref().filter(|last| last.observed.plan.blocks == observed.plan.blocks);
        let leases = same.map_or(self.known.len() as u64, |last| last.leases);
        let view = Rc::new(SharedObjects { observed, leases });
        self.known.insert(versions, view.clone());
        self.last = Some(view.clone());
        view
    }
}

impl std::ops::Deref for SharedObjects {
    type Target = ObservedObjects;

    fn deref(&self) -> &ObservedObjects {
        &self.observed
    }
}
