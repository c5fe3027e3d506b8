//! Tests of the lab itself, without Spillway: the other tests rely on this behaviour.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use lab::capture::Checksum;
use lab::traffic::{
    BulkServer, ConnectRate, Direction, FragmentOrder, Ping, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients,
    UdpOptions, UdpServer, bulk, ping, send_fragments, undelivered,
};
use lab::{
    Capture, Cni, Family, Lab, Pod, PodSpec, Segment, Server, StartOptions, address, machine, wait_for, wait_until,
};

const PATIENCE: Duration = Duration::from_secs(10);
/// Several times the interval at which streams send.
const TICKS: Duration = Duration::from_millis(100);

#[test]
fn unpoliced_traffic_of_point_to_point_pods_has_the_nodes_address() {
    unpoliced_traffic_has_the_nodes_address(Cni::PointToPoint, 0);
}

#[test]
fn unpoliced_traffic_of_bridged_pods_has_the_nodes_address() {
    unpoliced_traffic_has_the_nodes_address(Cni::Bridge, 0);
}

#[test]
fn unpoliced_traffic_passes_strict_reverse_path_filters() {
    unpoliced_traffic_has_the_nodes_address(Cni::PointToPoint, 1);
}

fn unpoliced_traffic_has_the_nodes_address(cni: Cni, rp_filter: u8) {
    Lab::builder().cni(cni).rp_filter(rp_filter).run(|lab| {
        for node in ["worker1", "worker2", "gw1"] {
            lab.add_pod(PodSpec::new(&format!("on-{node}"), node))?;
        }
        for server in ["server1", "far1"] {
            let server = lab.server(server);
            let capture = Capture::start(&server.ns, "eth0")?;
            for pod in lab.pods() {
                reaches(lab, pod, server)?;
            }
            let trace = capture.finish()?;
            for family in Family::BOTH {
                let nodes: Vec<IpAddr> = lab.nodes().map(|node| node.masquerade().ip(family)).collect();
                let sources = trace.sources_towards(server.ips.ip(family));
                assert_eq!(sources.len(), 3, "{sources:?}");
                assert!(trace.unexpected_sources_towards(server.ips.ip(family), &nodes).is_empty(), "{sources:?}");
                assert!(
                    !trace.unexpected_sources_towards(server.ips.ip(family), &nodes[1..]).is_empty(),
                    "{sources:?}"
                );
            }
            assert_eq!(trace.wrong_checksums().packets(), []);
        }
        Ok(())
    });
}

/// Checks that TCP, UDP and echo requests reach the server with the address of the pod's node and are answered.
fn reaches(lab: &Lab, pod: &Pod, server: &Server) -> Result<()> {
    let tcp = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
    let udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
    for family in Family::BOTH {
        let expected = lab.node(&pod.node).masquerade().ip(family);
        let clients = TcpClients::establish(&pod.ns, server.ips.at(family, 80), 20, TcpOptions::once())?;
        for one in clients.wait("echoes", PATIENCE, |all| all.iter().all(|one| one.received == 1))? {
            assert_eq!(tcp.source_of_flow()[&one.id].ip(), expected, "{} to {}", pod.name, server.name);
        }
        let flows = UdpClients::start(&pod.ns, server.ips.at(family, 53), 20, UdpOptions::once())?;
        for one in flows.wait("replies", PATIENCE, |all| all.iter().all(|one| one.received == 1))? {
            let peers: Vec<IpAddr> = udp.flows()[&one.id].peers.iter().map(SocketAddr::ip).collect();
            assert_eq!(peers, [expected], "{} to {}", pod.name, server.name);
        }
        let report = ping(&pod.ns, server.ips.ip(family), &Ping::default())?;
        assert_eq!(report.replies.len(), 1, "{report:?}");
    }
    Ok(())
}

#[test]
fn pods_reach_each_other_and_are_reached_from_outside() {
    for cni in Cni::BOTH {
        Lab::builder().cni(cni).run(|lab| {
            for (name, node) in [("a", "worker1"), ("b", "worker1"), ("c", "worker2")] {
                lab.add_pod(PodSpec::new(name, node))?;
            }
            let pod = lab.pod("a");
            for family in Family::BOTH {
                for from in [&lab.pod("b").ns, &lab.pod("c").ns, &lab.server("server1").ns, &lab.node("worker2").ns] {
                    let server = TcpServer::start(&pod.ns, &pod.ips.both(8080), ServerMode::Echo)?;
                    let _clients = TcpClients::establish(from, pod.ips.at(family, 8080), 1, TcpOptions::once())?;
                    let peer = server.wait("a connection", PATIENCE, |all| !all.is_empty())?[0].peer.ip();
                    let pods = ["10.244.", "fd00:10:244:", "10.88.", "fd88:", "192.0.2.", "2001:db8:2:"];
                    assert!(pods.iter().any(|prefix| peer.to_string().starts_with(prefix)), "{peer}");
                    assert_ne!(peer, lab.node("worker1").underlay.ip(family), "not masqueraded inside");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn pods_come_and_go_and_change_their_addresses() {
    for cni in Cni::BOTH {
        Lab::builder().workers(1).gateways(0).far_servers(0).cni(cni).run(|lab| {
            let first = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
            reaches(lab, &first, lab.server("server1"))?;
            assert!(lab.manifests().read("pod-default-web")?.contains(&first.ips.v6.to_string()));

            lab.readdress_pod("web", address::pod(1, 99))?;
            let moved = lab.pod("web");
            assert_eq!((&moved.uid, moved.ips), (&first.uid, address::pod(1, 99)));
            reaches(lab, moved, lab.server("server1"))?;

            lab.remove_pod("web")?;
            assert!(lab.node("worker1").ns.ifindex(&first.host_interface).is_err());
            assert!(lab.manifests().read("pod-default-web").is_err());

            let again = lab.prepare_pod(PodSpec::new("web", "worker1").ips(address::pod(1, 99)))?;
            assert_ne!(again.uid, first.uid);
            assert!(again.ns.ifindex("eth0").is_err(), "no link before the pod starts");
            assert!(!lab.manifests().read("pod-default-web")?.contains("podIP"));
            lab.start_pod("web")?;
            reaches(lab, lab.pod("web"), lab.server("server1"))?;
            Ok(())
        });
    }
}

#[test]
fn streams_survive_a_pause_and_report_it() {
    Lab::builder().workers(1).gateways(0).run(|lab| {
        let pod = lab.add_pod(PodSpec::new("web", "worker1"))?;
        let server = lab.server("server1");
        for family in Family::BOTH {
            let tcp = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
            let clients = TcpClients::establish(&pod.ns, server.ips.at(family, 80), 30, TcpOptions::default())?;
            clients.wait_progress(3, PATIENCE)?;

            lab.isolate("worker1", Segment::Underlay)?;
            clients.reset_pauses();
            let silent =
                |all: &[lab::traffic::ConnectionReport]| all.iter().all(|one| one.pause() > Duration::from_millis(250));
            clients.wait("silence", PATIENCE, silent)?;
            lab.rejoin("worker1", Segment::Underlay)?;
            clients.wait_progress(3, PATIENCE)?;
            // Each direction retransmits by its own timer.
            tcp.wait_progress(3, PATIENCE)?;

            // The server sends first on connections that were silent.
            clients.set_sending(false);
            tcp.set_sending(false);
            let silent =
                |all: &[lab::traffic::ConnectionReport]| all.iter().all(|one| one.last_arrival.elapsed() > TICKS);
            clients.wait("the client's end is quiet", PATIENCE, silent)?;
            tcp.wait("the server's end is quiet", PATIENCE, silent)?;
            assert_eq!(undelivered(&clients.connections(), &tcp.connections()), 0);
            tcp.set_sending(true);
            clients.wait_progress(1, PATIENCE)?;

            let all = clients.close()?;
            assert_eq!(all.len(), 30);
            assert!(
                all.iter().all(|one| one.intact() && one.stalls > 0 && one.pause() > Duration::from_millis(250)),
                "{all:?}"
            );
            let seen = tcp.connections();
            assert!(seen.iter().all(|one| one.wrong == 0 && one.received > 3 && one.id != 0), "{seen:?}");
        }
        Ok(())
    });
}

#[test]
fn a_dead_node_is_silent_and_the_others_are_not() {
    Lab::builder().workers(2).gateways(1).run(|lab| {
        let dead = lab.add_pod(PodSpec::new("dead", "worker1"))?;
        let alive = lab.add_pod(PodSpec::new("alive", "worker2"))?;
        let server = lab.server("server1").clone();
        let _echo = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
        let options = TcpOptions { connect_timeout: Duration::from_millis(300), ..TcpOptions::once() };
        let target = server.ips.at(Family::V4, 80);
        TcpClients::establish(&dead.ns, target, 1, TcpOptions::once())?;

        lab.kill_node("worker1")?;
        assert!(TcpClients::establish(&dead.ns, target, 1, options.clone()).is_err());
        TcpClients::establish(&alive.ns, target, 1, TcpOptions::once())?;

        lab.revive_node("worker1")?;
        wait_for("the node is back", PATIENCE, || {
            Ok(TcpClients::establish(&dead.ns, target, 1, options.clone()).is_ok())
        })?;

        lab.kill_node("gw1")?;
        let gateway = lab.node("gw1").external.context("a gateway")?;
        assert_eq!(
            ping(&server.ns, gateway.v4.into(), &Ping { timeout: Duration::from_millis(200), ..Ping::default() })?
                .replies,
            []
        );
        Ok(())
    });
}

#[test]
fn captures_decode_neighbours_errors_and_fragments() {
    Lab::builder().workers(1).gateways(1).far_mtu(1300).run(|lab| {
    let pod = lab.add_pod(PodSpec::new("web", "worker1"))?;
    let (server, far, gateway) = (lab.server("server1"), lab.server("far1"), lab.node("gw1"));
    let external = gateway.external.context("a gateway")?;
    let capture = Capture::start(&server.ns, "eth0")?;
    let at_pod = Capture::start(&pod.ns, "eth0")?;
    let udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
    for family in Family::BOTH {
        assert_eq!(ping(&server.ns, external.ip(family), &Ping::default())?.replies.len(), 1);
        // The router reports the MTU behind it once, because the pod's kernel does not know it yet.
        let large = Ping { size: 1400, dont_fragment: true, ..Ping::default() };
        assert_eq!(ping(&pod.ns, far.ips.ip(family), &large)?.mtu, Some(1300));
        // Nothing listens at this port.
        let flow = UdpClients::start(&pod.ns, server.ips.at(family, 9), 1, UdpOptions::once())?;
        flow.wait("refusal", PATIENCE, |flows| flows[0].errors.keys().any(|error| error.contains("refused")))?;
        // A datagram that the kernel fragments, and some that are fragmented by hand in several orders.
        let options = UdpOptions { size: 4000, ..UdpOptions::once() };
        let flow = UdpClients::start(&pod.ns, server.ips.at(family, 53), 1, options)?;
        flow.wait("a large reply", PATIENCE, |flows| flows[0].received == 1)?;
        for (port, order) in [(7001, FragmentOrder::InOrder), (7002, FragmentOrder::Reversed)] {
            let id = send_fragments(&pod.ns, pod.ips.at(family, port), server.ips.at(family, 53), 4000, 1000, order)?;
            wait_until(
                "the datagram",
                PATIENCE,
                || Ok(udp.flows()),
                |flows| flows.get(&id).is_some_and(|one| one.received == 1),
            )?;
        }
    }
    let trace = capture.finish()?;
    for family in Family::BOTH {
        let claims = trace.claims_of(external.ip(family));
        assert_eq!(claims.keys().collect::<Vec<_>>(), [&gateway.external_mac()], "{family:?}");
        let fragments = |packet: &lab::Packet| {
            packet.ip().is_some_and(|ip| ip.fragment.is_some() && ip.source == lab.node("worker1").underlay.ip(family))
        };
        // The kernel sends 4000 bytes in three fragments. By hand there are five, which a router with conntrack
        // reassembles and refragments.
        assert!(trace.count(fragments) >= 9, "{family:?} {}", trace.count(fragments));
    }
    let at_pod = at_pod.finish()?;
    for family in Family::BOTH {
        let errors = at_pod.filter(|packet| {
            matches!(&packet.ip().map(|ip| &ip.transport), Some(lab::capture::TransportLayer::IcmpError { inner: Some(inner), .. })
                if inner.ports.1 == 9 && inner.source == pod.ips.ip(family))
        });
        assert!(!errors.packets().is_empty(), "{family:?}: {at_pod:?}");
    }
    Ok(())
    });
}

#[test]
fn connections_are_opened_at_a_rate() {
    Lab::builder().workers(1).gateways(0).run(|lab| {
        let pod = lab.add_pod(PodSpec::new("web", "worker1"))?;
        let server = lab.server("server1");
        let _echo = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
        let all = ConnectRate { total: 500, ..ConnectRate::default() }
            .start(&pod.ns, server.ips.at(Family::V6, 80))?
            .wait()?;
        assert_eq!((all.opened, all.failures(), all.latency().count), (500, 0, 500), "{all:?}");
        let none = ConnectRate { total: 50, ..ConnectRate::default() }
            .start(&pod.ns, server.ips.at(Family::V4, 81))?
            .wait()?;
        assert_eq!((none.opened, none.failures()), (0, 50), "{none:?}");
        Ok(())
    });
}

#[test]
fn bulk_transfers_go_both_ways_with_and_without_offload() {
    const BYTES: u64 = 3_000_000;
    Lab::builder().workers(1).gateways(0).far_mtu(1400).run(|lab| {
        let pod = lab.add_pod(PodSpec::new("web", "worker1"))?;
        let server = lab.server("far1");
        let _bulk = BulkServer::start(&server.ns, &server.ips.both(5001))?;
        for on in [true, false] {
            server.ns.set_offload("eth0", on)?;
            pod.ns.set_offload("eth0", on)?;
            let capture = Capture::start(&server.ns, "eth0")?;
            for family in Family::BOTH {
                for direction in [Direction::Upload, Direction::Download] {
                    let report = bulk(&pod.ns, server.ips.at(family, 5001), direction, BYTES)?;
                    assert!(report.segment < 1400 && report.bytes == BYTES, "{report:?}");
                }
            }
            let trace = capture.finish()?;
            let segments = trace.filter(|packet| packet.tcp_flags().is_some());
            let largest = segments.packets().iter().map(|packet| packet.length).max();
            assert_eq!(largest > Some(1414), on, "{largest:?}");
            let right = segments.count(|packet| packet.ip().is_some_and(|ip| ip.checksum == Checksum::Right));
            assert!(on || right == segments.packets().len(), "{right} of {}", segments.packets().len());
            assert_eq!(trace.wrong_checksums().packets(), []);
        }
        Ok(())
    });
}

/// A stand-in for `egress-daemon` that prints its arguments, records SIGTERM and waits.
fn stand_in(dir: &Path) -> Result<std::path::PathBuf> {
    let path = dir.join("stand-in");
    let script = "#!/bin/sh\necho \"$@\"\ncat \"$5\"/node-worker1.yaml\nls /sys/fs/bpf >/dev/null && echo bpffs\n\
                  trap 'echo terminated; exit 0' TERM\nip -o link\nwhile :; do read -t 1 x </dev/zero; done\n";
    fs::write(&path, script.replace("read -t 1 x </dev/zero", "sleep 0.05"))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

#[test]
fn processes_run_in_their_node_and_are_killed_frozen_and_cut_off() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let options = StartOptions::new().binary(&stand_in(lab.dir())?).with_controller().config("a: 1").arg("--extra");
        lab.start_agents(&options)?;
        lab.start_controller("controller1", &options)?;
        wait_until("the agent is up", PATIENCE, || Ok(lab.agent("gw1").log()), |log| log.contains("ext0"))?;
        let log = lab.agent("gw1").log();
        for part in [
            "agent --node gw1 --manifests /tmp/spillway-lab/",
            "--with-controller",
            "--config",
            "--extra",
            "name: worker1",
            "bpffs",
        ] {
            assert!(log.contains(part), "{part} in {log}");
        }
        let manifests = lab.dir().join("store/gw1");
        lab.cut_store("gw1")?;
        assert!(!manifests.exists());
        lab.heal_store("gw1")?;
        assert!(manifests.join("node-gw1.yaml").exists());

        lab.agent("gw1").terminate()?;
        assert!(lab.agent("gw1").log().contains("terminated"));
        let pid = lab.agent("worker1").pid();
        let state = || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
            stat.split(' ').nth(2).map(str::to_owned).context("a state")
        };
        lab.agent("worker1").freeze()?;
        wait_until("it is stopped", PATIENCE, state, |state| state == "T")?;
        lab.agent("worker1").thaw()?;
        wait_until("it continues", PATIENCE, state, |state| state != "T")?;
        lab.kill_node("worker1")?;
        assert!(!lab.agent("worker1").alive()?);
        assert!(lab.controller("controller1").alive()?);
        Ok(())
    });
}

/// Returns the namespaces and folders of a lab that exist now.
fn remains(id: &str) -> Vec<String> {
    let entries = |folder: &str| {
        fs::read_dir(folder).into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok())
    };
    ["/run/netns", lab::scope::LABS, lab::scope::BPFFS]
        .iter()
        .flat_map(|folder| entries(folder))
        .filter(|name| name == id || name.starts_with(&format!("{id}-")))
        .collect()
}

#[test]
fn a_dropped_lab_leaves_nothing_behind() -> Result<()> {
    lab::require_root!();
    let _share = machine::take(false)?;
    let mut lab = Lab::builder().build()?;
    lab.add_pod(PodSpec::new("web", "worker1"))?;
    let id = lab.id().to_owned();
    fs::create_dir_all(lab.bpffs("worker1"))?;
    assert!(remains(&id).len() > 8);
    drop(lab);
    assert_eq!(remains(&id), Vec::<String>::new());
    Ok(())
}

#[test]
fn a_lab_whose_process_was_killed_leaves_nothing_behind() -> Result<()> {
    lab::require_root!();
    const ROLE: &str = "LAB_TEST_HOLDS_A_LAB";
    if std::env::var_os(ROLE).is_some() {
        return hold_a_lab();
    }
    // The child shares this: if it took its own, it could queue behind a test that waits for this test to end.
    let _share = machine::take(false)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["--exact", "a_lab_whose_process_was_killed_leaves_nothing_behind", "--nocapture"])
        .env(ROLE, "yes")
        .stdout(Stdio::piped())
        .spawn()?;
    let lines = BufReader::new(child.stdout.take().context("stdout")?).lines();
    let mut ids = lines.map_while(Result::ok).filter_map(|line| Some(line.split_once("LAB ")?.1.to_owned()));
    let (id, pid) = ids
        .next()
        .context("the child's lab")?
        .split_once(' ')
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .context("a pid")?;
    assert!(remains(&id).len() > 8);
    child.kill()?;
    child.wait()?;
    wait_until("the lab is gone", PATIENCE, || Ok(remains(&id)), Vec::is_empty)?;
    wait_for("its processes, too", PATIENCE, || Ok(!Path::new(&format!("/proc/{pid}")).exists()))
}

/// The child's part of the test: builds a lab and waits to be killed.
fn hold_a_lab() -> Result<()> {
    let mut lab = Lab::builder().build()?;
    lab.start_agent("gw1", &StartOptions::new().binary(&stand_in(lab.dir())?))?;
    println!("LAB {} {}", lab.id().to_owned(), lab.agent("gw1").pid());
    wait_for("being killed", PATIENCE * 6, || Ok(false))
}
