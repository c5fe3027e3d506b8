//! The host's firewall: packets that it forbids do not leave, and nothing that hosts do to packets changes a source address.

use anyhow::{Context, Result};
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer};
use lab::{Capture, Cni, Family, Lab, NetNs, Pod, PodSpec, Server};

use crate::support::{
    PATIENCE, assert_no_strangers, counter, egress, forbid, sources, start, wait_in_force, wait_owner, web,
};

/// The tool that creates a firewall's rules.
#[derive(Clone, Copy, Debug)]
enum Tool {
    Nft,
    Iptables,
}

impl Tool {
    /// Both, for loops.
    const BOTH: [Tool; 2] = [Tool::Nft, Tool::Iptables];

    /// Forbids forwarding packets from `pod` to `server`.
    fn forbid(self, ns: &NetNs, pod: &Pod, server: &Server) -> Result<()> {
        match self {
            Tool::Nft => forbid(ns, pod, server),
            Tool::Iptables => ns.sh(&each_iptables(pod, server, "-I")).map(drop),
        }
    }

    /// Reverts [`Tool::forbid`].
    fn permit(self, ns: &NetNs, pod: &Pod, server: &Server) -> Result<()> {
        match self {
            Tool::Nft => ns.nft("delete table inet denied"),
            Tool::Iptables => ns.sh(&each_iptables(pod, server, "-D")).map(drop),
        }
    }
}

fn each_iptables(pod: &Pod, server: &Server, action: &str) -> String {
    let (from, to) = (pod.ips, server.ips);
    format!(
        "iptables-nft {action} FORWARD -s {} -d {} -j DROP\nip6tables-nft {action} FORWARD -s {} -d {} -j DROP",
        from.v4, to.v4, from.v6, to.v6
    )
}

/// Checks that new flows of a pod are blocked while a rule forbids them, that existing ones continue, and that the
/// blocked ones pass once the rule is gone.
fn is_respected(lab: &Lab, pod: &Pod, tool: Tool) -> Result<()> {
    let (server, ns) = (lab.server("server1").clone(), lab.node(&pod.node).ns.clone());
    let count = |name: &str| counter(lab, &pod.node, name);
    let echo = TcpServer::start(&server.ns, &server.ips.both(8080), ServerMode::Echo)?;
    let udp = UdpServer::start(&server.ns, &server.ips.both(8053))?;
    let capture = Capture::start(&server.ns, "eth0")?;
    for family in Family::BOTH {
        let what = format!("{tool:?} {family:?} {:?} on {}", pod.cni, pod.node);
        let before = TcpClients::establish(&pod.ns, server.ips.at(family, 8080), 10, TcpOptions::default())?;
        tool.forbid(&ns, pod, &server)?;
        let (asked, passed) = (count("firewall_asked")?, count("firewall_passed")?);
        let patient = TcpOptions { connect_timeout: PATIENCE, ..TcpOptions::once() };
        let waiting = TcpClients::open(&pod.ns, server.ips.at(family, 8080), 3, patient)?;
        let datagrams = UdpClients::start(&pod.ns, server.ips.at(family, 8053), 3, UdpOptions::default())?;
        assert_eq!(sources(&pod.ns, &server, family, 5)?, Default::default(), "{what}");
        datagrams.wait("datagrams are sent", PATIENCE, |all| all.iter().all(|one| one.sent > 5))?;
        before.wait_progress(5, PATIENCE)?;
        assert!(datagrams.flows().iter().all(|one| one.received == 0), "{what}");
        assert_eq!(count("firewall_passed")?, passed, "{what}");
        assert!(count("firewall_asked")? > asked + 3 * 5, "{what}");
        tool.permit(&ns, pod, &server)?;
        waiting.wait("connections that were blocked", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
        datagrams.wait("datagrams pass", PATIENCE, |all| all.iter().all(|one| one.received > 3))?;
        assert!(before.connections().iter().all(|one| one.intact()), "{what}");
    }
    drop((echo, udp));
    let trace = capture.finish()?;
    assert_no_strangers(&trace, &server, &[10]);
    Ok(())
}

/// docs/failures.md: policy-bypass.
#[test]
fn policy_bypass_packets_that_the_forward_chain_drops_do_not_leave() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let mut pods = Vec::new();
        for (name, cni) in [("web", Cni::PointToPoint), ("bridged", Cni::Bridge)] {
            pods.push(lab.add_pod(PodSpec::new(name, "worker1").label("app", "web").cni(cni))?);
        }
        start(lab)?;
        let server = lab.server("server1").clone();
        for pod in &pods {
            wait_in_force(pod, &server, &[10])?;
            for tool in Tool::BOTH {
                is_respected(lab, pod, tool)?;
            }
        }
        let status = lab.manifests().written("EgressNode", "worker1").context("a status")?;
        assert!(status.contains("firewall: respect"), "{status}");
        Ok(())
    });
}

/// docs/failures.md: policy-bypass, where the pod's own node owns the egress IP.
#[test]
fn policy_bypass_holds_on_a_gateway_that_owns_the_egress_ip() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        for family in Family::BOTH {
            let ip = egress(family, &[10])[0];
            let name = wait_owner(lab, ip, |_| true)?;
            let pod =
                lab.add_pod(PodSpec::new(&format!("on-{name}-{family:?}").to_lowercase(), &name).label("app", "web"))?;
            wait_in_force(&pod, &server, &[10])?;
            let local = counter(lab, &name, "sent_local")?;
            is_respected(lab, &pod, Tool::Nft)?;
            assert!(counter(lab, &name, "sent_local")? > local);
        }
        Ok(())
    });
}
