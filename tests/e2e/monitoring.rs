//! Each shipped alert fires in a real Prometheus while its fault is present, and resolves once the fault is gone.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use lab::prometheus::{self, Prometheus, Target};
use lab::traffic::forge::{FORWARD, TUNNEL_PORT};
use lab::traffic::{Protocol, UdpClients, UdpOptions, send_vxlan, spray};
use lab::{Dual, Family, Lab, NetNs, Pod, PodSpec, Segment, Server, StartOptions, address, wait_until};
use serde_json::Value;

use crate::ports::{TARGET, deafen, expire_udp_at_once};
use crate::support::{PATIENCE, egress, policy, start_with, wait_in_force, web};

/// The shipped alerts.
const RULES: &str = include_str!("../../manifests/components/monitoring/rules.yaml");
/// The port at which agents and controller serve their metrics.
const PORT: u16 = 9473;
/// Several pods, because no pod gets all ports of an egress IP.
const PODS: usize = 6;
const WORKERS: [&str; 2] = ["worker1", "worker2"];
/// Host numbers in the underlay: the controller, Prometheus.
const CONTROLLER: u8 = 200;
const PROMETHEUS: u8 = 201;
/// The host number of the egress IP, and of one that no policy has.
const HOST: u8 = 10;
const OTHER_HOST: u8 = 11;
/// The address at which a stand-in serves its version, in Prometheus's namespace.
const OTHER: &str = "127.0.0.1:9474";
/// Long enough for the lab to send tens of thousands of packets on a machine that is busy with other tests.
const SLOW: Duration = PATIENCE.saturating_mul(4);
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Short intervals, so that a lost node is noticed soon, also by its lease.
const CONFIG: &str = "probe: {interval: 200ms, count: 5}\nlease: {renew: 1s, duration: 5s}\nmetrics: 0.0.0.0:9473\n";

/// A cluster and the Prometheus that watches it.
struct Watched<'a> {
    lab: &'a mut Lab,
    options: StartOptions,
    prometheus: Prometheus,
    pods: Vec<Pod>,
    server: Server,
    version: Arc<Mutex<&'static str>>,
}

impl Watched<'_> {
    /// Waits until an alert with this name and label fires; `meanwhile` runs until then.
    fn fires(&self, alert: &str, label: (&str, &str), mut meanwhile: impl FnMut() -> Result<()>) -> Result<()> {
        let firing = || meanwhile().and_then(|()| self.prometheus.firing());
        let it = |labels: &Value| labels["alertname"] == alert && labels[label.0] == label.1;
        wait_until(&format!("{alert} fires for {label:?}"), SLOW, firing, |all| all.iter().any(it)).map(drop)
    }

    /// Waits until no alert fires.
    fn resolve(&self, what: &str) -> Result<()> {
        wait_until(&format!("all is well after: {what}"), PATIENCE, || self.prometheus.firing(), Vec::is_empty)?;
        eprintln!("{what}: fired and resolved");
        Ok(())
    }

    fn target(&self) -> SocketAddr {
        self.server.ips.at(Family::V4, TARGET)
    }

    /// Sends queries from more ports than exist, from all pods in sum.
    fn ask_from_all_ports(&self) -> Result<()> {
        self.pods
            .iter()
            .try_for_each(|pod| spray(&pod.ns, Protocol::Udp, pod.ips.v4.into(), 1024..18_000, self.target()))
    }
}

/// Serves the metric of a version that the test can change, until the tests end.
fn serve_version(ns: &NetNs) -> Result<Arc<Mutex<&'static str>>> {
    let listener = ns.run(|| Ok(TcpListener::bind(OTHER)?))?;
    let version = Arc::new(Mutex::new(VERSION));
    let says = Arc::clone(&version);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let version = *says.lock().unwrap_or_else(PoisonError::into_inner);
            // A client that disconnects early asks again.
            let _ = stream.and_then(|stream| answer(stream, version));
        }
    });
    Ok(version)
}

fn answer(mut stream: TcpStream, version: &str) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    while !lines.next().transpose()?.unwrap_or_default().is_empty() {}
    let body = format!("spillway_build_info{{version=\"{version}\"}} 1\n");
    write!(
        stream,
        "HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn nothing() -> Result<()> {
    Ok(())
}

fn target(address: Dual, node: &str, component: &'static str) -> Target {
    Target { address: format!("{}:{PORT}", address.v4), node: node.to_owned(), component }
}

fn watched(test: impl FnOnce(Watched<'_>) -> Result<()>) {
    Lab::builder().workers(2).gateways(2).run(|lab| {
        lab.manifests().write("web", &web(&[HOST]))?;
        let pod = |n: usize| (format!("on-{}-{n}", WORKERS[n % 2]), WORKERS[n % 2]);
        let pods = (0..PODS).map(pod).map(|(name, node)| lab.add_pod(PodSpec::new(&name, node).label("app", "web")));
        let pods = pods.collect::<Result<Vec<Pod>>>()?;
        let options = StartOptions::new().config(CONFIG);
        let ns = lab.role_namespace("controller")?;
        lab.join_underlay(&ns, "controller", address::underlay(CONTROLLER))?;
        start_with(lab, &options)?;
        let server = lab.server("server1").clone();
        deafen(&server)?;
        pods.iter().try_for_each(|pod| wait_in_force(pod, &server, &[HOST]))?;
        let mut targets: Vec<Target> = lab.nodes().map(|node| target(node.underlay, &node.name, "agent")).collect();
        targets.push(target(address::underlay(CONTROLLER), "controller", "controller"));
        targets.push(Target { address: OTHER.into(), node: "other".into(), component: "agent" });
        let prometheus = Prometheus::start(lab, address::underlay(PROMETHEUS), &targets, RULES)?;
        let version = serve_version(prometheus.ns())?;
        let watched = Watched { lab, options, prometheus, pods, server, version };
        watched.resolve("the start")?;
        test(watched)
    });
}

#[test]
fn each_alert_fires_for_its_fault_and_resolves() {
    lab::require_root!();
    lab::require!(prometheus::obstacle().is_none(), "{}", prometheus::obstacle().unwrap_or_default());
    watched(|mut w| {
        nodes_are_lost(&w)?;
        the_control_plane_fails(&mut w)?;
        packets_are_dropped(&mut w)?;
        ports_get_scarce(&mut w)?;
        *w.version.lock().unwrap_or_else(PoisonError::into_inner) = "0.0.9";
        w.fires("SpillwayVersionsDiffer", ("severity", "warning"), nothing)?;
        *w.version.lock().unwrap_or_else(PoisonError::into_inner) = VERSION;
        w.resolve("another version")
    });
}

/// Cuts a gateway's link, blocks a worker's store, hides a map, and writes a wrong manifest.
fn nodes_are_lost(w: &Watched<'_>) -> Result<()> {
    w.lab.cut("gw1", Segment::Underlay)?;
    w.fires("SpillwayGatewayUnreachable", ("gateway", "gw1"), nothing)?;
    w.fires("SpillwayTargetDown", ("node", "gw1"), nothing)?;
    w.lab.heal("gw1", Segment::Underlay)?;
    w.resolve("a gateway's link is cut")?;

    w.lab.cut_store("worker2")?;
    w.fires("SpillwayStoreDisconnected", ("node", "worker2"), nothing)?;
    w.lab.heal_store("worker2")?;
    w.resolve("a store is unreachable")?;

    let map = w.lab.pins("worker2").join("maps/COUNTERS");
    let away = map.with_file_name("AWAY");
    fs::rename(&map, &away)?;
    w.fires("SpillwayMapsUnreadable", ("node", "worker2"), nothing)?;
    fs::rename(&away, &map)?;
    w.resolve("a map is missing")?;

    w.lab.manifests().write("wrong", &policy("wrong", "\n  selectors: 7"))?;
    w.fires("SpillwayProblems", ("node", "worker1"), nothing)?;
    w.lab.manifests().remove("wrong")?;
    w.resolve("a manifest is wrong")
}

fn the_control_plane_fails(w: &mut Watched<'_>) -> Result<()> {
    // A directory stands where the controller must write the object of another egress IP.
    let obstacle =
        w.lab.manifests().dir().join(format!(".spillway/EgressIP/{}.yaml", egress(Family::V4, &[OTHER_HOST])[0]));
    fs::create_dir(&obstacle)?;
    w.lab.manifests().write("web", &web(&[HOST, OTHER_HOST]))?;
    w.fires("SpillwayControllerFailing", ("pod", "controller"), nothing)?;
    fs::remove_dir(&obstacle)?;
    w.lab.manifests().write("web", &web(&[HOST]))?;
    w.resolve("an object cannot be written")?;

    w.lab.controller("controller").kill()?;
    w.fires("SpillwayControllersAbsent", ("severity", "critical"), nothing)?;
    w.lab.start_controller("controller", &w.options)?;
    w.resolve("the controller is dead")
}

fn packets_are_dropped(w: &mut Watched<'_>) -> Result<()> {
    let options = || UdpOptions { interval: Duration::from_millis(20), ..UdpOptions::default() };
    let asking = UdpClients::start(&w.pods[0].ns, w.target(), 1, options())?;
    let gateways = ["gw1", "gw2"];
    gateways.iter().try_for_each(|name| w.lab.relabel_node(name, &[]))?;
    w.fires("SpillwayNoCarrier", ("node", "worker1"), nothing)?;
    gateways.iter().try_for_each(|name| w.lab.relabel_node(name, &[("egress", "true")]))?;
    drop(asking);
    w.resolve("no gateway is left")?;

    // A host that is not a node sends into a gateway's tunnel. Meanwhile the server scans the egress IP: no gateway fault.
    let address = egress(Family::V4, &[HOST])[0];
    let scanning = UdpClients::start(&w.server.ns, SocketAddr::new(address, 1), 1, options())?;
    let device = w.lab.node("gw1").underlay.at(Family::V4, TUNNEL_PORT);
    let source = SocketAddr::new(address, 1024);
    let forge = || send_vxlan(w.lab.router(), device, FORWARD, Protocol::Udp, source, w.target());
    w.fires("SpillwayGatewayDrops", ("node", "gw1"), || (0..20).try_for_each(|_| forge()))?;
    w.resolve("a stranger sends into the tunnel")?;
    drop(scanning);
    Ok(())
}

/// Flows first live for minutes, so that all ports of the egress IP are in use on any machine, and then for a second.
fn ports_get_scarce(w: &mut Watched<'_>) -> Result<()> {
    let address = egress(Family::V4, &[HOST])[0].to_string();
    w.fires("SpillwayPortsScarce", ("egress_ip", &address), || w.ask_from_all_ports())?;
    w.fires("SpillwayPortsExhausted", ("severity", "critical"), || w.ask_from_all_ports())?;
    for node in WORKERS {
        w.lab.agent(node).kill()?;
        expire_udp_at_once(w.lab, node)?;
        let to = w.target().ip().to_string();
        let flows = || Ok(w.lab.egressctl(node, &["flows", "--to", &to, "--limit", "1"])?["matched"].as_u64());
        wait_until("no flow is left", PATIENCE, flows, |count| *count == Some(0))?;
        w.lab.start_agent(node, &w.options)?;
    }
    w.resolve("a flood of queries")
}
