//! Zones of gateways: preferred, required, or the pod's own node first.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::Result;
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Family, Lab, Pod, PodSpec, Segment, Server};

use crate::support::{
    PATIENCE, WEB, egress, gateways_where, named, policy, start, wait_in_force, wait_refused, wait_sources,
};

/// A policy with egress IP 10 on gw1, egress IP 11 on gw2, and this preference.
fn zoned(zone: &str) -> String {
    let (one, two) = (named("gw1"), named("gw2"));
    policy("web", &format!("{WEB}{}\n  zone: {zone}", gateways_where(&[(10, 1, &one), (11, 1, &two)])))
}

/// The lab of these tests: worker1 and gw1 are in zone a, worker2 and gw2 in zone b.
fn builder() -> lab::Builder {
    Lab::builder().workers(2).gateways(2).zones(&["a", "b"])
}

/// Starts Spillway with this preference and two pods, each on its node with its egress IPs in force. Returns pods and server.
fn zoned_pods(lab: &mut Lab, zone: &str, near: (&str, &[u8]), far: (&str, &[u8])) -> Result<(Pod, Pod, Server)> {
    lab.manifests().write("web", &zoned(zone))?;
    let mut pod = |name: &str, node: &str| lab.add_pod(PodSpec::new(name, node).label("app", "web"));
    let (one, other) = (pod("near", near.0)?, pod("far", far.0)?);
    start(lab)?;
    let server = lab.server("server1").clone();
    wait_in_force(&one, &server, near.1)?;
    wait_in_force(&other, &server, far.1)?;
    Ok((one, other, server))
}

#[test]
fn a_preferred_zone_serves_while_one_of_its_gateways_lives_and_flows_stay_where_they_began() {
    builder().run(|lab| {
        let (near, far, server) = zoned_pods(lab, "{mode: Prefer}", ("worker1", &[10]), ("worker2", &[11]))?;
        // The zone's only gateway is unreachable, so the other zone serves.
        lab.cut("gw1", Segment::Underlay)?;
        wait_in_force(&near, &server, &[11])?;
        let streaming = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let streams = Family::BOTH
            .into_iter()
            .map(|family| TcpClients::establish(&near.ns, server.ips.at(family, 80), 50, TcpOptions::default()))
            .collect::<Result<Vec<_>>>()?;
        // The gateway is back: new flows prefer it, and those that began elsewhere stay there.
        lab.heal("gw1", Segment::Underlay)?;
        wait_in_force(&near, &server, &[10])?;
        let peers: BTreeMap<u64, SocketAddr> = streaming.source_of_flow();
        assert_eq!(peers.len(), 100);
        let elsewhere = Family::BOTH.map(|family| egress(family, &[11])[0]);
        assert!(peers.values().all(|peer| elsewhere.contains(&peer.ip())), "{peers:?}");
        for clients in streams {
            clients.wait_progress(3, PATIENCE)?;
            assert!(clients.close()?.iter().all(lab::traffic::ConnectionReport::intact));
        }
        wait_in_force(&far, &server, &[11])
    });
}

#[test]
fn a_required_zone_serves_or_nothing_leaves() {
    builder().run(|lab| {
        let (near, far, server) = zoned_pods(lab, "{mode: Require}", ("worker1", &[10]), ("worker2", &[11]))?;
        lab.cut("gw1", Segment::Underlay)?;
        wait_refused(&near, &server)?;
        wait_in_force(&far, &server, &[11])?;
        // In that case the policy now allows the node's address.
        lab.manifests()
            .write("web", &(zoned("{mode: Require}").trim_end().to_owned() + "\n  onNoGateway: NodeIP\n"))?;
        for family in Family::BOTH {
            wait_sources(&near.ns, &server, family, &[lab.node("worker1").underlay.ip(family)])?;
        }
        lab.heal("gw1", Segment::Underlay)?;
        wait_in_force(&near, &server, &[10])?;
        // The zone of an egress IP is that of its owner, according to the node's current labels.
        let relabelled = [("kubernetes.io/hostname", "gw2"), ("egress", "true"), ("topology.kubernetes.io/zone", "a")];
        lab.relabel_node("gw2", &relabelled)?;
        wait_in_force(&near, &server, &[10, 11])
    });
}

#[test]
fn a_pod_on_a_gateway_prefers_that_gateway_where_the_policy_says_so() {
    builder().run(|lab| {
        zoned_pods(lab, "{mode: Any, preferLocalNode: true}", ("gw1", &[10]), ("worker1", &[10, 11])).map(drop)
    });
}
