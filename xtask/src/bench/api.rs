//! A stand-in for an API server with a cluster that no machine holds: it lists objects that it makes up on the way, says
//! yes to every write, and tells watches what it is given to tell. It keeps no objects, so that the memory of the controller
//! in front of it is all there is to measure.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// Every so many nodes there is a gateway.
pub const GATEWAY_EVERY: u32 = 100;
/// How often gateways renew their leases.
const RENEW_EVERY: Duration = Duration::from_secs(5);
/// How often a watch looks whether there is something to tell.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Each kind's objects have versions and uids of their own.
const APART: u64 = 1_000_000;
/// The version of the first write; all objects of the cluster have lower ones.
const FIRST_WRITE: u64 = 100 * APART;

/// The cluster.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub nodes: u32,
    pub pods: u32,
    pub policies: u32,
    pub egress_ips: u32,
}

/// A running one. It ends with the process.
pub struct Api {
    pub address: SocketAddr,
    world: Arc<FakeApiServer>,
}

struct FakeApiServer {
    size: Size,
    state: Mutex<FakeApiState>,
}

#[derive(Default)]
struct FakeApiState {
    version: u64,
    writes: u64,
    /// How many objects of each kind were created.
    created: BTreeMap<String, u64>,
    /// What watches are told, by the kind's name in paths.
    told: BTreeMap<&'static str, Vec<Value>>,
}

impl Api {
    pub fn start(size: Size) -> Result<Api> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
        let address = listener.local_addr()?;
        let world = Arc::new(FakeApiServer { size, state: Mutex::default() });
        let shared = Arc::clone(&world);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let world = Arc::clone(&shared);
                // An error is the end of a connection.
                thread::spawn(move || world.serve(stream));
            }
        });
        Ok(Api { address, world })
    }

    /// How many writes there were.
    pub fn writes(&self) -> u64 {
        self.world.state().writes
    }

    /// How many objects of a kind were created.
    pub fn created(&self, kind: &str) -> u64 {
        self.world.state().created.get(kind).copied().unwrap_or(0)
    }

    /// Adds a pod of an application to a node.
    pub fn add_pod(&self, number: u32, application: u32, node: u32) {
        let pod = pod(number, application, node);
        self.world.tell("pods", "ADDED", pod);
    }

    /// Adds a policy for the pods of an application.
    pub fn add_policy_for(&self, number: u32, application: u32) {
        let mut policy = policy(number, 1);
        policy["spec"]["selectors"][0]["podSelector"]["matchLabels"]["app"] = format!("app-{application}").into();
        self.world.tell("egressgatewaypolicies", "ADDED", policy);
    }
}

impl FakeApiServer {
    fn state(&self) -> MutexGuard<'_, FakeApiState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, kind: &'static str, how: &str, object: Value) {
        self.state().told.entry(kind).or_default().push(json!({"type": how, "object": object}));
    }

    /// Answers the requests of one connection.
    fn serve(&self, stream: TcpStream) -> Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut writer = stream;
        loop {
            let Some(request) = Request::read(&mut reader)? else { return Ok(()) };
            match request.method.as_str() {
                "GET" if request.parameter("watch").is_some() => return self.watch(&request, &mut writer),
                "GET" => answer(&mut writer, &self.list(&request))?,
                _ => answer(&mut writer, &self.write(&request)?)?,
            }
        }
    }

    fn list(&self, request: &Request) -> Value {
        let Size { nodes, pods, policies, egress_ips } = self.size;
        let share = |n: u32| (u64::from(n) * u64::from(egress_ips) / u64::from(policies)) as u32;
        let number = |name| request.parameter(name).and_then(|text| text.parse::<u32>().ok());
        let (first, limit) = (number("continue").unwrap_or(0), number("limit").unwrap_or(u32::MAX));
        let page = |count: u32, object: &dyn Fn(u32) -> Value| {
            let end = count.min(first.saturating_add(limit));
            let mut metadata = json!({"resourceVersion": (FIRST_WRITE - 1).to_string()});
            if end < count {
                metadata["continue"] = end.to_string().into();
            }
            json!({"apiVersion": "v1", "kind": "List", "metadata": metadata, "items": (first..end).map(object).collect::<Vec<_>>()})
        };
        match request.kind() {
            "nodes" => page(nodes, &node),
            "pods" => page(pods, &|n| pod(n, n % policies, n % nodes)),
            "namespaces" => page(NAMESPACES, &namespace),
            "egressgatewaypolicies" => page(policies, &|n| policy(n, share(n + 1) - share(n))),
            "egressippools" => page(1, &|_| pool()),
            "leases" => page(nodes.div_ceil(GATEWAY_EVERY), &|n| lease(n, 3 * APART + u64::from(n))),
            _ => page(0, &|_| Value::Null),
        }
    }

    /// Tells what there is to tell for as long as somebody listens.
    fn watch(&self, request: &Request, writer: &mut TcpStream) -> Result<()> {
        writer.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")?;
        let (kind, mut told, mut renewed) = (request.kind(), 0, SystemTime::now());
        loop {
            let mut news: Vec<Value> = self.state().told.get(kind).into_iter().flatten().skip(told).cloned().collect();
            told += news.len();
            if kind == "leases" && renewed.elapsed()? >= RENEW_EVERY {
                renewed = SystemTime::now();
                let leases = (0..self.size.nodes.div_ceil(GATEWAY_EVERY)).map(|n| lease(n, self.next_version()));
                news.extend(leases.map(|lease| json!({"type": "MODIFIED", "object": lease})));
            }
            for event in news {
                let line = format!("{event}\n");
                write!(writer, "{:x}\r\n{line}\r\n", line.len())?;
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    fn next_version(&self) -> u64 {
        let mut state = self.state();
        state.version += 1;
        FIRST_WRITE + state.version
    }

    /// Says that a write has succeeded.
    fn write(&self, request: &Request) -> Result<Value> {
        let mut object: Value = serde_json::from_slice(&request.body).context("a body that is no JSON")?;
        let version = self.next_version();
        let kind = object["kind"].as_str().unwrap_or_default().to_owned();
        // The fields that are applied to an object of a person come back with the rest of it.
        if request.method == "PATCH" {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            let whole = match kind.as_str() {
                "EgressIPPool" => pool(),
                _ => policy(name.trim_start_matches("policy-").parse().unwrap_or(0), 1),
            };
            object["spec"] = whole["spec"].clone();
            object["metadata"] = whole["metadata"].clone();
        }
        object["metadata"]["resourceVersion"] = version.to_string().into();
        for (field, value) in [("uid", uid(version)), ("creationTimestamp", CREATED.to_owned())] {
            if object["metadata"][field].is_null() {
                object["metadata"][field] = value.into();
            }
        }
        // Leases are renewed all the time, and events are about writes.
        if !matches!(kind.as_str(), "Lease" | "Event") {
            let mut state = self.state();
            state.writes += 1;
            *state.created.entry(kind).or_default() += u64::from(request.method == "POST");
        }
        Ok(object)
    }
}

/// A request of HTTP/1.1.
struct Request {
    method: String,
    path: String,
    query: String,
    body: Vec<u8>,
}

impl Request {
    fn read(reader: &mut impl BufRead) -> Result<Option<Request>> {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let mut words = line.split_whitespace();
        let (method, target) = (words.next().unwrap_or_default().to_owned(), words.next().unwrap_or_default());
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let (path, query) = (path.to_owned(), query.to_owned());
        let mut length = 0;
        loop {
            line.clear();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.trim().split_once(':') else { break };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse()?;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        Ok(Some(Request { method, path, query, body }))
    }

    fn parameter(&self, name: &str) -> Option<&str> {
        self.query.split('&').find_map(|pair| pair.split_once('=').filter(|(n, _)| *n == name)).map(|(_, value)| value)
    }

    /// The kind's name in the path of a list or a watch.
    fn kind(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }
}

fn answer(writer: &mut TcpStream, body: &Value) -> Result<()> {
    let body = body.to_string();
    write!(
        writer,
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    Ok(())
}

const NAMESPACES: u32 = 50;
const CREATED: &str = "2026-01-01T00:00:00Z";

fn uid(number: u64) -> String {
    format!("00000000-0000-4000-a000-{number:012}")
}

fn metadata(name: &str, number: u64) -> Value {
    json!({"name": name, "uid": uid(number), "resourceVersion": number.to_string(), "creationTimestamp": CREATED})
}

fn node(n: u32) -> Value {
    let name = format!("node-{n:05}");
    let mut metadata = metadata(&name, u64::from(n) + 1);
    metadata["labels"] = json!({
        "kubernetes.io/hostname": name,
        "topology.kubernetes.io/zone": format!("zone-{}", n % 3),
        "egress": n.is_multiple_of(GATEWAY_EVERY).to_string(),
    });
    let cidr = format!("{}/24", Ipv4Addr::from(0x0a00_0000 + (n << 8)));
    json!({
        "metadata": metadata,
        "spec": {"podCIDR": cidr, "podCIDRs": [cidr]},
        "status": {
            "addresses": [{"type": "InternalIP", "address": Ipv4Addr::from(0xac10_0000 + n).to_string()}],
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}],
        },
    })
}

fn pod(n: u32, application: u32, node: u32) -> Value {
    let mut metadata = metadata(&format!("app-{application}-7d9c6f5b8-{n:06}"), APART + u64::from(n));
    metadata["namespace"] = format!("team-{}", application % NAMESPACES).into();
    metadata["labels"] = json!({"app": format!("app-{application}"), "tier": "web", "pod-template-hash": "7d9c6f5b8"});
    let address = Ipv4Addr::from(0x0a00_0000 + (node << 8) + 1 + n / 10_000 % 250).to_string();
    json!({
        "metadata": metadata,
        "spec": {
            "nodeName": format!("node-{node:05}"),
            "containers": [{"name": "main", "image": "registry.example/app:1", "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}}}],
        },
        "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

fn namespace(n: u32) -> Value {
    json!({"metadata": metadata(&format!("team-{n}"), 2 * APART + u64::from(n))})
}

fn policy(n: u32, egress_ips: u32) -> Value {
    let distribution = if n.is_multiple_of(4) { "PerEndpoint" } else { "PerFlow" };
    json!({
        "apiVersion": "spillway.io/v1beta1",
        "kind": "EgressGatewayPolicy",
        "metadata": metadata(&format!("policy-{n:04}"), 4 * APART + u64::from(n)),
        "spec": {
            "selectors": [{"podSelector": {"matchLabels": {"app": format!("app-{n}")}}}],
            "destinationCIDRs": ["0.0.0.0/0"],
            "distribution": distribution,
            "egressIPPools": [{"name": "public", "count": egress_ips}],
        },
    })
}

fn pool() -> Value {
    json!({
        "apiVersion": "spillway.io/v1beta1",
        "kind": "EgressIPPool",
        "metadata": metadata("public", 5 * APART),
        "spec": {"ipRanges": [{"cidr": "198.18.0.0/15"}], "nodeSelector": {"matchLabels": {"egress": "true"}}},
    })
}

/// The lease of a gateway; each version is a renewal.
fn lease(n: u32, version: u64) -> Value {
    let node = format!("node-{:05}", n * GATEWAY_EVERY);
    let mut metadata = metadata(&format!("gateway-{node}"), 3 * APART + u64::from(n));
    metadata["namespace"] = "spillway".into();
    metadata["resourceVersion"] = version.to_string().into();
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 3600, "leaseTransitions": 1,
            "renewTime": format!("2026-01-01T00:00:00.{:06}Z", version % 1_000_000)},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world() -> FakeApiServer {
        FakeApiServer { size: Size { nodes: 300, pods: 7, policies: 2, egress_ips: 3 }, state: Mutex::default() }
    }

    fn request(text: &str) -> Request {
        Request::read(&mut text.as_bytes()).unwrap().unwrap()
    }

    #[test]
    fn lists_come_in_pages_that_have_every_object_once() {
        let (world, mut names, mut next) = (world(), Vec::new(), "0".to_owned());
        while !next.is_empty() {
            let list = world.list(&request(&format!("GET /api/v1/pods?limit=3&continue={next} HTTP/1.1\r\n\r\n")));
            names.extend(list["items"].as_array().unwrap().iter().map(|pod| pod["metadata"]["name"].to_string()));
            next = list["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
        }
        let different: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!((names.len(), different.len()), (7, 7));
        let leases =
            world.list(&request("GET /apis/coordination.k8s.io/v1/namespaces/spillway/leases HTTP/1.1\r\n\r\n"));
        assert_eq!(leases["items"].as_array().unwrap().len(), 3, "a gateway every {GATEWAY_EVERY} nodes");
    }

    #[test]
    fn writes_succeed_and_are_counted_but_for_leases() {
        let world = world();
        let send = |kind: &str| {
            let body = json!({"kind": kind, "metadata": {"name": "a"}}).to_string();
            world.write(&request(&format!("POST /x HTTP/1.1\r\ncontent-length: {}\r\n\r\n{body}", body.len()))).unwrap()
        };
        let versions = ["EgressIP", "Lease", "EgressIP"].map(|kind| send(kind)["metadata"]["resourceVersion"].clone());
        assert!(versions[0] != versions[2]);
        let state = world.state();
        assert_eq!((state.writes, state.created["EgressIP"]), (2, 2));
    }
}
