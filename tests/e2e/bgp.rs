//! `announce: Route`: routers learn egress IPs by BGP and distribute packets over all carriers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use lab::bgp::{self, Frr};
use lab::traffic::{
    ConnectionReport, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer,
};
use lab::{Dual, Family, Lab, NetNs, PodSpec, Server, StartOptions, address, wait_until};

use crate::support::{PATIENCE, WEB, counter, policy, sources, start_with};

/// The configurations that an administrator writes, with the addresses of `gw1`.
const FRR: &str = include_str!("../../docs/bgp/frr.conf");
const BIRD: &str = include_str!("../../docs/bgp/bird.conf");
/// An egress IP outside all networks of the lab.
const EGRESS: [&str; 2] = ["203.0.113.40", "2001:db8:71::40"];
const POOL: &str = "apiVersion: spillway.io/v1beta1
kind: EgressIPPool
metadata: {name: anycast}
spec:
  ipRanges: [{start: 203.0.113.40, end: 203.0.113.40}, {start: 2001:db8:71::40, end: 2001:db8:71::40}]
  nodeSelector: {matchLabels: {egress: \"true\"}}
  announce: Route
";
/// The longest pause in a datagram's answers when a gateway dies (several times that of a quiet machine), and when it returns.
const LONGEST: Duration = Duration::from_secs(2);
const SHORTLY: Duration = Duration::from_millis(500);
/// The server behind the spine.
const SERVER: Dual = Dual {
    v4: std::net::Ipv4Addr::new(198, 51, 101, 7),
    v6: std::net::Ipv6Addr::new(0x2001, 0xdb8, 0x53, 0, 0, 0, 0, 7),
};

fn egress_ip(family: Family) -> IpAddr {
    EGRESS[usize::from(family == Family::V6)].parse().expect("an address")
}

/// Returns the configuration of the gateways' router.
fn leaf(lab: &Lab) -> String {
    let gateways: Vec<Dual> = lab.gateways().filter_map(|node| node.external).collect();
    let neighbors =
        |Dual { v4, v6 }: &Dual| format!(" neighbor {v4} peer-group gateways4\n neighbor {v6} peer-group gateways6\n");
    let own = address::external(1).v4;
    format!(
        "bfd\n profile fast\n  transmit-interval 50\n  receive-interval 50\n exit\nexit
router bgp 65001
 bgp router-id {own}
 no bgp ebgp-requires-policy
 no bgp default ipv4-unicast
 neighbor gateways4 peer-group
 neighbor gateways4 remote-as 65010
 neighbor gateways4 bfd profile fast
 neighbor gateways4 timers connect 1
 neighbor gateways6 peer-group
 neighbor gateways6 remote-as 65010
 neighbor gateways6 bfd profile fast
 neighbor gateways6 timers connect 1
{}
 neighbor 10.77.0.2 remote-as 65002
 neighbor 10.77.0.2 timers connect 1
 neighbor fd77::2 remote-as 65002
 neighbor fd77::2 timers connect 1
 address-family ipv4 unicast
  maximum-paths 64
  neighbor gateways4 activate
  neighbor 10.77.0.2 activate
 exit-address-family
 address-family ipv6 unicast
  maximum-paths 64
  neighbor gateways6 activate
  neighbor fd77::2 activate
 exit-address-family
exit
",
        gateways.iter().map(neighbors).collect::<String>()
    )
}

const SPINE: &str = "router bgp 65002
 bgp router-id 10.77.0.2
 no bgp ebgp-requires-policy
 no bgp default ipv4-unicast
 neighbor 10.77.0.1 remote-as 65001
 neighbor 10.77.0.1 timers connect 1
 neighbor fd77::1 remote-as 65001
 neighbor fd77::1 timers connect 1
 address-family ipv4 unicast
  network 198.51.101.7/32
  neighbor 10.77.0.1 activate
 exit-address-family
 address-family ipv6 unicast
  network 2001:db8:53::7/128
  neighbor fd77::1 activate
 exit-address-family
exit
";

/// Leaf and spine, with a server at the spine. The gateways use the configurations of docs/bgp.
struct Fabric {
    leaf: Frr,
    spine: Frr,
    server: Server,
}

impl Fabric {
    fn start(lab: &mut Lab) -> Result<Fabric> {
        let spine = lab.role_namespace("spine")?;
        let router = lab.router().clone();
        join(&router, &spine)?;
        for router in [&router, &spine] {
            router.sysctls(&[
                ("net.ipv4.ip_forward", "1"),
                ("net.ipv6.conf.all.forwarding", "1"),
                ("net.ipv4.fib_multipath_hash_policy", "1"),
                ("net.ipv6.fib_multipath_hash_policy", "1"),
            ])?;
        }
        let config = leaf(lab);
        let (leaf, spine_frr) = (Frr::start(lab, &router, &config)?, Frr::start(lab, &spine, SPINE)?);
        let gateways: Vec<_> = lab.gateways().cloned().collect();
        for (number, gateway) in gateways.iter().enumerate() {
            let own = gateway.external.context("an address")?;
            let config = |text: &str| text.replace("192.0.2.101", &own.v4.to_string());
            if number % 2 == 0 {
                Frr::start(lab, &gateway.ns, &config(FRR))?;
            } else {
                bgp::bird(lab, &gateway.ns, &config(BIRD))?;
            }
        }
        let server = Server { name: "behind the spine".into(), ns: spine, ips: SERVER };
        Ok(Fabric { leaf, spine: spine_frr, server })
    }

    /// Returns the number of the leaf's next hops for the egress IP of a family.
    fn next_hops(&self, lab: &Lab, family: Family) -> Result<usize> {
        let flag = if family == Family::V4 { "-4" } else { "-6" };
        let routes = lab.router().sh(&format!("ip {flag} route show {}", egress_ip(family)))?;
        Ok(routes.matches(" via ").count())
    }

    fn wait_next_hops(&self, lab: &Lab, wanted: [usize; 2]) -> Result<()> {
        for (family, wanted) in Family::BOTH.into_iter().zip(wanted) {
            wait_until("the leaf's next hops", PATIENCE, || self.next_hops(lab, family), |hops| *hops == wanted)
                .with_context(|| {
                    self.leaf.show("show bgp all").unwrap_or_default()
                        + &self.leaf.show("show bgp neighbors").unwrap_or_default()
                })
                .with_context(|| self.spine.show("show bgp summary").unwrap_or_default())?;
        }
        Ok(())
    }
}

/// Creates the link between leaf and spine, and assigns the server's addresses.
fn join(leaf: &NetNs, spine: &NetNs) -> Result<()> {
    leaf.ip(&[format!("link add spine0 type veth peer name leaf0 netns {}", spine.name())])?;
    leaf.ip(&[
        "addr add 10.77.0.1/24 dev spine0".into(),
        "addr add fd77::1/64 dev spine0 nodad".into(),
        "link set spine0 up".into(),
    ])?;
    spine.ip(&[
        "addr add 10.77.0.2/24 dev leaf0".into(),
        "addr add fd77::2/64 dev leaf0 nodad".into(),
        format!("addr add {}/32 dev lo", SERVER.v4),
        format!("addr add {}/128 dev lo nodad", SERVER.v6),
        "link set leaf0 up".into(),
    ])?;
    spine.wait_running(&["leaf0"])
}

/// Returns a counter of each gateway.
fn carried(lab: &Lab, what: &str) -> Result<BTreeMap<String, u64>> {
    lab.gateways().map(|node| Ok((node.name.clone(), counter(lab, &node.name, what)?))).collect()
}

#[test]
fn one_egress_ip_is_routed_to_four_gateways_and_survives_the_death_of_one() {
    lab::require_root!();
    lab::require!(bgp::obstacle().is_none(), "{}", bgp::obstacle().unwrap_or_default());
    Lab::builder().workers(1).gateways(4).alone().run(|lab| {
        lab.manifests().write("pool", POOL)?;
        lab.manifests().write("web", &policy("web", &format!("{WEB}\n  egressIPPools: [{{name: anycast}}]")))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let fabric = Fabric::start(lab)?;
        start_with(lab, &StartOptions::new())?;
        // FRR's `ip import-table` supports only IPv4.
        fabric.wait_next_hops(lab, [4, 2])?;
        let server = fabric.server.clone();
        for family in Family::BOTH {
            let seen = || Ok(sources(&pod.ns, &server, family, 10)?.into_iter().collect::<Vec<_>>());
            wait_until("all have the egress IP", PATIENCE, seen, |seen| *seen == [(egress_ip(family), 10)])?;
        }
        let streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let _echo = UdpServer::start(&server.ns, &server.ips.both(82))?;
        let connect = |family| TcpClients::establish(&pod.ns, server.ips.at(family, 80), 100, TcpOptions::default());
        let clients = Family::BOTH.into_iter().map(connect).collect::<Result<Vec<_>>>()?;
        let ask = |family| {
            let options = UdpOptions { interval: Duration::from_millis(5), ..UdpOptions::default() };
            UdpClients::start(&pod.ns, server.ips.at(family, 82), 8, options)
        };
        let questions = Family::BOTH.into_iter().map(ask).collect::<Result<Vec<_>>>()?;
        let (sent, replied) = (carried(lab, "gateway_forwarded")?, carried(lab, "gateway_replied")?);
        streams.wait_progress(20, PATIENCE)?;
        for (before, what) in [(sent, "gateway_forwarded"), (replied, "gateway_replied")] {
            let all = |now: &BTreeMap<String, u64>| now.iter().all(|(node, count)| *count > before[node] + 20);
            wait_until(&format!("{what} of every gateway"), PATIENCE, || carried(lab, what), all)?;
        }
        let go_on = || -> Result<()> {
            streams.wait_progress(3, PATIENCE)?;
            clients.iter().try_for_each(|clients| clients.wait_progress(3, PATIENCE))?;
            questions.iter().try_for_each(|questions| questions.wait_progress(3, PATIENCE))
        };
        let reset = || {
            streams.reset_pauses();
            clients.iter().for_each(|clients| clients.reset_pauses());
            questions.iter().for_each(UdpClients::reset_pauses);
        };
        let judge = |what: &str, most: Duration| {
            let tcp = clients.iter().flat_map(|clients| clients.connections()).chain(streams.connections());
            let tcp = tcp.map(|one| one.pause()).max().unwrap_or_default();
            let udp = questions.iter().flat_map(UdpClients::flows).map(|flow| flow.pause()).max();
            let udp = udp.unwrap_or_default();
            eprintln!("{what}: longest pause: UDP {udp:?}, TCP {tcp:?}");
            assert!(udp < most, "{what}: no datagram was answered for {udp:?}");
        };
        for victim in ["gw1", "gw2"] {
            reset();
            lab.kill_node(victim)?;
            let left = if victim == "gw1" { [3, 2] } else { [3, 1] };
            fabric.wait_next_hops(lab, left)?;
            go_on()?;
            judge(&format!("{victim} dies"), LONGEST);
            reset();
            lab.revive_node(victim)?;
            lab.start_agent(victim, &StartOptions::new())?;
            fabric.wait_next_hops(lab, [4, 2])?;
            go_on()?;
            judge(&format!("{victim} returns"), SHORTLY);
        }
        // A gateway that is told to stop withdraws its route first.
        reset();
        lab.agent("gw4").terminate()?;
        fabric.wait_next_hops(lab, [3, 1])?;
        go_on()?;
        judge("gw4 stops", LONGEST);
        for clients in clients {
            assert!(clients.close()?.iter().all(ConnectionReport::intact), "a connection was lost");
        }
        Ok(())
    });
}
