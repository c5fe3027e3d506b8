//! Loading: over existing pins, over foreign directories, and with no more rights than the DaemonSet gives.

use super::BpfDir;
use crate::datapath::{
    Pins,
    attach::{self, Attacher},
    load::{NATIVE, PROGRAMS, Programs, Sizes},
    strangers::{self, Lookout},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::process::CommandExt as _,
    process::Command,
};

#[test]
fn programs_load_twice_over_the_same_maps() {
    let Some(dir) = BpfDir::new("load") else { return };
    for _ in 0..2 {
        if let Err(e) = Programs::load(&dir.pins, Sizes { max_flows: 1024, ..Sizes::default() }) {
            panic!("{e}: {e:?}");
        }
    }
}

#[test]
fn a_directory_on_another_file_system_is_refused_with_a_remedy_and_not_made() {
    let elsewhere = tempfile::tempdir().unwrap();
    // If nothing is mounted at /sys/fs/bpf, that directory is in sysfs, which allows no new directories.
    for dir in [elsewhere.path().join("spillway"), "/sys/kernel/spillway".into()] {
        let Err(error) = Programs::load(&Pins::new(&dir), Sizes::default()) else { panic!("loaded below {dir:?}") };
        assert!(error.to_string().contains("mount -t bpf"), "{error}");
        assert!(!dir.exists());
    }
}

#[test]
fn maps_of_another_version_are_refused_with_a_remedy() {
    let Some(dir) = BpfDir::new("version") else { return };
    fs::create_dir_all(dir.pins.root().join("v999")).unwrap();
    let error = Programs::load(&dir.pins, Sizes::default()).err().expect("refused").to_string();
    assert!(error.contains("v999") && error.contains("cleanup --release --bpffs"), "{error}");
}

/// Set in the process that has dropped all other capabilities.
const MARKER: &str = "SPILLWAY_TEST_FEW_RIGHTS";
/// Capabilities by name and number (linux/capability.h).
const CAPABILITIES: [(&str, u64); 4] = [("BPF", 39), ("NET_ADMIN", 12), ("NET_RAW", 13), ("PERFMON", 38)];
/// The agent's manifest on a cluster.
const MANIFEST: &str = include_str!("../../../../manifests/base/agent.yaml");

/// Returns the numbers of the capabilities that the DaemonSet's container has.
fn rights() -> Vec<u64> {
    let list = MANIFEST.split("add: [").nth(1).and_then(|rest| rest.split(']').next()).expect("capabilities");
    let number = |name: &str| CAPABILITIES.iter().find(|(known, _)| *known == name).expect("a capability by name").1;
    list.split(", ").map(number).collect()
}

/// The last capability of Linux 6.18 (CAP_CHECKPOINT_RESTORE).
const LAST: u64 = 40;

#[test]
fn few_capabilities_suffice() {
    let name = "datapath::tests::load::few_capabilities_suffice";
    if std::env::var_os(MARKER).is_some() {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:")).unwrap().trim();
        let mine = rights().iter().fold(0u64, |all, c| all | 1 << c);
        assert_eq!(u64::from_str_radix(effective, 16).unwrap(), mine);
        attached_programs_are_known();
        return load_and_tell();
    }
    if BpfDir::new("rights").is_none() {
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture"]).env(MARKER, "1");
    let rights = rights();
    let drop_rights = move || {
        // A network namespace whose interfaces the process can attach to.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
        for capability in (0..=LAST).filter(|c| !rights.contains(c)) {
            // SAFETY: PR_CAPBSET_DROP takes one number. The next exec drops capabilities outside the bounding set.
            if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0
                && std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL)
            {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: only system calls between fork and exec.
    unsafe { child.pre_exec(drop_rights) };
    let output = child.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
    assert!(text.contains("verified instructions"), "{text}");
    text.lines().filter(|l| l.contains("verified instructions")).for_each(|l| println!("{l}"));
}

/// Checks that listing the programs at a hook needs no capability that the agent lacks.
fn attached_programs_are_known() {
    const LOOPBACK: u32 = 1;
    let dir = BpfDir::new("few-rights-hooks").unwrap();
    let mut programs = Programs::load(&dir.pins, Sizes { max_flows: 64, ..Sizes::default() }).unwrap();
    let own = programs.get("pod_egress").unwrap().info().unwrap().id();
    let mut attacher = Attacher::new(programs, dir.pins.clone(), attach::mode());
    let (hook, live) = (("pod_egress", LOOPBACK), BTreeMap::from([(LOOPBACK, "lo".to_owned())]));
    let errors = attacher.sync(&[(hook, "lo".to_owned())].into(), &live, true);
    assert!(errors.is_empty(), "{errors:?}");
    assert_eq!(Lookout::default().look(&live, &attacher.programs(), true), None);
    let somebodys = strangers::at(LOOPBACK, "lo", false, &BTreeSet::new()).unwrap();
    assert_eq!(somebodys.iter().map(|one| one.program).collect::<Vec<_>>(), [Some(own)]);
}

/// Names the file for the verifier's counts, which `cargo xtask test` reads.
const COUNTS: &str = "SPILLWAY_VERIFIED";

fn load_and_tell() {
    let dir = BpfDir::new("few-rights").unwrap();
    let mut programs = match Programs::load(&dir.pins, Sizes { max_flows: 1024, ..Sizes::default() }) {
        Ok(programs) => programs,
        Err(e) => panic!("{e}: {e:?}"),
    };
    let native = NATIVE.map(|name| (name, programs.native(name).unwrap().info().unwrap()));
    let others = PROGRAMS.map(|name| (name, programs.get(name).unwrap().info().unwrap()));
    for (name, info) in others.into_iter().chain(native) {
        let count = info.verified_instruction_count().unwrap();
        println!("{name}: {count} verified instructions");
        if let Some(path) = std::env::var_os(COUNTS) {
            let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
            writeln!(file, "VERIFIED {name} {count}").unwrap();
        }
    }
}
