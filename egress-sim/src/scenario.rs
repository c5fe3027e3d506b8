//! Makes the cluster of a seed: machines, pools, policies, pods and faults.

use super::{
    api::Object,
    cluster::{SimCluster, SimHost},
    faults::Fault,
    machine::{Kernel, Times},
    rng::Rng,
};
use egress_objects::snapshot::ApiObjects;
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};

/// The time before which there are no faults.
const CALM: Duration = Duration::from_secs(7);

fn read<T: serde::de::DeserializeOwned>(value: Value) -> Arc<T> {
    Arc::new(serde_json::from_value(value).unwrap())
}

fn spillway(kind: &str, name: &str, spec: Value) -> Value {
    let metadata = json!({"name": name, "generation": 1});
    json!({"apiVersion": "spillway.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec})
}

/// Returns a pool with `outbound: Owner` and one with `outbound: Spread`, and a policy for each.
fn fixed(rng: &mut Rng, gateways: usize) -> ApiObjects {
    let pool = |n: usize, outbound: &str, carriers: u64| {
        let range = json!([{"start": format!("192.0.2.{}", 16 * n + 1), "end": format!("192.0.2.{}", 16 * n + 9)}]);
        let failback = json!({"mode": "Preferred", "delay": "3s"});
        let nodes = json!({"matchLabels": {"egress": "true"}});
        read(spillway(
            "EgressIPPool",
            &outbound.to_lowercase(),
            json!({"ipRanges": range, "nodeSelector": nodes, "outbound": outbound, "carriers": carriers, "failback": failback}),
        ))
    };
    let policy = |name: &str, destination: &str, count: u64| {
        read(spillway(
            "EgressGatewayPolicy",
            name,
            json!({
                "selectors": [{"podSelector": {}}], "destinationCIDRs": [destination],
                "egressIPPool": {"name": name, "count": count}
            }),
        ))
    };
    let carriers = |rng: &mut Rng| 2 + rng.below(gateways as u64 - 1);
    ApiObjects {
        pools: vec![pool(0, "Owner", carriers(rng)), pool(1, "Spread", carriers(rng))],
        policies: vec![policy("owner", "0.0.0.0/1", 1 + rng.below(2)), policy("spread", "128.0.0.0/1", 1)],
        ..ApiObjects::default()
    }
}

/// Returns the cluster of a seed.
pub fn cluster(seed: u64, trace: bool) -> SimCluster {
    let mut rng = Rng::new(seed);
    let gateways = 2 + rng.index(3);
    let sources = 1 + rng.index(3);
    let lease = if rng.chance(100) { 15 } else { 6 };
    let selective = rng.chance(333);
    let times = Times {
        lease: Duration::from_secs(lease),
        lease_of_controllers: Duration::from_secs(lease) / if rng.chance(300) { 3 } else { 1 },
        renew: Duration::from_secs(lease) / 3,
        deadline: Duration::from_secs(lease) * 2 / 3,
    };
    let fixed = fixed(&mut rng, gateways);
    let names: Vec<String> =
        (0..gateways).map(|n| format!("gw{n}")).chain((0..sources).map(|n| format!("w{n}"))).collect();
    let machine = |(n, name): (usize, &String)| SimHost {
        name: name.as_str().into(),
        is_gateway: n < gateways,
        powered: true,
        kernel: Kernel::default(),
        agent: None,
        said: Default::default(),
        uplink_faults: 0,
    };
    let machines = names.iter().enumerate().map(machine).collect();
    let until = CALM + Duration::from_secs(2 * lease + 4);
    let faults = Fault::draw(&mut rng, gateways, names.len(), CALM, until);
    let end = until + Duration::from_secs(2 * lease + 6);
    let mut cluster = SimCluster::new(rng, times, machines, end);
    (cluster.reader.fixed, cluster.faults, cluster.trace) = (fixed, faults, trace);
    cluster.selective = selective;
    for (n, name) in names.iter().enumerate() {
        let address = format!("10.0.0.{}", n + 1);
        let labels = json!({"egress": (n < gateways).to_string()});
        let status = json!({"addresses": [{"type": "InternalIP", "address": address}]});
        let node = read(json!({"metadata": {"name": name, "labels": labels}, "status": status}));
        cluster.server.write(Object::Node(node));
        if n >= gateways {
            let metadata = json!({"name": format!("pod-{name}"), "namespace": "ns", "uid": "u"});
            let status = json!({"podIP": format!("10.1.{n}.1")});
            let spec = json!({"nodeName": name, "containers": []});
            cluster.server.write(Object::Pod(read(json!({"metadata": metadata, "spec": spec, "status": status}))));
        }
    }
    cluster
}
