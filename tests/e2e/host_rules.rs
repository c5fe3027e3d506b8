//! What hosts do to packets besides forbidding them: reverse-path filters, connection tracking, marks, masquerading.
//! None of this may stop a flow or change its source.

use anyhow::Result;
use lab::traffic::{ConnectRate, Ping, ServerMode, TcpClients, TcpOptions, TcpServer, ping};
use lab::{Builder, Capture, Cni, Family, Lab, Pod, PodSpec, StartOptions, address, wait_for, wait_until};

use crate::support::{
    PATIENCE, assert_no_strangers, calm, egress, fixed, knows, start_with, wait_in_force, wait_owner, web,
};

/// The mark bit by which a node without a default route sends first packets to the tunnel device, as in `egress_common::abi`.
const MARK: u32 = 0x1000;

/// Starts a lab whose nodes have these nftables rules before the agents start. It has a pod of each kind of CNI on a worker, and one on
/// each owner of the egress IPs (which sends for itself). All of them must reach the server with their egress IP and no other address.
fn flows_under(builder: Builder, rules: &str, test: impl FnOnce(&mut Lab, &[Pod]) -> Result<()>) {
    flows_with(builder, &calm(), rules, test);
}

/// [`flows_under`] with options for agents and controller.
fn flows_with(
    builder: Builder,
    options: &StartOptions,
    rules: &str,
    test: impl FnOnce(&mut Lab, &[Pod]) -> Result<()>,
) {
    builder.workers(1).gateways(2).run(|lab| {
        for node in lab.nodes() {
            node.ns.nft(rules)?;
        }
        lab.manifests().write("web", &web(&[10]))?;
        let mut pods = Vec::new();
        for (name, cni) in [("veth", Cni::PointToPoint), ("bridged", Cni::Bridge)] {
            pods.push(lab.add_pod(PodSpec::new(name, "worker1").label("app", "web").cni(cni))?);
        }
        start_with(lab, options)?;
        for family in Family::BOTH {
            let owner = wait_owner(lab, egress(family, &[10])[0], |_| true)?;
            let name = format!("on-{owner}-{family:?}").to_lowercase();
            pods.push(lab.add_pod(PodSpec::new(&name, &owner).label("app", "web"))?);
        }
        for pod in &pods {
            let known = || Ok(Family::BOTH.iter().all(|family| knows(lab, &pod.node, pod.ips.ip(*family))));
            wait_for(&format!("{} knows {}", pod.node, pod.name), PATIENCE, known)?;
        }
        let server = lab.server("server1").clone();
        let capture = Capture::start(&server.ns, "eth0")?;
        for pod in &pods {
            wait_in_force(pod, &server, &[10])?;
        }
        test(lab, &pods)?;
        let trace = capture.finish()?;
        assert_no_strangers(&trace, &server, &[10]);
        Ok(())
    });
}

/// docs/failures.md: rp-filter. With the tunnel device, replies arrive at an interface other than that of the route back.
#[test]
fn rp_filter_strict_everywhere_drops_nothing() {
    flows_under(Lab::builder().rp_filter(1), "", |_, _| Ok(()));
    let device = fixed("device");
    flows_with(Lab::builder().rp_filter(1), &device, "", |_, _| Ok(()));
}

/// docs/failures.md: masquerade. The rule has no condition, so it matches even the tunnel's outer packets.
#[test]
fn masquerade_of_everything_changes_no_source() {
    let rules = "table inet hostile { chain post {
            type nat hook postrouting priority srcnat - 10
            masquerade random
        }
    }";
    flows_under(Lab::builder(), rules, |_, _| Ok(()));
}

/// Rules that drop packets in conntrack's state `invalid` at every hook.
fn drop_invalid() -> String {
    let chain = |hook| format!("chain {hook} {{ type filter hook {hook} priority filter; ct state invalid drop; }}\n");
    let chains: String = ["prerouting", "input", "forward", "output", "postrouting"].into_iter().map(chain).collect();
    format!("table inet hostile {{ {chains} }}")
}

/// docs/failures.md: ct-invalid. Without masquerading, packets are lost here only if conntrack calls them invalid.
#[test]
fn ct_invalid_rule_drops_none_of_our_packets() {
    flows_under(Lab::builder().masquerade(false), &drop_invalid(), |lab, pods| {
        // Connections that live for a while, in both directions.
        let server = lab.server("server1").clone();
        let _stream = TcpServer::start(&server.ns, &server.ips.both(8081), ServerMode::Stream)?;
        for (pod, family) in pods.iter().flat_map(|pod| Family::BOTH.map(|family| (pod, family))) {
            let clients = TcpClients::establish(&pod.ns, server.ips.at(family, 8081), 5, TcpOptions::default())?;
            clients.wait_progress(20, PATIENCE)?;
        }
        Ok(())
    });
}

/// docs/failures.md: ct-invalid. The host answers a packet that is too large; conntrack does not track the quoted packet.
#[test]
fn ct_invalid_rule_drops_no_answer_to_a_packet_too_large_for_the_tunnel() {
    let device = fixed("device");
    flows_with(Lab::builder().masquerade(false), &device, &drop_invalid(), |lab, pods| {
        let server = lab.server("server1").clone();
        let on_worker = pods.iter().filter(|pod| pod.node == "worker1");
        for (pod, family) in on_worker.flat_map(|pod| Family::BOTH.map(|family| (pod, family))) {
            let large = Ping { size: 1440, dont_fragment: true, ..Ping::default() };
            let report = ping(&pod.ns, server.ips.ip(family), &large)?;
            assert_eq!(report.mtu, Some(1450), "{} {report:?}", pod.name);
        }
        Ok(())
    });
}

/// docs/failures.md: forward-drop. FORWARD accepts only packets from pods: no replies, and no packets that gateways send for other nodes.
#[test]
fn forward_drop_policy_drops_no_reply() {
    let [pods4, pods6] = address::PODS;
    let rules = format!(
        "table inet hostile {{ chain forward {{ type filter hook forward priority filter; policy drop;
            ip saddr {pods4} accept
            ip6 saddr {pods6} accept
        }}
        }}"
    );
    flows_under(Lab::builder(), &rules, |_, _| Ok(()));
}

/// docs/failures.md: mark-clash. Rules set every bit except ours, clear all marks, set our bit on packets that are not
/// ours, and masquerade packets with kube-proxy's bit.
#[test]
fn mark_clash_with_every_common_bit_changes_nothing() {
    let rules = format!(
        "table inet hostile {{
            chain everything {{
                type filter hook prerouting priority mangle
                meta mark set meta mark or {others:#x}
            }}
            chain nothing {{
                type filter hook prerouting priority mangle + 10
                meta mark set 0
            }}
            chain strangers {{
                type filter hook prerouting priority mangle + 20
                iifname \"eth0\" meta mark set meta mark or {MARK:#x}
            }}
            chain output {{
                type route hook output priority mangle
                meta mark set meta mark or {MARK:#x}
            }}
            chain forward {{
                type filter hook forward priority mangle
                meta mark set meta mark or {others:#x}
            }}
            chain post {{
                type nat hook postrouting priority srcnat - 10
                meta mark & 0x4000 == 0x4000 masquerade random
            }}
        }}",
        others = !MARK,
    );
    flows_under(Lab::builder(), &rules, |lab, pods| {
        // A rule that sets our bit on packets from other nodes to a pod does not misroute them.
        let neighbour = lab.add_pod(PodSpec::new("neighbour", "gw2"))?;
        for (pod, family) in pods.iter().flat_map(|pod| Family::BOTH.map(|family| (pod, family))).take(4) {
            let target = std::net::SocketAddr::new(pod.ips.ip(family), 7010);
            let _server = TcpServer::start(&pod.ns, &[target], ServerMode::Echo)?;
            let clients = TcpClients::establish(&neighbour.ns, target, 3, TcpOptions::once())?;
            clients.wait("echoes", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
        }
        Ok(())
    });
}

/// docs/failures.md: outer-mark.
#[test]
fn outer_mark_is_empty_when_a_packet_comes_out_of_the_tunnel_device() {
    let rules = "table inet watch {
        counter tunnelled { }
        counter marked { }
        chain forward {
            type filter hook forward priority mangle
            meta mark set meta mark or 0xffffffff
        }
        chain post {
            type filter hook postrouting priority 300
            udp dport 8473 counter name tunnelled
            udp dport 8473 meta mark != 0 counter name marked
        }
    }";
    let device = fixed("device");
    flows_with(Lab::builder(), &device, rules, |lab, _| {
        let count = |name: &str| -> Result<u64> {
            let text = lab.node("worker1").ns.sh(&format!("nft list counter inet watch {name}"))?;
            let words: Vec<&str> = text.split_whitespace().collect();
            let at = words.iter().position(|word| *word == "packets").map(|at| at + 1);
            Ok(at.and_then(|at| words.get(at)?.parse().ok()).unwrap_or_default())
        };
        assert!(count("tunnelled")? > 100);
        assert_eq!(count("marked")?, 0);
        Ok(())
    });
}

/// docs/failures.md: policy-bypass, masquerade: other software removes the agent's rules and routes.
#[test]
fn hostile_flushes_of_rules_are_repaired_and_let_no_wrong_source_out() {
    flows_under(Lab::builder(), "", |lab, pods| {
        let (server, node) = (lab.server("server1").clone(), lab.node("worker1").ns.clone());
        // New connections meet the gap between a flush and its repair. Some may fail there; `flows_under` judges their sources.
        let _echo = TcpServer::start(&server.ns, &server.ips.both(81), ServerMode::Echo)?;
        let rate = ConnectRate { per_second: 100, concurrency: 500, ..ConnectRate::default() };
        let rates = Family::BOTH.map(|family| rate.start(&pods[0].ns, server.ips.at(family, 81)));
        let rates = rates.into_iter().collect::<Result<Vec<_>>>()?;
        let whole = |lab: &Lab| -> Result<usize> {
            Ok(lab.egressctl("worker1", &["state"])?["rules"].as_array().map_or(0, Vec::len))
        };
        let routed = whole(lab)?;
        assert!(routed > 5);
        let flush = "nft delete table inet spillway";
        let is_mended = |script: &str, rules: usize| {
            node.sh(script)?;
            wait_until(&format!("`{script}` is mended"), PATIENCE, || whole(lab), |now| *now == rules)?;
            wait_in_force(&pods[0], &server, &[10])
        };
        is_mended(flush, routed)?;
        // Without a default route, the agent also has policy rules, and routes in its own table.
        node.sh("ip route del default; ip -6 route del default")?;
        let led = wait_until("a policy route", PATIENCE, || whole(lab), |now| *now == routed + 5)?;
        for script in [
            flush,
            "ip rule del pref 37712; ip -6 rule del pref 37712",
            "ip route flush table 21328; ip -6 route flush table 21328",
        ] {
            is_mended(script, led)?;
        }
        for rate in rates {
            let report = rate.finish()?;
            assert!(report.opened > 50, "{} opened, {:?}", report.opened, report.failed);
        }
        Ok(())
    });
}
