//! A gateway that forwards packets at the drivers of its interfaces (XDP): everything arrives as it does without XDP,
//! XDP is switched on and off under load, and it stays off where it is not wanted.

use std::collections::BTreeMap;

use anyhow::Result;
use lab::frames::redirect;
use lab::traffic::{
    ConnectionReport, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer,
};
use lab::{Capture, Family, Lab, PodSpec, Server, StartOptions, Vlans, wait_until};

use crate::subnets::{addresses, gateway, in_subnet};
use crate::support::{
    CALM, PATIENCE, all_answered, assert_no_strangers, counter, of_app, start_with, wait_counter, wait_sources,
    web_pod_with,
};
use crate::transport::everything;

const HOSTS: [u8; 1] = [10];
const BOTH: [&str; 2] = ["eth0", "ext0"];

fn options(transport: &str, xdp: &str) -> StartOptions {
    StartOptions::new().config(&format!("{CALM}transport: {transport}\nxdp: {xdp}\n"))
}

fn builder() -> lab::Builder {
    Lab::builder().workers(1).gateways(1).far_servers(0)
}

/// Waits until the gateway reports that its program is at exactly these drivers. Returns what it reports about the others.
fn wait_native(lab: &Lab, expected: &[&str]) -> Result<String> {
    let told = || {
        let rows = lab.egressctl("gw1", &["gateways"])?;
        let row = rows["items"].as_array().and_then(|rows| rows.first().cloned()).unwrap_or_default();
        let names = row["native"].as_array().cloned().unwrap_or_default();
        let names: Vec<String> = names.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect();
        Ok((names, row["whyNotBetter"].as_str().unwrap_or_default().to_owned()))
    };
    let what = format!("programs at the drivers of {expected:?}");
    // An agent that has just started first reports nothing, and then that its program is at no driver.
    let settled = |(names, why): &(Vec<String>, String)| names == expected && (names.len() == 2 || !why.is_empty());
    Ok(wait_until(&what, PATIENCE, told, settled)?.1)
}

#[test]
fn all_protocols_arrive_through_the_driver_programs() {
    ["direct", "vxlan"].into_iter().for_each(|transport| all_protocols_arrive(builder(), transport));
}

#[test]
fn gateways_whose_interfaces_are_vlan_devices_of_one_card_use_its_driver() {
    lab::require_root!();
    let obstacle = lab::skip::vlan_xdp_obstacle().expect("a namespace");
    lab::require!(obstacle.is_none(), "{}", obstacle.unwrap_or_default());
    ["direct", "vxlan"].into_iter().for_each(|transport| all_protocols_arrive(builder().vlan_devices(), transport));
}

/// Checks that all protocols arrive at a server, and that the gateway's drivers send most packets in both directions.
fn all_protocols_arrive(builder: lab::Builder, transport: &str) {
    builder.cards().run(|lab| {
        let (pod, server) = web_pod_with(lab, &HOSTS, &options(transport, "Native"))?;
        wait_native(lab, &BOTH)?;
        let capture = Capture::start(&server.ns, "eth0")?;
        let before = forwarded(lab)?;
        everything(&pod, &server)?;
        // TC sends fragments, and the packets that make the kernel confirm the next hop from time to time.
        assert_sent_by_drivers(lab, before, 75)?;
        let (trace, _) = capture.finish_lossy()?;
        assert_no_strangers(&trace, &server, &HOSTS);
        assert_eq!(trace.wrong_checksums().packets(), []);
        Ok(())
    });
}

/// Returns the packets that the gateway sent at drivers, and those that it forwarded out, and back.
fn forwarded(lab: &Lab) -> Result<[u64; 3]> {
    let [sent, out, back] = ["xdp_sent", "gateway_forwarded", "gateway_replied"].map(|name| counter(lab, "gw1", name));
    Ok([sent?, out?, back?])
}

/// Asserts that drivers sent more than this share of the packets since `before`. One direction alone would be about half.
fn assert_sent_by_drivers(lab: &Lab, before: [u64; 3], percent: u64) -> Result<()> {
    let now = forwarded(lab)?;
    let [sent, out, back] = [0, 1, 2].map(|i| now[i] - before[i]);
    let enough = back > 1000 && sent > 1000 && sent * 100 > (out + back) * percent;
    assert!(enough, "{sent} of {out} and {back}: {:?}", lab.counters("gw1")?);
    Ok(())
}

#[test]
fn packets_of_a_vlan_go_through_the_driver_programs_both_ways() {
    const VLAN: u16 = 101;
    for transport in ["direct", "vxlan"] {
        builder().cards().run(|lab| {
            let server = lab.server("server1").clone();
            let inside = Server { ips: gateway(1), ..server.clone() };
            let networks = vec![format!("{}/24", inside.ips.v4), format!("{}/64", inside.ips.v6)];
            let _vlans = Vlans::start(&server.ns, "eth0", &BTreeMap::from([(VLAN, networks)]))?;
            for (name, family) in [("v4", Family::V4), ("v6", Family::V6)] {
                lab.manifests().write(name, &in_subnet(name, family, 1, Some(VLAN)))?;
            }
            lab.manifests()
                .write("web", &of_app("web", "\n  egressIPPools: [{name: v4, count: 2}, {name: v6, count: 2}]"))?;
            let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
            start_with(lab, &options(transport, "Native"))?;
            for family in Family::BOTH {
                wait_sources(&pod.ns, &inside, family, &addresses(family, 1))?;
            }
            wait_native(lab, &BOTH)?;
            let before = forwarded(lab)?;
            everything(&pod, &inside)?;
            // TC sends only fragments: the kernel has no next hop to confirm.
            assert_sent_by_drivers(lab, before, 90)
        });
    }
}

#[test]
fn xdp_is_switched_under_load_without_packet_loss() {
    builder().cards().alone().run(|lab| {
        let (pod, server) = web_pod_with(lab, &HOSTS, &options("direct", "Off"))?;
        let _tcp = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let _udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
        let (mut clients, mut datagrams) = (Vec::new(), Vec::new());
        for family in Family::BOTH {
            clients.push(TcpClients::establish(&pod.ns, server.ips.at(family, 80), 20, TcpOptions::default())?);
            datagrams.push(UdpClients::start(&pod.ns, server.ips.at(family, 53), 30, UdpOptions::default())?);
        }
        for _ in 0..2 {
            for (xdp, at) in [("Native", &BOTH[..]), ("Off", &[])] {
                lab.agent("gw1").terminate()?;
                lab.start_agent("gw1", &options("direct", xdp))?;
                wait_native(lab, at)?;
                let before = counter(lab, "gw1", "xdp_sent")?;
                clients.iter().try_for_each(|all| all.wait_progress(10, PATIENCE))?;
                assert_eq!(counter(lab, "gw1", "xdp_sent")? > before, xdp == "Native");
            }
        }
        all_answered(&datagrams)?;
        for all in &clients {
            assert!(all.connections().iter().all(ConnectionReport::intact));
        }
        Ok(())
    });
}

#[test]
fn a_veth_stays_at_tc_unless_it_is_asked_for() {
    builder().cards().run(|lab| {
        web_pod_with(lab, &HOSTS, &options("direct", "Auto"))?;
        let why = wait_native(lab, &[])?;
        assert!(why.contains("eth0") && why.contains("ext0") && why.contains("merged"), "{why}");
        let check = lab.daemon_text("gw1", &["check"])?;
        assert!(check.contains("xdp") && check.contains("merged"), "{check}");
        Ok(())
    });
}

#[test]
fn foreign_xdp_programs_and_offloaded_vlan_tags_are_respected() {
    builder().cards().run(|lab| {
        let gateway = lab.node("gw1").ns.clone();
        // The foreign program redirects only frames that nothing sends; the rest passes.
        let others = redirect(&gateway, ["eth0", "ext0"], (14, *b"none"))?;
        let (pod, server) = web_pod_with(lab, &HOSTS, &options("direct", "Native"))?;
        let why = wait_native(lab, &["ext0"])?;
        assert!(why.contains("eth0") && why.contains("another XDP program"), "{why}");
        everything(&pod, &server)?;
        drop(others);
        wait_native(lab, &BOTH)?;
        let before = counter(lab, "gw1", "xdp_sent")?;
        everything(&pod, &server)?;
        wait_counter(lab, "gw1", "xdp_sent", before)
    });
    // On links like a veth, tags may arrive outside the frame.
    builder().run(|lab| {
        web_pod_with(lab, &HOSTS, &options("direct", "Native"))?;
        if std::env::var_os("SPILLWAY_TEST_XDP").is_none() {
            let why = wait_native(lab, &[])?;
            assert!(why.contains("ethtool -K eth0 rxvlan off"), "{why}");
        }
        Ok(())
    });
}
