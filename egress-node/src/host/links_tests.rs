//! Tests the follower against a real kernel.

use super::*;
use crate::host::testing::{Net, NetNs, in_netns, soon};
use egress_core::network::classify::{InterfaceRules, classify};
use rtnetlink::{LinkVlan, packet_route::link::VlanProtocol};

async fn follow() -> (Links, watch::Receiver<Arc<LinkTable>>) {
    let links = Links::follow(LinksOptions::default()).await.unwrap();
    let table = links.subscribe();
    (links, table)
}

async fn until(
    what: &str,
    table: &mut watch::Receiver<Arc<LinkTable>>,
    holds: impl Fn(&LinkTable) -> bool,
) -> Arc<LinkTable> {
    soon(what, table.wait_for(|table| holds(table))).await.unwrap().clone()
}

fn addresses(table: &LinkTable, name: &str) -> Vec<String> {
    let global = |net: &&ipnet::IpNet| !net.addr().to_string().starts_with("fe80");
    table
        .by_name(name)
        .map(|link| link.addresses.iter().filter(global).map(ToString::to_string).collect())
        .unwrap_or_default()
}

#[test]
fn the_first_link_table_is_complete() {
    in_netns("the_first_link_table_is_complete", async || {
        let net = Net::here();
        net.veth("eth0", "far").await;
        net.up("eth0").await;
        net.up("far").await;
        net.address("eth0", "192.0.2.7/24").await;
        net.address("eth0", "2001:db8::7/64").await;
        net.default_route("192.0.2.1", 100).await;
        net.default_route("2001:db8::1", 1024).await;
        let links = Links::follow(LinksOptions::default()).await.unwrap();
        let table = links.current();
        let eth0 = table.by_name("eth0").unwrap();
        assert_eq!(eth0.kind, LinkKind::Veth);
        assert!(eth0.up && eth0.carrier && eth0.peer_netns.is_none());
        assert_eq!((eth0.mtu, eth0.mac), (1500, Some(net.mac("eth0").await)));
        assert_eq!(eth0.peer, table.by_name("far").map(|link| link.index));
        assert_eq!(addresses(&table, "eth0"), ["192.0.2.7/24", "2001:db8::7/64"]);
        assert_eq!(table.by_name("lo").map(|link| &link.kind), Some(&LinkKind::Loopback));
        let route = table.default_route(false).unwrap();
        assert_eq!((route.oif, route.metric, route.gateway), (eth0.index, 100, "192.0.2.1".parse().ok()));
        assert_eq!(table.default_route(true).unwrap().gateway, "2001:db8::1".parse().ok());
    });
}

#[test]
fn a_vlan_device_is_read_with_its_vlan_and_the_link_below() {
    let link = |protocol| {
        let mut message = LinkVlan::new("eth0.100", 3, 100).protocol(protocol).build();
        message.attributes.push(LinkAttribute::Mtu(1500));
        let link = decode::link(&message).unwrap();
        (link.kind, link.peer)
    };
    assert_eq!(link(VlanProtocol::Ieee8021Q), (LinkKind::Vlan(100), Some(3)));
    assert_eq!(link(VlanProtocol::Ieee8021Ad), (LinkKind::Other("vlan".to_owned()), Some(3)));
}

#[test]
fn a_pod_interface_is_reported_when_its_peer_moves_away() {
    in_netns("a_pod_interface_is_reported_when_its_peer_moves_away", async || {
        let (_links, mut table) = follow().await;
        let (net, pod) = (Net::here(), NetNs::create());
        net.bridge("cni0").await;
        net.veth("veth1", "eth0").await;
        net.enslave("veth1", "cni0").await;
        let seen = until("both ends here", &mut table, |table| table.by_name("eth0").is_some()).await;
        assert!(seen.by_name("veth1").unwrap().peer_netns.is_none());
        net.move_to("eth0", &pod).await;
        let seen = until("peer elsewhere", &mut table, |table| {
            table.by_name("veth1").is_some_and(|link| link.peer_netns.is_some())
        })
        .await;
        let veth1 = seen.by_name("veth1").unwrap();
        assert_eq!(seen.by_name("eth0"), None);
        assert_eq!(veth1.master, seen.by_name("cni0").map(|link| link.index));
        assert_eq!(classify(&seen, &InterfaceRules::default()).pods, [veth1.index].into());
        drop(pod);
        until("gone with the pod", &mut table, |table| table.by_name("veth1").is_none()).await;
    });
}

#[test]
fn a_port_that_leaves_its_bridge_stays_a_link() {
    in_netns("a_port_that_leaves_its_bridge_stays_a_link", async || {
        let net = Net::here();
        net.bridge("cni0").await;
        net.veth("veth1", "eth0").await;
        net.enslave("veth1", "cni0").await;
        let (_links, mut table) = follow().await;
        net.delete("cni0").await;
        let seen = until("bridge gone", &mut table, |table| table.by_name("cni0").is_none()).await;
        assert_eq!(seen.by_name("veth1").map(|link| link.master), Some(None));
    });
}

#[test]
fn addresses_links_and_routes_that_vanish_are_noticed() {
    in_netns("addresses_links_and_routes_that_vanish_are_noticed", async || {
        let net = Net::here();
        net.veth("eth0", "far").await;
        net.up("far").await;
        net.up("eth0").await;
        net.address("eth0", "192.0.2.7/24").await;
        net.address("eth0", "192.0.2.8/24").await;
        let (_links, mut table) = follow().await;
        net.default_route("192.0.2.1", 0).await;
        until("route", &mut table, |table| table.default_route(false).is_some()).await;
        net.remove_address("eth0", "192.0.2.8").await;
        until("address gone", &mut table, |table| addresses(table, "eth0") == ["192.0.2.7/24"]).await;
        net.down("far").await;
        until("carrier lost", &mut table, |table| table.by_name("eth0").is_some_and(|link| link.up && !link.carrier))
            .await;
        // When a link goes down, the kernel drops its route without a report.
        net.down("eth0").await;
        let seen = until("link down", &mut table, |table| table.by_name("eth0").is_some_and(|link| !link.up)).await;
        assert_eq!(seen.default_route(false), None);
        net.delete("eth0").await;
        until("link gone", &mut table, |table| table.by_name("far").is_none()).await;
    });
}

#[test]
fn removing_the_address_of_the_default_route_removes_the_route() {
    in_netns("removing_the_address_of_the_default_route_removes_the_route", async || {
        let net = Net::here();
        net.veth("eth0", "far").await;
        net.up("eth0").await;
        net.address("eth0", "192.0.2.7/24").await;
        net.default_route("192.0.2.1", 0).await;
        let (links, mut table) = follow().await;
        assert!(links.current().default_route(false).is_some());
        net.remove_address("eth0", "192.0.2.7").await;
        let seen = until("address gone", &mut table, |table| addresses(table, "eth0").is_empty()).await;
        assert_eq!(seen.default_route(false), None);
    });
}

#[test]
fn lost_netlink_reports_are_recovered() {
    in_netns("lost_netlink_reports_are_recovered", async || {
        let options = LinksOptions { receive_buffer: 1, ..LinksOptions::default() };
        let links = Links::follow(options).await.unwrap();
        let mut table = links.subscribe();
        // The follower shares this thread, which is blocked: hundreds of reports arrive at a buffer that holds a few.
        std::thread::scope(|scope| {
            let work = || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let net = Net::here();
                    for number in 0..60 {
                        net.veth(&format!("veth{number}"), &format!("far{number}")).await;
                        net.up(&format!("veth{number}")).await;
                    }
                    net.delete("veth7").await;
                })
            };
            scope.spawn(work);
        });
        let seen = until("all of them", &mut table, |table| table.by_name("far59").is_some()).await;
        assert_eq!(seen.links.values().filter(|link| link.kind == LinkKind::Veth).count(), 2 * 59);
        assert!(seen.by_name("veth59").unwrap().up);
    });
}

#[test]
fn the_channel_closes_when_the_follower_ends() {
    in_netns("the_channel_closes_when_the_follower_ends", async || {
        let (links, mut table) = follow().await;
        drop(links);
        soon("closed", async { while table.changed().await.is_ok() {} }).await;
    });
}
