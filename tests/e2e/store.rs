//! The directory of objects: mistakes in it, and controllers that alternate.

use std::net::IpAddr;

use anyhow::{Context, Result};
use lab::traffic::{ConnectionReport, ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Capture, Family, Lab, PodSpec, StartOptions, wait_until};

use crate::support::{
    PATIENCE, WEB, assert_no_strangers, calm, egress, gateways, object_name, policy, start, wait_agent, wait_in_force,
    web, web_pod_with,
};

/// Returns what Spillway wrote about a policy.
fn status(lab: &Lab, name: &str) -> String {
    let kinds = ["status/EgressGatewayPolicy", "EgressGatewayPolicy"];
    kinds.iter().find_map(|kind| lab.manifests().written(kind, name)).unwrap_or_default()
}

/// Waits until the status of a policy has all of `parts`.
fn wait_status(lab: &Lab, name: &str, parts: &[&str]) -> Result<()> {
    let what = format!("{parts:?} in the status of {name}");
    wait_until(&what, PATIENCE, || Ok(status(lab, name)), |text| parts.iter().all(|part| text.contains(part))).map(drop)
}

/// Waits until `egressctl state` on the worker shows all of `parts`.
fn wait_problem(lab: &Lab, parts: &[&str]) -> Result<()> {
    let look = || lab.egressctl_text("worker1", &["state"]);
    wait_until(&format!("{parts:?} among the problems"), PATIENCE, look, |text| {
        parts.iter().all(|part| text.contains(part))
    })
    .map(drop)
}

#[test]
fn a_mistake_in_a_file_leaves_the_last_good_state_in_force_and_is_named() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let api = lab.add_pod(PodSpec::new("api", "worker1").label("app", "api"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_in_force(&pod, &server, &[10])?;
        let capture = Capture::start(&server.ns, "eth0")?;

        // Invalid YAML; an unknown field; a value that a rule rejects.
        lab.manifests().write("web", "kind: [EgressGatewayPolicy\n  what: {")?;
        wait_problem(lab, &["web.yaml"])?;
        wait_in_force(&pod, &server, &[10])?;
        lab.manifests().write("web", &web(&[11]).replace("destinationCIDRs", "destinationCIDR"))?;
        wait_problem(lab, &["web.yaml", "EgressGatewayPolicy", "web", "destinationCIDR", "write destinationCIDRs"])?;
        wait_status(lab, "web", &["destinationCIDR", "write destinationCIDRs"])?;
        wait_in_force(&pod, &server, &[10])?;
        lab.manifests().write("web", &web(&[11]).replace("weight: 1", "weight: 1000"))?;
        wait_problem(lab, &["web.yaml", "EgressGatewayPolicy", "web", "write a number from 1 to 100"])?;
        wait_in_force(&pod, &server, &[10])?;

        // An agent or a controller that starts now also has the last good state.
        for name in ["worker1", "gw1"] {
            lab.agent(name).kill()?;
            lab.start_agent(name, &calm())?;
            wait_agent(lab, name)?;
        }
        lab.start_controller("controller", &calm())?;
        wait_in_force(&pod, &server, &[10])?;

        // Everything else continues: another policy is added meanwhile. Its pod uses a server that the capture does not see.
        let other =
            "\n  selectors: [{podSelector: {matchLabels: {app: api}}}]\n  destinationCIDRs: [0.0.0.0/0, \"::/0\"]";
        lab.manifests().write("api", &policy("api", &format!("{other}{}", gateways(&[12]))))?;
        wait_in_force(&api, lab.server("far1"), &[12])?;
        // Now agents and controller have read the files at least once more.
        wait_in_force(&pod, &server, &[10])?;
        let trace = capture.finish()?;
        assert_no_strangers(&trace, &server, &[10]);
        lab.manifests().write("web", &web(&[11]))?;
        wait_in_force(&pod, &server, &[11])
    });
}

#[test]
fn a_policy_that_cannot_be_carried_out_says_why_and_disturbs_nobody() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let api =
            "\n  selectors: [{podSelector: {matchLabels: {app: api}}}]\n  destinationCIDRs: [0.0.0.0/0, \"::/0\"]";
        let missing = policy("missing", &format!("{api}\n  egressIPPools: [{{name: nowhere, count: 2}}]"));
        lab.manifests().write("missing", &missing)?;
        let loser = policy("loser", &format!("{WEB}{}", gateways(&[11])));
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_in_force(&pod, &server, &[10])?;
        wait_status(lab, "web", &["Ready", "selectedEndpoints: 1"])?;
        wait_status(lab, "missing", &["Degraded", "pool nowhere does not exist", "create it"])?;
        lab.manifests().write("loser", &loser)?;
        wait_status(lab, "loser", &["Conflicting", "web"])?;
        wait_in_force(&pod, &server, &[10])
    });
}

/// Returns the lines of an EgressIP's status with its owner and its epoch, which counts changes of owner.
fn term(lab: &Lab, address: IpAddr) -> Result<Vec<String>> {
    let text = lab.manifests().written("EgressIP", &object_name(address)).context("no object")?;
    let (_, status) = text.split_once("\nstatus:").context("no status")?;
    let keys = ["node:", "epoch:"];
    let line = |key: &str| status.lines().find(|line| line.trim().starts_with(key)).map(str::to_owned);
    keys.into_iter().map(|key| line(key).with_context(|| format!("no {key} {text}"))).collect()
}

#[test]
fn a_second_controller_stands_by_and_takes_over() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let (pod, server) = web_pod_with(lab, &[10, 11], &StartOptions::new())?;
        lab.start_controller("standby", &StartOptions::new())?;
        let _streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let clients = TcpClients::establish(&pod.ns, server.ips.at(Family::V6, 80), 30, TcpOptions::default())?;
        let capture = Capture::start(&server.ns, "eth0")?;
        let terms =
            |lab: &Lab| egress(Family::V4, &[10, 11]).into_iter().map(|ip| term(lab, ip)).collect::<Result<Vec<_>>>();
        let before = terms(lab)?;

        // Frozen, not dead: when it wakes up, another controller holds the lease.
        lab.controller("controller").freeze()?;
        lab.manifests().write("web", &web(&[10, 11, 12]))?;
        wait_in_force(&pod, &server, &[10, 11, 12])?;
        lab.controller("controller").thaw()?;
        lab.controller("standby").kill()?;
        lab.manifests().write("web", &web(&[10, 11]))?;
        wait_in_force(&pod, &server, &[10, 11])?;
        clients.wait_progress(3, PATIENCE)?;
        // None of this has changed any owner or epoch.
        assert_eq!(terms(lab)?, before);
        let ends = clients.close()?;
        assert!(ends.iter().all(ConnectionReport::intact), "{ends:?}");
        let trace = capture.finish()?;
        assert_no_strangers(&trace, &server, &[10, 11, 12]);
        Ok(())
    });
}
