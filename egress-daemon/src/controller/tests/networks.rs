//! Tests of pod networks that CNIs name.

use super::*;

/// docs/failures.md: pod-net.
#[tokio::test(flavor = "multi_thread")]
async fn pod_net_networks_that_a_cni_names_reach_the_agents() {
    const CNI: &str = "
{apiVersion: crd.projectcalico.org/v1, kind: IPPool, metadata: {name: default}, spec: {cidr: 10.1.0.0/16, natOutgoing: true}}
---
{apiVersion: cilium.io/v2, kind: CiliumNode, metadata: {name: w1}, spec: {ipam: {podCIDRs: [10.0.7.0/24, 10.2.0.0/24]}}}
---
{apiVersion: cilium.io/v2alpha1, kind: CiliumPodIPPool, metadata: {name: blue}, spec: {ipv4: {cidrs: [10.3.0.0/16], maskSize: 27}}}
---
{apiVersion: crd.antrea.io/v1beta1, kind: IPPool, metadata: {name: racks}, spec: {ipRanges: [{start: 10.4.0.8, end: 10.4.0.15}]}}
---
{apiVersion: kubeovn.io/v1, kind: Subnet, metadata: {name: ovn-default}, spec: {cidrBlock: 10.16.0.0/16, vpc: ovn-cluster}}
";
    let mut world = ControllerFixture::new();
    fs::write(world.path().join("cni.yaml"), CNI).unwrap();
    // A pod in Calico's pool needs no separate entry, but a pod in no named network does.
    let pod = |name: &str, ip: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: shop}}, spec: {{nodeName: w1, containers: []}}, status: \
             {{podIP: {ip}}}}}\n"
        )
    };
    fs::write(world.path().join("pods.yaml"), [pod("c", "10.1.0.9"), pod("d", "10.9.0.9")].join("---\n")).unwrap();
    let _controller = controller(world.path(), "one");
    let told = |store: &Store| {
        let nodes = store.list::<EgressNode>();
        let shared: Vec<String> = nodes.iter().flat_map(|node| node.spec.cluster_networks.clone()).collect();
        let own = nodes.iter().flat_map(|node| node.spec.pod_networks.clone()).collect::<Vec<_>>();
        (shared, own)
    };
    let mut shared = vec!["10.1.0.0/16", "10.3.0.0/16", "10.4.0.8/29", "10.16.0.0/16"];
    let own = ["10.2.0.0/24", "10.9.0.9/32"];
    world
        .until(|store| {
            (told(store) == (shared.iter().map(ToString::to_string).collect(), own.map(String::from).into()))
                .then_some(())
        })
        .await;
    assert!(world.store.problems().is_empty(), "{:?}", world.store.problems());
    // A new node whose name sorts first does not take over the networks that another node's object has.
    let keeper = |store: &Store| store.list::<EgressNode>().into_iter().find(|n| !n.spec.cluster_networks.is_empty());
    let before = keeper(&world.store).and_then(|node| node.metadata.name.clone());
    fs::write(world.path().join("node.yaml"), "{apiVersion: v1, kind: Node, metadata: {name: a1}}\n").unwrap();
    fs::write(world.path().join("cni.yaml"), CNI.replace("10.3.0.0/16", "10.3.0.0/17")).unwrap();
    shared[1] = "10.3.0.0/17";
    world
        .until(|store| {
            (store.get::<EgressNode>(&Key::cluster("a1")).is_some() && told(store).0 == shared).then_some(())
        })
        .await;
    assert_eq!(keeper(&world.store).and_then(|node| node.metadata.name.clone()), before);
}
