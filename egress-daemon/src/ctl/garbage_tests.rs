//! Pinned maps of the right shape but with arbitrary bytes, as another program, a bug or another version could leave them. The agent,
//! `egressctl` and the programs must not panic, and the agent must repair the maps that it writes.

use super::{self as ctl, Command, NodeAccess, Output, explain::Question};
use aya::{
    maps::{MapData, MapInfo, MapType},
    programs::{TestRun as _, TestRunOptions},
};
use egress_core::encode::Encoder;
use egress_node::datapath::{
    load::{Programs, Sizes},
    maps::Maps,
    testing::{
        BPF_MAP_UPDATE_ELEM, BpfDir, bpf,
        frames::{TCP, UDP, ip, seal, tcp, udp},
        rig::*,
    },
    write::MapWriter,
};
use std::{
    fs,
    os::fd::{AsFd as _, AsRawFd as _},
};

/// The number of entries to try to write to each map.
const ENTRIES: u32 = 40;
/// Maps to skip: they contain kernel objects, or only programs write them.
const LEFT_ALONE: [&str; 3] = ["COLLECTOR", "SEARCH_V4", "SEARCH_V6"];

/// A reproducible sequence of bytes (xorshift).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn bytes(&mut self, len: u32) -> Vec<u8> {
        // Small numbers find more bugs than large ones: they are almost valid indices.
        let mask = [0xff, 0x07, 0x01][(self.next() % 3) as usize];
        (0..len).map(|_| self.next() as u8 & mask).collect()
    }
}

/// Fills every map except `without` with noise. Returns the number of entries that the kernel accepted.
fn fill(dir: &BpfDir, noise: &mut Noise, without: &str) -> usize {
    let mut taken = 0;
    let mut names: Vec<_> = fs::read_dir(dir.pins.maps()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    for name in
        names.iter().map(|name| name.to_str().unwrap()).filter(|name| !LEFT_ALONE.contains(name) && *name != without)
    {
        let info = MapInfo::from_pin(dir.pins.map(name)).unwrap();
        let map = MapData::from_pin(dir.pins.map(name)).unwrap();
        let (kind, per_cpu) = (info.map_type().unwrap(), 64);
        for _ in 0..ENTRIES {
            let mut key = noise.bytes(info.key_size());
            match kind {
                MapType::Array | MapType::PerCpuArray => {
                    key = ((noise.next() % u64::from(info.max_entries())) as u32).to_ne_bytes().into();
                }
                MapType::LpmTrie => {
                    let longest = (info.key_size() - 4) * 8;
                    key[..4].copy_from_slice(&((noise.next() % u64::from(longest + 1)) as u32).to_ne_bytes());
                }
                _ => {}
            }
            // Long enough for a per-CPU map, which takes one value for each CPU.
            let value = noise.bytes(info.value_size().next_multiple_of(8) * per_cpu);
            let key = if key.is_empty() { 0 } else { key.as_ptr() as u64 };
            let fd = map.fd().as_fd().as_raw_fd() as u64;
            taken += usize::from(bpf(BPF_MAP_UPDATE_ELEM, &[fd, key, value.as_ptr() as u64, 0]).is_ok());
        }
    }
    taken
}

#[test]
fn tools_programs_and_agent_survive_arbitrary_map_contents() {
    // The agent stops at a policy whose table lies outside the map; without policies it gets further.
    for (seed, without) in [(1, ""), (0x5eed_5eed, "POLICIES"), (0x0123_4567_89ab_cdef, "POLICIES")] {
        let Some(dir) = BpfDir::new(&format!("garbage-{seed}")) else { return };
        let mut programs = Programs::load_lazily(&dir.pins, Sizes { max_flows: 256, ..Sizes::default() }).unwrap();
        let taken = fill(&dir, &mut Noise(seed), without);
        assert!(taken > 500, "the kernel took only {taken} entries");

        let (root, none) = (dir.pins.root().to_path_buf(), dir.pins.root().join("no-socket"));
        let access = NodeAccess { bpffs: root, socket: none, node: None };
        let question = Question::new(POD4, "203.0.113.5:443/tcp".parse().unwrap(), None);
        let commands = [
            Command::Policies,
            Command::Gateways,
            Command::Ips,
            Command::Endpoints,
            Command::Flows(Default::default()),
            Command::Blocks,
            Command::Stats,
            Command::State,
            Command::Explain(question),
        ];
        for command in &commands {
            for output in [Output::Table, Output::Json, Output::Yaml] {
                // An error is an acceptable answer.
                let _ = ctl::run(command, &access, output);
            }
        }

        for (src, dst) in [(POD4, SERVER4), (POD6, SERVER6), (SERVER4, EGRESS4), (SERVER6, EGRESS6)] {
            for frame in [
                seal(ip(addr(src), addr(dst), TCP, &[], &tcp(40_000, 443, 2, &[]))),
                seal(ip(addr(src), addr(dst), UDP, &[], &udp(40_000, 443, b"data"))),
            ] {
                for program in ["pod_egress", "pod_ingress", "uplink_ingress", "tunnel_ingress"] {
                    let options = TestRunOptions { data_in: Some(&frame), ..Default::default() };
                    let result = programs.get(program).unwrap().test_run(options).unwrap();
                    assert!([NEXT, SHOT, REDIRECT].contains(&(result.return_value as i32)), "{program}");
                }
            }
        }

        let mut writer = match MapWriter::open(Maps::open(&dir.pins).unwrap()) {
            Ok(writer) => writer,
            Err(error) => {
                assert!(without.is_empty() && error.to_string().contains("MAGLEV"), "{error}");
                continue;
            }
        };
        let mut encoder = Encoder::recover(writer.present());
        match encoder.encode(&scene(), writer.present()) {
            Ok(tables) => {
                writer.write(tables.clone()).unwrap();
                let config = writer.present().config;
                assert_eq!(*writer.present(), egress_core::encode::tables::Tables { config, ..tables });
            }
            Err(full) => assert!(!full.to_string().is_empty()),
        }
    }
}
