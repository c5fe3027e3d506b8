//! The lab itself, without Spillway.

use std::time::Duration;

use anyhow::Result;
use lab::traffic::{ConnectRate, Ping, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer, ping};
use lab::{Cni, Family, Lab, PodSpec};

const PATIENCE: Duration = Duration::from_secs(10);

#[test]
fn unpoliced_traffic_has_the_nodes_address() -> Result<()> {
    lab::require_root!();
    let t = std::time::Instant::now();
    let mut lab = Lab::builder().build()?;
    eprintln!("lab {:?}", t.elapsed());
    for cni in Cni::BOTH {
        for node in ["worker1", "gw1"] {
            let name = format!("{}-{node}", if cni == Cni::Bridge { "bridge" } else { "veth" });
            lab.add_pod(PodSpec::new(&name, node).cni(cni))?;
        }
    }
    eprintln!("pods {:?}", t.elapsed());
    for server in ["server1", "far1"] {
        let server = lab.server(server);
        let tcp = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
        let udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
        for pod in lab.pods() {
            let expected = lab.node(&pod.node).masquerade();
            for family in Family::BOTH {
                let clients = TcpClients::establish(&pod.ns, server.ips.at(family, 80), 10, TcpOptions::once())?;
                let all = clients.wait("echo", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
                for one in &all {
                    assert_eq!(tcp.source_of_flow()[&one.id].ip(), expected.ip(family), "{} {}", pod.name, server.name);
                }
                let clients = UdpClients::start(&pod.ns, server.ips.at(family, 53), 10, UdpOptions::once())?;
                let all = clients.wait("replies", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
                for one in &all {
                    let peers = &udp.flows()[&one.id].peers;
                    assert_eq!(peers.iter().map(|peer| peer.ip()).collect::<Vec<_>>(), [expected.ip(family)]);
                }
                let report = ping(&pod.ns, server.ips.ip(family), &Ping::default())?;
                assert_eq!(report.replies.len(), 1, "{report:?}");
            }
        }
    }
    eprintln!("traffic {:?}", t.elapsed());
    let server = lab.server("server1");
    let _tcp = TcpServer::start(&server.ns, &server.ips.both(81), ServerMode::Echo)?;
    let rate = ConnectRate { total: 5000, ..Default::default() };
    let report = rate.start(&lab.pod("veth-worker1").ns, server.ips.at(Family::V4, 81))?.wait()?;
    eprintln!("{} {:?} {:?}", report.per_second(), report.failed, report.latency());
    drop(lab);
    eprintln!("all {:?}", t.elapsed());
    Ok(())
}
