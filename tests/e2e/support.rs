//! Shared by the end-to-end tests: policies as text, a running Spillway, and queries to a server.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lab::hook::Means;
use lab::traffic::{FragmentOrder, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, send_fragments};
use lab::{
    Capture, Family, Lab, NetNs, Packet, Pod, PodSpec, Server, StartOptions, Trace, address, wait_for, wait_until,
};
use serde_json::Value;

/// The time limit for a condition that a loaded machine reaches in a second.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Several times the interval at which streams send.
pub const QUIET: Duration = Duration::from_millis(300);
/// The time limit for a connection of [`sources`].
const CONNECT: Duration = Duration::from_millis(900);
/// The port at which [`sources`] listens.
pub const LOOK_PORT: u16 = 9007;

/// The part of a policy that most tests share: pods with the label `app: web`, all destinations.
pub const WEB: &str = "
  selectors: [{podSelector: {matchLabels: {app: web}}}]
  destinationCIDRs: [0.0.0.0/0, \"::/0\"]";

/// Returns a policy; `spec` must be indented by two spaces.
pub fn policy(name: &str, spec: &str) -> String {
    format!("apiVersion: spillway.io/v1beta1\nkind: EgressGatewayPolicy\nmetadata: {{name: {name}}}\nspec:{spec}\n")
}

/// A policy for the pods with this value of the label `app`, and all destinations; `rest` as in [`policy`].
pub fn of_app(app: &str, rest: &str) -> String {
    policy(app, &format!("{}{rest}", WEB.replace("web", app)))
}

/// The field `egressGateways` with both addresses of each host number, on any of the lab's gateways.
pub fn gateways(hosts: &[u8]) -> String {
    weighted(&hosts.iter().map(|&host| (host, 1)).collect::<Vec<_>>())
}

/// [`gateways`] with weights.
pub fn weighted(hosts: &[(u8, u32)]) -> String {
    gateways_where(&hosts.iter().map(|&(host, weight)| (host, weight, "egress: \"true\"")).collect::<Vec<_>>())
}

/// The field `egressGateways`: host number, weight, and the labels of the nodes.
pub fn gateways_where(hosts: &[(u8, u32, &str)]) -> String {
    let mut text = "\n  egressGateways:".to_owned();
    for (host, weight, labels) in hosts {
        for family in Family::BOTH {
            let address = address::external(*host).ip(family);
            text += &format!(
                "\n  - {{nodeSelector: {{matchLabels: {{{labels}}}}}, egressIP: \"{address}\", weight: {weight}}}"
            );
        }
    }
    text
}

/// The labels that select one node by its name.
pub fn named(node: &str) -> String {
    format!("kubernetes.io/hostname: {node}")
}

/// A policy for the web pods over egress IPs with these host numbers, spread by flow.
pub fn web(hosts: &[u8]) -> String {
    of_app("web", &gateways(hosts))
}

/// A pool with one range of host numbers in each family, failing back after `delay`, or never.
pub fn pool(name: &str, first: u8, last: u8, delay: Option<&str>) -> String {
    let ranges: Vec<String> = Family::BOTH
        .iter()
        .map(|&family| {
            let (first, last) = (address::external(first).ip(family), address::external(last).ip(family));
            format!("{{start: \"{first}\", end: \"{last}\"}}")
        })
        .collect();
    let failback = delay.map_or("{mode: Never}".to_owned(), |delay| format!("{{mode: Preferred, delay: {delay}}}"));
    format!(
        "apiVersion: spillway.io/v1beta1\nkind: EgressIPPool\nmetadata: {{name: {name}}}\nspec:\n  ipRanges: [{}]\n  \
         nodeSelector: {{matchLabels: {{egress: \"true\"}}}}\n  failback: {failback}\n",
        ranges.join(", ")
    )
}

/// The addresses of one family with these host numbers.
pub fn egress(family: Family, hosts: &[u8]) -> Vec<IpAddr> {
    hosts.iter().map(|&host| address::external(host).ip(family)).collect()
}

/// The name of the EgressIP object of an address.
pub fn object_name(address: IpAddr) -> String {
    match address {
        IpAddr::V4(v4) => v4.to_string(),
        IpAddr::V6(v6) => v6.segments().map(|group| format!("{group:04x}")).join("-"),
    }
}

/// Settings for tests that are not about failures: a machine under load must not look like a dead gateway.
pub const CALM: &str = "probe: {interval: 500ms, count: 10}\nlease: {renew: 1s, duration: 20s}\ndeadline: 15s\n";

/// Short leases, for tests that wait until one lapses. With still shorter ones, living gateways would lose theirs on a busy machine.
pub const SHORT_LEASES: &str = "lease: {renew: 1s, duration: 5s}\n";
/// Probes that survive the pauses of a busy machine, and notice a dead gateway after a second.
pub const PATIENT_PROBES: &str = "probe: {interval: 200ms, count: 5}\n";

/// The options of a test that waits until a lease lapses.
pub fn short_leases() -> StartOptions {
    StartOptions::new().config(SHORT_LEASES)
}

/// Starts the agents of all nodes, and a controller once all have reported. The settings prevent accidental failovers.
pub fn start(lab: &mut Lab) -> Result<()> {
    start_with(lab, &calm())
}

/// The options of [`start`].
pub fn calm() -> StartOptions {
    StartOptions::new().config(CALM)
}

/// [`calm`] with one transport.
pub fn fixed(transport: &str) -> StartOptions {
    StartOptions::new().config(&format!("{CALM}transport: {transport}\n"))
}

/// [`calm`] without the host's firewall.
pub fn bypass() -> StartOptions {
    StartOptions::new().config(&format!("{CALM}firewall: bypass\n"))
}

/// [`calm`] with programs that are attached by these means.
pub fn attaching(means: Means) -> StartOptions {
    match means {
        Means::Tcx => calm(),
        Means::Clsact => calm().without_tcx(),
    }
}

/// [`start`] with options for agents and controller.
pub fn start_with(lab: &mut Lab, options: &StartOptions) -> Result<()> {
    lab.start_agents_before_controller(options)?;
    let nodes: Vec<String> = lab.nodes().map(|node| node.name.clone()).collect();
    let reports = || lab.manifests().reporting();
    wait_until("every node has reported", PATIENCE, reports, |known| *known == nodes)?;
    lab.start_controller("controller", options)
}

/// The source addresses of connections at a server, and the number of connections from each.
pub type Sources = BTreeMap<IpAddr, usize>;

/// Opens `count` connections concurrently, closes them, and returns their sources. Connections that are not established
/// and answered in time are missing from the result.
pub fn sources(from: &NetNs, server: &Server, family: Family, count: usize) -> Result<Sources> {
    sources_at(from, server, LOOK_PORT, family, count)
}

/// [`sources`] at another port of the server. A connection with the addresses and ports of a recent one belongs to the
/// same flow, and keeps its egress IP unless the policy has changed since.
pub fn sources_at(from: &NetNs, server: &Server, port: u16, family: Family, count: usize) -> Result<Sources> {
    let listening = TcpServer::start(&server.ns, &server.ips.both(port), ServerMode::Echo)?;
    let options =
        TcpOptions { connect_timeout: CONNECT, interval: Duration::from_millis(5), reset: true, ..TcpOptions::once() };
    let clients = TcpClients::open(from, server.ips.at(family, port), count, options)?;
    let decided = |one: &lab::traffic::ConnectionReport| match one.state {
        lab::traffic::ConnectionState::Connecting => false,
        lab::traffic::ConnectionState::Open => one.received > 0,
        _ => true,
    };
    // A connection that was cut between its handshake and its first record stays undecided.
    let began = Instant::now();
    clients.wait("connections that are open or have failed", PATIENCE, |all| {
        all.len() == count && (all.iter().all(decided) || began.elapsed() > 2 * CONNECT)
    })?;
    let open: BTreeSet<u64> = clients.connections().iter().filter(|one| one.received > 0).map(|one| one.id).collect();
    let seen = listening.source_of_flow();
    Ok(lab::traffic::tally(seen.iter().filter(|(id, _)| open.contains(id)).map(|(_, peer)| peer.ip())))
}

/// Returns how many connections show all of `slots` egress IPs, except in one of a thousand cases.
fn enough(slots: usize) -> usize {
    8 + 12 * slots
}

/// Waits until the pod's new connections to `server` have exactly these source addresses, and each of them occurs.
pub fn wait_sources(from: &NetNs, server: &Server, family: Family, expected: &[IpAddr]) -> Result<()> {
    let expected: BTreeSet<IpAddr> = expected.iter().copied().collect();
    let what = format!("connections to {} have the sources {expected:?}, each of them, and no other", server.name);
    let count = enough(expected.len());
    let good = |seen: &Sources| {
        seen.keys().copied().collect::<BTreeSet<_>>() == expected && seen.values().sum::<usize>() == count
    };
    wait_until(&what, PATIENCE, || sources(from, server, family, count), good).map(drop)
}

/// Fails if a packet reached `server` from an address other than the egress IPs with these host numbers.
#[track_caller]
pub fn assert_no_strangers(trace: &Trace, server: &Server, hosts: &[u8]) {
    for family in Family::BOTH {
        let strangers = trace.unexpected_sources_towards(server.ips.ip(family), &egress(family, hosts));
        assert!(strangers.is_empty(), "{strangers:?}");
    }
}

/// Waits until the egress IPs with these host numbers are in force for a pod, in both families.
pub fn wait_in_force(pod: &Pod, server: &Server, hosts: &[u8]) -> Result<()> {
    Family::BOTH.into_iter().try_for_each(|family| wait_sources(&pod.ns, server, family, &egress(family, hosts)))
}

/// Starts Spillway with [`web`] over these egress IPs in force for a pod on `worker1`. Returns the pod and the server.
pub fn web_pod(lab: &mut Lab, hosts: &[u8]) -> Result<(Pod, Server)> {
    web_pod_with(lab, hosts, &calm())
}

/// [`web_pod`] with options for agents and controller.
pub fn web_pod_with(lab: &mut Lab, hosts: &[u8], options: &StartOptions) -> Result<(Pod, Server)> {
    policy_pod(lab, &web(hosts), hosts, options)
}

/// [`web_pod_with`] under the policy of this text, which gives the pod the egress IPs with these host numbers.
pub fn policy_pod(lab: &mut Lab, text: &str, hosts: &[u8], options: &StartOptions) -> Result<(Pod, Server)> {
    lab.manifests().write("web", text)?;
    let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
    start_with(lab, options)?;
    let server = lab.server("server1").clone();
    wait_in_force(&pod, &server, hosts)?;
    Ok((pod, server))
}

/// Forbids forwarding packets from `pod` to `server`, by an nftables table named `denied`.
pub fn forbid(ns: &NetNs, pod: &Pod, server: &Server) -> Result<()> {
    ns.nft(&format!(
        "table inet denied {{
            chain forward {{
                type filter hook forward priority filter; policy accept;
                ip saddr {} ip daddr {} drop
                ip6 saddr {} ip6 daddr {} drop
            }}
        }}",
        pod.ips.v4, server.ips.v4, pod.ips.v6, server.ips.v6
    ))
}

/// Checks that each datagram of these flows was answered unchanged.
pub fn all_answered(flows: &[UdpClients]) -> Result<()> {
    flows.iter().try_for_each(|flows| flows.all_answered().map(drop))
}

/// Waits until no new connection from a pod to `server` is established.
pub fn wait_refused(pod: &Pod, server: &Server) -> Result<()> {
    for family in Family::BOTH {
        let what = format!("no connection of {} to {} is established", pod.name, server.name);
        wait_until(&what, PATIENCE, || sources(&pod.ns, server, family, 4), Sources::is_empty)?;
    }
    Ok(())
}

/// Returns the owner of an egress IP, according to its EgressIP.
pub fn owner(lab: &Lab, address: IpAddr) -> Option<String> {
    let text = lab.manifests().written("EgressIP", &object_name(address))?;
    scalar_after(text.split_once("\nstatus:")?.1, "node")
}

/// Waits until an egress IP has an owner that is `good`, and returns it.
pub fn wait_owner(lab: &Lab, address: IpAddr, good: impl Fn(&str) -> bool) -> Result<String> {
    let what = format!("the right owner of {address}");
    let found = wait_until(&what, PATIENCE, || Ok(owner(lab, address)), |node| node.as_deref().is_some_and(&good))?;
    found.context("an owner")
}

/// Returns the value of the first line `key: value` in a block-style YAML text.
fn scalar_after(text: &str, key: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix(':'))?;
    Some(value.trim().trim_matches(['"', '\'']).to_owned())
}

/// Returns the MAC address in a server's neighbour table for an address of its segment, as `ip neigh` prints it.
pub fn neighbour(server: &Server, address: IpAddr) -> Result<String> {
    let line = server.ns.sh(&format!("ip neigh show {address} dev eth0"))?;
    Ok(line.split_whitespace().skip_while(|word| *word != "lladdr").nth(1).unwrap_or_default().to_owned())
}

/// A MAC address as `ip` prints it.
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Makes a server resolve an address until it gets an answer. Returns all MAC addresses that answered, also shortly after.
pub fn who_answers(server: &Server, address: IpAddr) -> Result<BTreeSet<[u8; 6]>> {
    let capture = Capture::start(&server.ns, "eth0")?;
    let answer = |packet: &Packet| packet.claim().is_some_and(|(claimed, _)| claimed == address);
    wait_for(&format!("an answer for {address}"), PATIENCE, || {
        server.ns.sh(&format!("ip neigh del {address} dev eth0 2>/dev/null || true"))?;
        // Any packet makes the kernel resolve the address.
        let any: SocketAddr = if address.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
        server.ns.run(|| Ok(UdpSocket::bind(any)?.send_to(b"x", (address, 9))?))?;
        let asked = Instant::now();
        let answered = || Ok(capture.count(answer) > 0 && asked.elapsed() > QUIET / 3);
        wait_for("an answer", Duration::from_millis(300), answered).map(|()| true)
    })?;
    Ok(capture.finish()?.claims_of(address).into_keys().collect())
}

/// Returns one of the datapath's counters on a node.
pub fn counter(lab: &Lab, node: &str, name: &str) -> Result<u64> {
    let counters = lab.counters(node)?;
    counters.get(name).copied().with_context(|| format!("egressctl stats on {node} has no {name}: {counters:?}"))
}

/// Returns whether a node answers ARP and NDP for an address, according to its maps.
pub fn announces(lab: &Lab, node: &str, address: IpAddr) -> Result<bool> {
    let rows = lab.egressctl(node, &["ips"])?;
    let own = |row: &serde_json::Value| row["egressIp"] == address.to_string() && row["announced"] == true;
    Ok(rows["items"].as_array().into_iter().flatten().any(own))
}

/// Returns the counters of everything that a node's datapath and rules have dropped.
pub fn drops(lab: &Lab, node: &str) -> Result<BTreeMap<String, u64>> {
    let mut counters = lab.counters(node)?;
    counters.retain(|name, _| name.starts_with("drop_"));
    Ok(counters)
}

/// Waits until an agent reports that foreign programs may bring packets into its pods unseen, or that none may.
pub fn wait_bypass(lab: &Lab, node: &str, is_there: bool) -> Result<()> {
    let told = || Ok(lab.egressctl(node, &["state"])?["agent"]["bypass"].clone());
    let what = format!("a way past the programs of {node}: {is_there}");
    wait_until(&what, PATIENCE, told, |told| told.is_null() != is_there).map(drop)
}

/// Waits until a node's agent reports its state.
pub fn wait_agent(lab: &Lab, node: &str) -> Result<()> {
    wait_for("the agent runs", PATIENCE, || Ok(!lab.egressctl(node, &["state"])?["agent"].is_null()))
}

/// Waits until a counter is above `before`.
pub fn wait_counter(lab: &Lab, node: &str, name: &str, before: u64) -> Result<()> {
    wait_grown(lab, node, name, before, 1)
}

/// Waits until a counter has grown by `more`.
pub fn wait_grown(lab: &Lab, node: &str, name: &str, before: u64, more: u64) -> Result<()> {
    let what = format!("{name} of {node} grows by {more} from {before}");
    wait_until(&what, PATIENCE, || counter(lab, node, name), |now| *now >= before + more).map(drop)
}

/// Returns the socket address with this address and port.
pub fn at(address: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(address, port)
}

/// Returns whether bpftool, which [`settings`] and [`knows`] need, exists here.
pub fn has_bpftool() -> bool {
    std::process::Command::new("bpftool").arg("version").output().is_ok()
}

/// Returns whether the datapath of a node knows an address as a pod's.
pub fn knows(lab: &Lab, node: &str, address: IpAddr) -> bool {
    let (map, bytes) = match address {
        IpAddr::V4(v4) => ("ENDPOINTS_V4", v4.octets().to_vec()),
        IpAddr::V6(v6) => ("ENDPOINTS_V6", v6.octets().to_vec()),
    };
    let key: Vec<String> = bytes.iter().map(u8::to_string).collect();
    let map = lab.pins(node).join("maps").join(map);
    lab.node(node).ns.sh(&format!("bpftool map lookup pinned {} key {}", map.display(), key.join(" "))).is_ok()
}

/// Returns the bytes of the datapath's settings on a node (`egress_common::config::DatapathConfig`), from its pinned map.
pub fn settings(lab: &Lab, node: &str) -> Result<Vec<u8>> {
    let map = lab.pins(node).join("maps/CONFIG");
    let text = lab.node(node).ns.sh(&format!("bpftool -j map lookup pinned {} key 0 0 0 0", map.display()))?;
    let entry: Value = serde_json::from_str(&text)?;
    let bytes = entry["value"].as_array().context("the settings as bytes")?;
    let byte = |byte: &Value| u8::from_str_radix(byte.as_str()?.strip_prefix("0x")?, 16).ok();
    bytes.iter().map(byte).collect::<Option<Vec<u8>>>().with_context(|| format!("not bytes: {text}"))
}

/// Checks that large answers to a pod's datagram arrive, whatever the order of their fragments.
pub fn answers_in_fragments(pod: &Pod, server: &Server, family: Family) -> Result<()> {
    let open = |ns: &NetNs, at: SocketAddr| {
        let socket = ns.run(|| Ok(UdpSocket::bind(at)?))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        anyhow::Ok(socket)
    };
    let (client, echo) = (open(&pod.ns, pod.ips.at(family, 7002))?, open(&server.ns, server.ips.at(family, 54))?);
    client.connect(server.ips.at(family, 54))?;
    client.send(b"a question")?;
    let mut buffer = [0; 8192];
    let (_, peer) = echo.recv_from(&mut buffer).context("the question")?;
    for order in [FragmentOrder::InOrder, FragmentOrder::Reversed, FragmentOrder::Reversed] {
        send_fragments(&server.ns, server.ips.at(family, 54), peer, 4000, 1000, order)?;
        let received = client.recv(&mut buffer).with_context(|| format!("the answer {order:?} over {family:?}"))?;
        assert_eq!(received, 4000, "{order:?} over {family:?}");
    }
    Ok(())
}
