//! Tests the roles of links, as tables of nodes.

use super::*;
use crate::network::links::DefaultRoute;
use crate::testing::{default_route, link};

fn with(mut link: Link, kind: LinkKind, addresses: &[&str]) -> Link {
    link.kind = kind;
    link.addresses = addresses.iter().map(|net| net.parse().unwrap()).collect();
    link
}

fn pod_veth(index: u32, name: &str, master: Option<u32>, addresses: &[&str]) -> Link {
    Link { peer_netns: Some(0), peer: Some(2), master, ..with(link(index, name), LinkKind::Veth, addresses) }
}

fn table(links: Vec<Link>, routes: Vec<DefaultRoute>) -> LinkTable {
    LinkTable {
        route_changes: 0,
        links: links.into_iter().map(|link| (link.index, link)).collect(),
        default_routes: routes.into_iter().collect(),
        ..LinkTable::default()
    }
}

fn rules(uplinks: &[&str], pods: &[&str]) -> InterfaceRules {
    let patterns = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    InterfaceRules {
        uplinks: patterns(uplinks),
        pod_interfaces: patterns(pods),
        tunnel: "spillway0".to_owned(),
        node_addresses: Vec::new(),
    }
}

fn physical(index: u32, name: &str, addresses: &[&str]) -> Link {
    with(link(index, name), LinkKind::Physical, addresses)
}

#[test]
fn link_roles_on_nodes_of_well_known_cnis() {
    let lo = || with(link(1, "lo"), LinkKind::Loopback, &["127.0.0.1/8", "::1/128", "10.9.9.9/24"]);
    let eth0 = || physical(2, "eth0", &["192.0.2.7/24", "fe80::7/64"]);
    let out = || vec![default_route(2, "192.0.2.1")];
    let other = |kind: &str| LinkKind::Other(kind.to_owned());
    type Case = (&'static str, LinkTable, InterfaceRules, &'static [u32], &'static [u32]);
    let cases: Vec<Case> = vec![
        (
            "point-to-point veths",
            table(vec![lo(), eth0(), pod_veth(3, "cali1", None, &["fe80::1/64"])], out()),
            rules(&[], &[]),
            &[3],
            &[2],
        ),
        (
            "a veth with a host address, as GKE has it",
            table(vec![eth0(), pod_veth(3, "gke1", None, &["10.0.0.1/32"])], out()),
            rules(&[], &[]),
            &[3],
            &[2],
        ),
        (
            "a bridge of pods with the pods' gateway address",
            table(
                vec![
                    eth0(),
                    with(link(3, "cni0"), LinkKind::Bridge, &["10.244.1.1/24"]),
                    pod_veth(4, "veth1", Some(3), &[]),
                ],
                out(),
            ),
            rules(&[], &[]),
            &[4],
            &[2],
        ),
        (
            "a bridge that leads out, with the card as its port",
            table(
                vec![
                    Link { master: Some(3), ..physical(2, "eth0", &[]) },
                    with(link(3, "br0"), LinkKind::Bridge, &["192.0.2.7/24"]),
                ],
                vec![default_route(3, "192.0.2.1")],
            ),
            rules(&[], &[]),
            &[],
            &[3],
        ),
        (
            "a node that is a namespace itself: its uplink is a veth",
            table(
                vec![pod_veth(2, "eth0", None, &["172.18.0.3/16"]), pod_veth(3, "veth1", None, &[])],
                vec![default_route(2, "172.18.0.1")],
            ),
            rules(&[], &[]),
            &[3],
            &[2],
        ),
        (
            "a node that is a namespace itself: its uplink is a VLAN device of a veth",
            table(
                vec![
                    pod_veth(2, "eth0", None, &[]),
                    Link { peer: Some(2), ..with(link(3, "eth0.100"), LinkKind::Vlan(100), &["172.18.0.3/16"]) },
                    pod_veth(4, "veth1", None, &[]),
                ],
                vec![default_route(3, "172.18.0.1")],
            ),
            rules(&[], &[]),
            &[4],
            &[3],
        ),
        (
            "a default route alone makes an uplink",
            table(vec![pod_veth(2, "eth0", None, &["169.254.1.1/32"])], out()),
            rules(&[], &[]),
            &[],
            &[2],
        ),
        (
            "tunnels and our own device",
            table(
                vec![
                    eth0(),
                    with(link(3, "flannel.1"), LinkKind::Vxlan, &["10.244.1.0/24"]),
                    with(link(4, "wg0"), LinkKind::Tunnel("wireguard".into()), &["10.7.0.1/24"]),
                    with(link(5, "spillway0"), LinkKind::Vxlan, &["10.8.0.1/24"]),
                ],
                out(),
            ),
            rules(&["spill*"], &["*0"]),
            &[2, 4],
            &[],
        ),
        (
            "a tunnel that the configuration names",
            table(vec![eth0(), with(link(4, "wg0"), LinkKind::Tunnel("wireguard".into()), &[])], out()),
            rules(&["wg*"], &[]),
            &[],
            &[2, 4],
        ),
        (
            "addresses of services",
            table(
                vec![
                    eth0(),
                    with(link(3, "kube-ipvs0"), other("dummy"), &["10.96.0.1/32"]),
                    with(link(4, "nodelocaldns"), other("dummy"), &["169.254.20.10/32"]),
                ],
                out(),
            ),
            rules(&[], &[]),
            &[],
            &[2],
        ),
        (
            "a veth pair within the host",
            table(
                vec![
                    eth0(),
                    with(link(3, "cilium_host"), LinkKind::Veth, &["10.0.1.1/32"]),
                    with(link(4, "cilium_net"), LinkKind::Veth, &[]),
                ],
                out(),
            ),
            rules(&[], &[]),
            &[],
            &[2],
        ),
        (
            "a second uplink without default route",
            table(vec![eth0(), physical(3, "eth1", &["2001:db8::7/64"])], out()),
            rules(&[], &[]),
            &[],
            &[2, 3],
        ),
        (
            "a veth that is not configured yet, named by the configuration",
            table(vec![pod_veth(2, "eth0", None, &[])], vec![]),
            rules(&["eth*"], &[]),
            &[],
            &[2],
        ),
        (
            "pod patterns win over uplink patterns",
            table(vec![pod_veth(2, "tap0", None, &["10.1.0.1/24"])], vec![]),
            rules(&["tap*"], &["tap?"]),
            &[2],
            &[],
        ),
        (
            "link-local addresses make no uplink",
            table(vec![physical(2, "eth0", &["fe80::7/64", "169.254.7.7/16"])], vec![]),
            rules(&[], &[]),
            &[],
            &[],
        ),
    ];
    for (name, table, rules, pods, uplinks) in cases {
        let roles = classify(&table, &rules);
        assert_eq!(roles.pods, pods.iter().copied().collect(), "pods: {name}");
        assert_eq!(roles.uplinks, uplinks.iter().copied().collect(), "uplinks: {name}");
    }
}

#[test]
fn underlay() {
    let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<BTreeSet<IpAddr>>();
    let links = || {
        vec![
            with(link(1, "lo"), LinkKind::Loopback, &["127.0.0.1/8", "10.255.0.7/32"]),
            physical(2, "eth0", &["192.0.2.7/24", "2001:db8::7/64", "fe80::7/64"]),
            physical(3, "eth1", &["198.51.100.7/24"]),
        ]
    };
    let routes = || vec![default_route(2, "192.0.2.1"), DefaultRoute { ipv6: true, ..default_route(2, "fe80::1") }];
    type Case = (&'static str, Vec<DefaultRoute>, &'static [&'static str], &'static [(u32, &'static [&'static str])]);
    let cases: [Case; 6] = [
        ("the node's address", routes(), &["198.51.100.7"], &[(3, &["198.51.100.7"])]),
        (
            "one of each family",
            routes(),
            &["198.51.100.7", "2001:db8::7"],
            &[(2, &["2001:db8::7"]), (3, &["198.51.100.7"])],
        ),
        ("an address on the loopback", routes(), &["10.255.0.7"], &[(2, &["10.255.0.7"])]),
        ("no address given", routes(), &[], &[(2, &["192.0.2.7", "2001:db8::7"])]),
        ("an address that is not there", routes(), &["203.0.113.1"], &[(2, &["192.0.2.7", "2001:db8::7"])]),
        ("nothing", vec![], &[], &[]),
    ];
    for (name, routes, node_addresses, expected) in cases {
        let rules =
            InterfaceRules { node_addresses: addresses(node_addresses).into_iter().collect(), ..rules(&[], &[]) };
        let expected = expected.iter().map(|&(index, texts)| (index, addresses(texts))).collect();
        assert_eq!(classify(&table(links(), routes), &rules).underlays, expected, "{name}");
    }
}

#[test]
fn preferred_source_of_the_default_route_is_the_underlays_address() {
    let route = DefaultRoute { source: Some("10.255.0.7".parse().unwrap()), ..default_route(2, "192.0.2.1") };
    let roles = classify(&table(vec![physical(2, "eth0", &["192.0.2.7/24"])], vec![route]), &rules(&[], &[]));
    assert_eq!(roles.underlays, [(2, ["10.255.0.7".parse().unwrap()].into())].into());
}

#[test]
fn patterns() {
    for (pattern, name, expected) in [
        ("eth0", "eth0", true),
        ("eth0", "eth01", false),
        ("eth*", "eth", true),
        ("eth*", "veth", false),
        ("*eth*", "veth12", true),
        ("e?h0", "eth0", true),
        ("e?h0", "eh0", false),
        ("*", "anything", true),
    ] {
        assert_eq!(pattern.parse::<NamePattern>().unwrap().matches(name), expected, "{pattern} {name}");
    }
    for wrong in ["", "a/b", "a b", "sixteen-letters-"] {
        assert!(wrong.parse::<NamePattern>().is_err(), "{wrong:?}");
    }
}
