//! Other software at the hooks: programs before ours, programs that detach ours, packets that take other paths; and a tunnel port in use.

use std::net::{IpAddr, SocketAddr};

use anyhow::Context;
use lab::hook::{ChainPosition, HookAction, Means, Side, hook, hook_by};
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Family, Lab, PodSpec, StartOptions, wait_for};

use crate::support::{
    PATIENCE, attaching, calm, counter, fixed, has_bpftool, start, start_with, wait_bypass, wait_in_force, web,
    web_pod, web_pod_with,
};

/// docs/failures.md: hook-order, clsact-order.
#[test]
fn hook_order_programs_that_end_the_chain_do_not_stay_before_ours() {
    for means in Means::BOTH {
        Lab::builder().workers(1).gateways(1).run(|lab| {
            lab.manifests().write("web", &web(&[10]))?;
            let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
            let node = lab.node("worker1").ns.clone();
            let first =
                |interface: &str, side, action| hook_by(means, &node, interface, side, action, ChainPosition::First);
            // One program is attached before the agent starts.
            let _earlier = first(&pod.host_interface, Side::Ingress, HookAction::End)?;
            start_with(lab, &attaching(means))?;
            let server = lab.server("server1").clone();
            wait_in_force(&pod, &server, &[10])?;
            for action in [HookAction::Next, HookAction::End] {
                let _later = first(&pod.host_interface, Side::Ingress, action)?;
                let _replies = first(&pod.host_interface, Side::Egress, action)?;
                let _tunnel = first("spillway0", Side::Ingress, action)?;
                let _exit = first("eth0", Side::Egress, action)?;
                let _underlay = first("eth0", Side::Ingress, action)?;
                wait_in_force(&pod, &server, &[10])?;
            }
            Ok(())
        });
    }
}

/// docs/failures.md: hook-lost.
#[test]
fn hook_lost_programs_that_somebody_detaches_are_attached_again() {
    lab::require_root!();
    lab::require!(has_bpftool(), "bpftool is missing");
    // Without an interface: the pod's.
    let without_tunnel = [
        ("worker1", None, "pod_egress"),
        ("worker1", Some("eth0"), "exit_egress"),
        ("worker1", Some("eth0"), "underlay_ingress"),
        ("gw1", Some("ext0"), "uplink_ingress"),
        ("gw1", Some("eth0"), "underlay_ingress"),
    ];
    let with_tunnel = [("worker1", Some("spillway0"), "tunnel_ingress"), ("gw1", Some("spillway0"), "tunnel_ingress")];
    // In the lab, `Auto` is `direct`, which does not use the tunnel device.
    for (options, programs) in [(calm(), &without_tunnel[..]), (fixed("device"), &with_tunnel[..])] {
        Lab::builder().workers(1).gateways(1).run(|lab| {
            let (pod, server) = web_pod_with(lab, &[10], &options)?;
            for (node, interface, program) in programs {
                let ns = &lab.node(node).ns;
                let index = ns.ifindex(interface.unwrap_or(&pod.host_interface))?;
                let pin = lab.pins(node).join(format!("links/{program}-{index}"));
                ns.sh(&format!("bpftool link detach pinned {}", pin.display()))?;
                // A new flow and its answers need each of these programs.
                wait_in_force(&pod, &server, &[10])?;
            }
            Ok(())
        });
    }
}

/// docs/failures.md: inbound-unseen. A program redirects incoming packets into the pod, past its interface's egress hook.
#[test]
fn inbound_unseen_connections_of_the_outside_are_left_alone() {
    // The node's conntrack does not see that direction either, and would masquerade the other one.
    Lab::builder().workers(1).gateways(1).masquerade(false).run(|lab| {
        // With `Keep`, connections of an older pod might predate the policy, and are left alone anyway.
        lab.manifests().write("web", &(web(&[10]) + "  existingConnections: Drop\n"))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        // This pod stands for an outside host whose packets a program on the node redirects into `web`.
        let outside = lab.add_pod(PodSpec::new("outside", "worker1"))?;
        start(lab)?;
        wait_in_force(&pod, lab.server("server1"), &[10])?;
        let node = lab.node("worker1").ns.clone();
        let addresses: [IpAddr; 2] = ["198.51.100.77".parse()?, "2001:db8:51::77".parse()?];
        for (address, bits) in addresses.into_iter().zip([32, 128]) {
            // An IPv6 address must not be tentative when a route names it.
            let at_once = if bits == 128 { "nodad" } else { "" };
            outside.ns.ip(&[format!("addr add {address}/{bits} dev eth0 {at_once}")])?;
            node.ip(&[format!("route add {address}/{bits} dev {}", outside.host_interface)])?;
        }
        outside.ns.sh(&format!(
            "ip route change default via 169.254.1.1 dev eth0 src {}
             ip -6 route change default via fe80::ecee:eeff:feee:eeee dev eth0 src {}",
            addresses[0], addresses[1]
        ))?;
        // Static neighbour entries: the pod and the node cannot resolve each other, because everything that the pod sends is redirected.
        let link = outside.ns.sh("ip -o link show eth0")?;
        let mac = link.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).context("a MAC address")?;
        outside.ns.sh("ip neigh replace 169.254.1.1 lladdr ee:ee:ee:ee:ee:ee dev eth0 nud permanent
             ip neigh replace fe80::ecee:eeff:feee:eeee lladdr ee:ee:ee:ee:ee:ee dev eth0 nud permanent")?;
        for address in addresses {
            let host = &outside.host_interface;
            node.sh(&format!("ip neigh replace {address} lladdr {mac} dev {host} nud permanent"))?;
        }
        let _redirect = hook(
            &node,
            &outside.host_interface,
            Side::Ingress,
            HookAction::ToPeer(node.ifindex(&pod.host_interface)?),
        )?;
        wait_bypass(lab, "worker1", true)?;
        for (family, address) in Family::BOTH.into_iter().zip(addresses) {
            let target = SocketAddr::new(pod.ips.ip(family), 8080);
            let echo = TcpServer::start(&pod.ns, &[target], ServerMode::Echo)?;
            let untouched = counter(lab, "worker1", "flows_untouched")?;
            let clients =
                TcpClients::establish(&outside.ns, target, 5, TcpOptions { records: 5, ..TcpOptions::default() })?;
            clients.wait("echoes", PATIENCE, |all| all.iter().all(|one| one.received == 5 && one.wrong == 0))?;
            assert!(echo.connections().iter().all(|one| one.peer.ip() == address), "{:?}", echo.connections());
            assert!(counter(lab, "worker1", "flows_untouched")? >= untouched + 5);
        }
        Ok(())
    });
}

/// docs/failures.md: tunnel-port.
#[test]
fn tunnel_port_that_is_taken_is_named_with_its_owner_and_a_remedy() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let node = lab.node("worker1").ns.clone();
        node.ip(&[
            "link add somebodys0 type vxlan id 7 dstport 8473 local 10.88.0.11".to_owned(),
            "link set somebodys0 up".to_owned(),
        ])?;
        lab.start_agent("worker1", &StartOptions::new())?;
        wait_for("the agent gives up", PATIENCE, || Ok(!lab.agent("worker1").alive()?))?;
        let log = lab.agent("worker1").log();
        for part in ["8473", "somebodys0", "tunnelPort"] {
            assert!(log.contains(part), "{part} is not in {log}");
        }
        node.ip(&["link del somebodys0".to_owned()])?;
        web_pod(lab, &[10]).map(drop).context("with the port free again")
    });
}
