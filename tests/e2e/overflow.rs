//! Policies that do not fit into a node's tables.

use std::time::Duration;

use anyhow::Result;
use lab::traffic::{Protocol, send_packet};
use lab::{Capture, Family, Lab, Pod, PodSpec, StartOptions, wait_until};

use crate::pod_start::wait_held;
use crate::support::{
    CALM, PATIENCE, counter, egress, gateways, policy, sources, wait_counter, wait_in_force, wait_sources, web_pod_with,
};

/// The number of policies that each select a different half of the pods, which gives each pod its own class.
const HALVES: usize = 8;
/// The maximum number of destinations of a policy.
const MOST: usize = 1_024;
/// An unoptimised agent takes seconds to merge this many routes.
const SLOW: Duration = PATIENCE.saturating_mul(8);

/// A policy for the pods with the label `large`, with IPv4 destinations that include the server. A table of routes has room for 262,144
/// pairs of a class and a destination, so it overflows if those pods have 256 classes and another policy also has a route.
fn large(destinations: usize, server: std::net::Ipv4Addr) -> String {
    let others = (1..destinations).map(|n| format!("11.{}.{}.0/24", n / 256, n % 256));
    let all: Vec<String> = std::iter::once(format!("{server}/32")).chain(others).collect();
    let spec = format!(
        "\n  selectors: [{{podSelector: {{matchLabels: {{size: large}}}}}}]\n  destinationCIDRs: [{}]{}",
        all.join(", "),
        gateways(&[12])
    );
    policy("large", &spec)
}

/// A policy for the pods in this half.
fn half(number: usize) -> String {
    let spec = format!(
        "\n  selectors: [{{podSelector: {{matchLabels: {{half-{number}: \"yes\"}}}}}}]\n  destinationCIDRs: [192.0.2.{number}/32]{}",
        gateways(&[10])
    );
    policy(&format!("half-{number}"), &spec)
}

/// Writes the objects of 255 pods like `model`, each with its own combination of halves. None of them ever starts.
fn crowd(lab: &Lab, model: &Pod) -> Result<()> {
    for number in 1..=u8::MAX {
        let mut pod = model.clone();
        pod.name = format!("crowd-{number}");
        pod.uid = format!("00000000-0000-4000-a000-{number:012}");
        let halves = (0..HALVES).filter(|half| number >> half & 1 == 1);
        pod.labels.extend(halves.map(|half| (format!("half-{half}"), "yes".to_owned())));
        lab.manifests().pod(&pod, false)?;
    }
    Ok(())
}

/// Waits until the policy's condition says that the policy does not fit, or no longer says so.
fn wait_told(lab: &Lab, does_not_fit: bool) -> Result<()> {
    let policies = || Ok(lab.egressctl("worker1", &["policies"])?.to_string());
    let told = |text: &String| text.contains("on node worker1: table ROUTES_V4 holds 262144 entries");
    wait_until("the condition of the policy", SLOW, policies, |text| told(text) == does_not_fit).map(drop)
}

/// The address at which each agent serves its metrics, in its node's namespace.
const METRICS: &str = "127.0.0.1:9473";

/// Waits until the worker's metrics count this many problems.
fn wait_problems(lab: &Lab, count: usize) -> Result<()> {
    let metrics = || lab.node("worker1").ns.sh(&format!("curl -s --max-time 5 http://{METRICS}/metrics"));
    let line = format!("spillway_problems {count}.0");
    wait_until(&line, SLOW, metrics, |text| text.lines().any(|told| told == line)).map(drop)
}

/// Adds a pod as a cluster does: its node knows the pod before the pod has a network.
fn start_pod(lab: &mut Lab, spec: PodSpec) -> Result<Pod> {
    let pod = lab.prepare_pod(spec)?;
    wait_held(lab)?;
    lab.start_pod(&pod.key())?;
    Ok(pod)
}

/// docs/failures.md: overflow-open.
#[test]
fn overflow_open_policy_that_does_not_fit_is_refused_and_others_continue() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        // The crowd's pods have no address; `startLimit` keeps this from becoming a problem, however long the test takes.
        let options = StartOptions::new().config(&format!("{CALM}metrics: {METRICS}\nstartLimit: 1h\n"));
        let (web, server) = web_pod_with(lab, &[10], &options)?;
        wait_problems(lab, 0)?;
        let selected = lab.add_pod(PodSpec::new("selected", "worker1").label("size", "large"))?;
        let own = lab.node("worker1").masquerade().v4.into();
        wait_sources(&selected.ns, &server, Family::V4, &[own])?;
        for number in 0..HALVES {
            lab.manifests().write(&format!("half-{number}"), &half(number))?;
        }
        crowd(lab, &selected)?;
        lab.manifests().write("large", &large(MOST, server.ips.v4))?;

        wait_told(lab, true)?;
        wait_problems(lab, 1)?;
        let events = || Ok(lab.controller("controller").log());
        let of_policy =
            |log: &String| log.lines().any(|line| line.contains("DoesNotFit") && line.contains("object=policy large"));
        wait_until("the event", SLOW, events, of_policy)?;
        let node = || Ok(lab.manifests().written("EgressNode", "worker1").unwrap_or_default());
        let of_node = |text: &String| text.contains("Degraded") && text.contains("policy large: table ROUTES_V4");
        let node = wait_until("the condition of the node", SLOW, node, of_node)?;
        assert!(!node.contains("policy web: table") && !node.contains("policy half-"), "{node}");

        // Packets of its pods do not leave, not even with another address.
        let capture = Capture::start(&server.ns, "eth0")?;
        let dropped = counter(lab, "worker1", "drop_no_gateway")?;
        assert_eq!(sources(&selected.ns, &server, Family::V4, 5)?, Default::default());
        send_packet(&selected.ns, Protocol::Udp, selected.ips.at(Family::V4, 1024), server.ips.at(Family::V4, 4242))?;
        wait_counter(lab, "worker1", "drop_no_gateway", dropped)?;
        // All other policies continue, and later additions are served: a pod, and a policy.
        wait_in_force(&web, &server, &[10])?;
        let late = start_pod(lab, PodSpec::new("late", "worker1").label("app", "web"))?;
        wait_in_force(&late, &server, &[10])?;
        let fits =
            "\n  selectors: [{podSelector: {matchLabels: {app: late}}}]\n  destinationCIDRs: [0.0.0.0/0, \"::/0\"]";
        lab.manifests().write("late", &policy("late", &(fits.to_owned() + &gateways(&[11]))))?;
        let other = start_pod(lab, PodSpec::new("other", "worker1").label("app", "late"))?;
        wait_in_force(&other, &server, &[11])?;
        let known = [egress(Family::V4, &[10]), egress(Family::V4, &[11])].concat();
        let strangers = capture.finish()?.unexpected_sources_towards(server.ips.v4.into(), &known);
        assert!(strangers.is_empty(), "{strangers:?}");

        // The policy is made smaller, as the remedy says.
        lab.manifests().write("large", &large(2, server.ips.v4))?;
        wait_sources(&selected.ns, &server, Family::V4, &egress(Family::V4, &[12]))?;
        wait_told(lab, false)?;
        wait_problems(lab, 0)
    });
}
