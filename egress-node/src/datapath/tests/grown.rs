//! An upgrade to programs with longer records: the test builds programs of a next version.

use super::{
    frames::{TCP, UDP, ip, ports, read, seal, tcp, udp},
    reused,
    rig::*,
};
use crate::datapath::load::{Programs, Sizes};
use aya::maps::{MapData, MapInfo};
use egress_common::{flow::Flow, verdict::Counter};
use std::{
    collections::BTreeMap,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::Command,
};

#[allow(dead_code, reason = "shared with xtask, which uses the rest")]
#[path = "../../../../xtask/src/toolchain.rs"]
mod toolchain;

const SYN: u8 = 2;
const ACK: u8 = 16;
/// Enough flows to need several calls to copy them.
const FLOWS: u16 = 10_000;

/// The changes of a developer who adds a field to [`Flow`].
const CHANGES: [(&str, &str, &str); 4] = [
    (
        "egress-common/src/flow.rs",
        "pub pending: u8,\n    } size 56",
        "pub pending: u8,\n        /// New.\n        pub new: u64,\n    } size 64",
    ),
    ("egress-common/src/flow.rs", "pub const EMPTY: Flow = Flow {", "pub const EMPTY: Flow = Flow {\n        new: 0,"),
    ("egress-ebpf/src/source/steer.rs", "let mut flow = Flow {", "let mut flow = Flow {\n        new: 0,"),
    ("egress-ebpf/src/source/deliver.rs", "let mut flow = Flow {", "let mut flow = Flow {\n        new: 0,"),
];

/// Builds the programs of the next version.
fn next() -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let copy = tempfile::tempdir().unwrap();
    for folder in ["egress-common", "egress-ebpf", "Cargo.lock"] {
        let status = Command::new("cp").arg("-r").arg(root.join(folder)).arg(copy.path()).status().unwrap();
        assert!(status.success());
    }
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let others =
        manifest.lines().filter(|line| !line.starts_with("members =") && !line.starts_with("default-members ="));
    let mut lines: Vec<&str> = others.collect();
    let workspace = lines.iter().position(|line| *line == "[workspace]").expect("a workspace");
    lines.insert(workspace + 1, r#"members = ["egress-common", "egress-ebpf"]"#);
    fs::write(copy.path().join("Cargo.toml"), lines.join("\n")).unwrap();
    for (file, from, to) in CHANGES {
        let path = copy.path().join(file);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{file} has no {from}");
        fs::write(&path, text.replace(from, to)).unwrap();
    }
    let toolchain = toolchain::Toolchain::find().unwrap_or_else(|missing| panic!("{missing}"));
    let mut build = toolchain.cargo("build");
    build.args(["--release", "--package", "egress-ebpf", "--bin", "spillway", "--offline"]).current_dir(copy.path());
    // In a copy of the target folder of this version's programs, all their dependencies are already compiled. In the folder itself, cargo
    // would take the changed crates for these.
    let target = copy.path().join("target");
    let status = Command::new("cp").args(["-a", env!("SPILLWAY_EBPF_TARGET")]).arg(&target).status();
    assert!(status.unwrap().success());
    let output = build.arg("--target-dir").arg(&target).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let built: PathBuf = [toolchain::BPF_TARGET, "release", "spillway"].iter().collect();
    fs::read(target.join(built)).unwrap()
}

fn opening(pod: &str, server: &str, port: u16) -> Vec<u8> {
    seal(ip(addr(pod), addr(server), TCP, &[], &tcp(port, 443, SYN, &[])))
}

/// Returns the number of IPv4 flows in the pinned table, whatever the type of its records.
fn flows(rig: &Rig) -> usize {
    let map = MapData::from_pin(rig.pins().map("FLOWS_V4")).unwrap();
    reused::keys(&map).unwrap().len()
}

/// Returns the address and the port that a packet of the pod leaves with.
fn leaves(rig: &mut Rig, frame: &[u8]) -> (IpAddr, u16) {
    let (verdict, out) = rig.run("pod_egress", frame);
    assert_eq!(verdict, REDIRECT);
    (read(&out).unwrap().src, ports(&out).0)
}

#[test]
fn an_upgrade_to_longer_records_keeps_every_flow_and_opens_none_in_old_tables() {
    let sizes = Sizes { max_flows: 4 * u32::from(FLOWS), ..Sizes::default() };
    let Some(mut rig) = Rig::of_size("grown", &scene(), sizes) else { return };
    // Built first, because building takes longer than a flow may be idle.
    let next = next();
    let mut before = BTreeMap::new();
    for (pod, server) in [(POD4, SERVER4), (POD6, SERVER6)] {
        let frame = opening(pod, server, 40_000);
        before.insert((pod, server), leaves(&mut rig, &frame));
    }
    for n in 0..FLOWS {
        let server = IpAddr::from([198, 51, (n >> 7) as u8, (n & 127) as u8]);
        rig.run("pod_egress", &seal(ip(addr(POD4), server, UDP, &[], &udp(50_000, 53, b"question"))));
    }
    let many = flows(&rig);
    assert!(many > usize::from(FLOWS) / 2, "{many} flows");

    // Another size has no effect while the maps exist.
    let next = Programs::load_from(&next, rig.pins(), Sizes { max_flows: 64, ..sizes }).unwrap();
    assert_eq!(MapInfo::from_pin(rig.pins().map("FLOWS_V4")).unwrap().value_size() as usize, size_of::<Flow>() + 8);
    assert_eq!(flows(&rig), many);
    let left = fs::read_dir(rig.pins().maps()).unwrap().filter_map(|e| e.unwrap().file_name().into_string().ok());
    assert_eq!(left.filter(|name| name.ends_with("-older")).collect::<Vec<_>>(), Vec::<String>::new());

    // The older programs are still attached: their flows continue, and they open no new flows.
    let established = |pod, server| seal(ip(addr(pod), addr(server), TCP, &[], &tcp(40_000, 443, ACK, &[])));
    for ((pod, server), was) in &before {
        assert_eq!(leaves(&mut rig, &established(pod, server)), *was);
        rig.dropped("pod_egress", &opening(pod, server, 40_001), Counter::DropNoPort);
    }

    rig.programs = next;
    for ((pod, server), was) in &before {
        assert_eq!(leaves(&mut rig, &established(pod, server)), *was);
        let (source, port) = leaves(&mut rig, &opening(pod, server, 40_001));
        assert_eq!(source, was.0);
        assert_ne!(port, was.1);
    }

    // A downgrade is refused, and the attempt changes nothing.
    let refused = Programs::load(rig.pins(), sizes).err().expect("refused").to_string();
    assert!(refused.contains("FLOWS_V4") && refused.contains("cleanup --release --bpffs"), "{refused}");
    assert!(flows(&rig) >= many);
}
