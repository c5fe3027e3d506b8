//! Tests of the programs' reports for the flow log.

use super::{
    Counts, FlowLog, Mode,
    export::Exporters,
    flows::{self, Found, Wanted},
};
use egress_common::{limits, verdict::Counter};
use egress_core::encode::NodeView;
use egress_node::datapath::{
    load::{Programs, Sizes},
    testing::{
        BpfDir,
        frames::{TCP, UDP, ip, ports, read, seal, tcp, udp},
        rig::*,
        scenes,
    },
};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, atomic::Ordering};

const LOGGED: Sizes = Sizes { max_flows: 4096, flow_events: limits::FLOW_EVENTS };

/// Logs the programs' reports until the result is dropped.
fn follow(rig: &Rig, directory: &Path, kept: bool, counts: &Arc<Counts>) -> flows::Follower {
    let config = FlowLog { mode: Mode::Flows, destinations: true, ..FlowLog::default() };
    let (directory, pins) = (directory.join("flows"), rig.pins().clone());
    let settings =
        flows::Settings { config, directory, node: "n0".into(), pins, kept, exporters: Exporters::default() };
    flows::Follower::start(settings, Arc::clone(counts)).unwrap()
}

fn find(directory: &Path, seen: SocketAddr) -> Found {
    let wanted = Wanted { egress_ip: seen.ip(), port: seen.port(), from: i64::MIN, until: i64::MAX };
    flows::read(&directory.join("flows"), &wanted).unwrap()
}

/// Sends a pod's packet. Returns the source that the outside sees.
fn send(rig: &mut Rig, frame: &[u8]) -> SocketAddr {
    let (verdict, out) = rig.run("pod_egress", frame);
    assert_eq!(verdict, REDIRECT, "{frame:02x?}");
    SocketAddr::new(read(&out).unwrap().src, ports(&out).0)
}

/// Returns the scene after another pod has taken over the pod's address.
fn inherited() -> NodeView {
    let mut view = scene();
    let pod = view.endpoints.remove(&scenes::endpoint_id(0)).unwrap();
    view.endpoints.insert(scenes::endpoint_id(2), pod);
    view
}

#[test]
fn programs_report_start_and_end_of_a_flow_with_its_details() {
    let Some(mut rig) = Rig::of_size("events", &scene(), LOGGED) else { return };
    let directory = tempfile::tempdir().unwrap();
    let counts = Arc::default();
    let follower = follow(&rig, directory.path(), false, &counts);
    let mut told = 0;
    for (pod, server) in [(POD4, SERVER4), (POD6, SERVER6)] {
        let to = SocketAddr::new(addr(server), 443);
        let question = seal(ip(addr(pod), to.ip(), UDP, &[], &udp(40_000, 443, b"data")));
        let seen = send(&mut rig, &question);
        // A further packet of the flow causes no report.
        assert_eq!(send(&mut rig, &question), seen);
        let open = seal(ip(addr(pod), to.ip(), TCP, &[], &tcp(40_001, 443, 2, &[])));
        send(&mut rig, &open);
        rig.write(&inherited());
        let after = send(&mut rig, &question);
        // The log must be written before the tables lose the names.
        told += 4;
        while counts.written.load(Ordering::Relaxed) < told {
            std::thread::yield_now();
        }
        rig.write(&scene());
        let first = find(directory.path(), seen).flows.into_iter().map(|(_, flow)| flow).next().unwrap();
        assert_eq!((first.egress_ip, first.port, first.protocol), (seen.ip(), seen.port(), 17));
        assert_eq!((first.node.as_str(), first.destination), ("n0", Some(to)));
        assert_eq!(first.policy.as_deref(), Some("policy-0"));
        let name = scenes::endpoint_id(0).to_string();
        assert!(name.starts_with(&format!("{}/", first.pod)) && !first.pod.is_empty(), "{first:?}");
        assert!(first.ended.is_some(), "{first:?}");
        let next = find(directory.path(), after).flows;
        let heir = scenes::endpoint_id(2).to_string();
        let heirs: Vec<_> = next.iter().filter(|(_, flow)| heir.starts_with(&format!("{}/", flow.pod))).collect();
        assert!(heirs.len() == 1 && heirs[0].1.ended.is_none(), "{next:?}");
    }
    drop(follower);
    assert_eq!((counts.lost.load(Ordering::Relaxed), rig.count(Counter::FlowLogLost)), (0, 0));
}

#[test]
fn full_event_buffer_delays_no_packet_and_losses_are_logged() {
    let room = limits::FLOW_EVENTS_UNUSED as u32;
    let Some(mut rig) = Rig::of_size("events-full", &scene(), Sizes { flow_events: room, ..LOGGED }) else { return };
    let count = room / 50;
    for n in 0..count {
        let server = IpAddr::from(Ipv4Addr::from(0xcb00_7100 + n / 40));
        let question = udp(10_000 + (n % 40) as u16, 53, b"data");
        send(&mut rig, &seal(ip(addr(POD4), server, UDP, &[], &question)));
    }
    let lost = rig.count(Counter::FlowLogLost);
    assert!(lost > 0 && rig.count(Counter::FlowsCreated) == u64::from(count), "{lost}");
    let (directory, counts) = (tempfile::tempdir().unwrap(), Arc::default());
    // A new agent reads the buffer. It does not know how many reports were lost before it started.
    drop(follow(&rig, directory.path(), false, &counts));
    assert_eq!(counts.written.load(Ordering::Relaxed), u64::from(count) - lost);
    // The same agent does not read for a while.
    for n in 0..count {
        let server = IpAddr::from(Ipv4Addr::from(0xcb00_8100 + n / 40));
        let question = udp(10_000 + (n % 40) as u16, 53, b"data");
        send(&mut rig, &seal(ip(addr(POD4), server, UDP, &[], &question)));
    }
    let more = rig.count(Counter::FlowLogLost) - lost;
    drop(follow(&rig, directory.path(), true, &counts));
    let spans = find(directory.path(), SocketAddr::new(addr(EGRESS4), 0)).spans;
    let told: Vec<u64> = spans.iter().flat_map(|span| &span.lost).map(|(_, _, count)| *count).collect();
    assert!(more > 0 && told == [more], "{more}, {spans:?}");
    assert!(spans[0].started && !spans[1].started, "{spans:?}");
}

#[test]
fn disabled_flow_log_reports_nothing_and_shrinks_its_buffer() {
    let Some(dir) = BpfDir::new("events-modes") else { return };
    let load = |flow_events| Programs::load_lazily(&dir.pins, Sizes { max_flows: 256, flow_events }).unwrap();
    let size = || aya::maps::MapInfo::from_pin(dir.pins.map("FLOW_EVENTS")).unwrap().max_entries();
    for (events, kept, bytes) in [
        (0, false, limits::FLOW_EVENTS_UNUSED as u32),
        (limits::FLOW_EVENTS, false, limits::FLOW_EVENTS),
        (limits::FLOW_EVENTS, true, limits::FLOW_EVENTS),
        (0, false, limits::FLOW_EVENTS_UNUSED as u32),
    ] {
        assert_eq!((load(events).kept_events(), size()), (kept, bytes));
    }
    drop(dir);
    let Some(mut rig) = Rig::new("events-off", &scene()) else { return };
    send(&mut rig, &seal(ip(addr(POD4), addr(SERVER4), UDP, &[], &udp(40_000, 53, b"data"))));
    let (directory, counts) = (tempfile::tempdir().unwrap(), Arc::default());
    drop(follow(&rig, directory.path(), false, &counts));
    assert_eq!(counts.written.load(Ordering::Relaxed), 0);
    assert_eq!(rig.count(Counter::FlowLogLost), 0);
}
