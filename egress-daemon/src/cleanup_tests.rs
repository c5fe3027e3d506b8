//! Tests of the cleanup: what it reports, what it leaves alone, and that nothing remains on a real kernel.

use super::*;
use egress_node::datapath::{
    attach::{Attacher, Hook, Mode},
    load::{Programs, Sizes},
};

#[test]
fn cleanup_does_not_report_missing_objects() {
    let mut report = CleanupReport::default();
    assert_eq!(report.to_string(), "there was nothing to remove\n");
    report.note("pin a", Err(io::ErrorKind::NotFound.into()));
    assert_eq!(report, CleanupReport::default());
    report.note("pin b", Ok(()));
    report.note("pin c", Err(io::ErrorKind::PermissionDenied.into()));
    assert_eq!(report.to_string(), "removed pin b\nFAILED  pin c: permission denied\n");
}

#[test]
fn only_directories_of_layout_versions_are_touched() {
    let dir = tempfile::tempdir().unwrap();
    for path in ["v1/maps", "v1/links", "v22", "other/v1", "vx"] {
        fs::create_dir_all(dir.path().join(path)).unwrap();
    }
    fs::write(dir.path().join("v1/maps/A"), "").unwrap();
    fs::write(dir.path().join("foreign"), "").unwrap();
    let before = Inventory { pins: inventory::pins(dir.path()).unwrap(), ..Inventory::default() };
    let mut report = CleanupReport::default();
    remove_pins(&before, &mut report);
    assert_eq!((report.removed.len(), report.failed.as_slice()), (5, &[] as &[String]), "{report}");
    assert!(report.to_string().contains("removed 1 pins in "), "{report}");
    let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["foreign", "other", "vx"]);
}

#[test]
fn cleanup_removes_an_empty_pin_directory() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("spillway");
    fs::create_dir_all(root.join("v1/maps")).unwrap();
    let before = Inventory { pins: inventory::pins(&root).unwrap(), ..Inventory::default() };
    let mut report = CleanupReport::default();
    remove_pins(&before, &mut report);
    assert!(!root.exists() && report.failed.is_empty(), "{report}");
    assert_eq!(inventory::pins(&root).unwrap(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn selected_pods_are_named_until_their_interfaces_are_gone() {
    let mut dump = Dump::default();
    for (id, class, ifindex) in [(1, 1, 7), (2, 0, 7), (3, 1, 8), (4, 1, 0)] {
        let endpoint = Endpoint { id, class, ifindex, history_until: 0, namespace: 0, check: 0 };
        dump.tables.v4.endpoints.insert([id], endpoint);
        dump.tables.v6.endpoints.insert([0, 0, 0, id], endpoint);
    }
    assert_eq!(selected(&dump, |ifindex| ifindex == 7).collect::<Vec<_>>(), ["#1", "#4"]);
}

/// Loads and attaches the programs in a separate network namespace, as an agent does, and cleans up afterwards.
fn made_and_removed(test: &'static str, mode: Mode, programs: &'static [(&'static str, &'static str)]) {
    if !nix::unistd::geteuid().is_root() || !inventory::on_bpffs(Path::new("/sys/fs/bpf")) {
        egress_node::testing::skip(test, "root and a BPF file system at /sys/fs/bpf");
        return;
    }
    let outcome = std::thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let bpffs = format!("/sys/fs/bpf/spillway-{test}-{}", std::process::id());
            let bpffs = Path::new(&bpffs);
            let pins = Pins::new(bpffs);
            let hooks: BTreeMap<Hook, String> =
                programs.iter().map(|(name, _)| ((*name, 1), "lo".to_owned())).collect();
            {
                let loaded = Programs::load(&pins, Sizes { max_flows: 1024, ..Sizes::default() }).unwrap();
                let errors =
                    Attacher::new(loaded, pins.clone(), mode).sync(&hooks, &[(1, "lo".to_owned())].into(), true);
                assert!(errors.is_empty(), "{errors:?}");
            }
            let made = inventory::take(&pins).await.unwrap();
            let attached: Vec<String> = made
                .programs
                .iter()
                .flat_map(|p| p.attached.iter().map(|hook| format!("{} {} {}", p.name, hook.direction, hook.mode)))
                .collect();
            let expected: Vec<String> =
                programs.iter().map(|(name, direction)| format!("{name} {direction} {mode}")).collect();
            assert_eq!(attached, expected);
            assert!(made.maps.iter().all(|map| map.memory_bytes.is_some()) && made.maps.len() > 20);

            let lock = RunFiles::of(bpffs).acquire().unwrap();
            let refused = run(bpffs, Options::default()).await.unwrap_err().to_string();
            assert!(refused.contains("--force"), "{refused}");
            drop(lock);

            let report = run(bpffs, Options::default()).await.unwrap();
            assert_eq!(report.failed, Vec::<String>::new());
            assert!(report.removed.contains(&format!("pod_egress at lo ingress ({mode})")), "{report}");
            assert!(!bpffs.exists());
            assert!(!RunFiles::of(bpffs).lock().exists());
            assert_eq!(inventory::take(&pins).await.unwrap(), Inventory::default());

            // No process can set this key, so its restoration fails.
            let journal = RunFiles::of(bpffs).sysctls();
            fs::write(&journal, r#"{"kernel/ostype": {"previous": "other", "set": "Linux"}}"#).unwrap();
            for _ in 0..2 {
                let CleanupReport { removed, failed } = run(bpffs, Options::default()).await.unwrap();
                assert_eq!(removed, Vec::<String>::new());
                assert!(matches!(&failed[..], [one] if one.contains("kernel/ostype")), "{failed:?}");
            }
            fs::remove_file(journal).unwrap();
            assert_eq!(run(bpffs, Options::default()).await.unwrap(), CleanupReport::default());
        });
    })
    .join();
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn everything_at_tcx_hooks_is_removed() {
    if attach::mode() == Mode::Tcx {
        let programs = &[("pod_egress", "ingress"), ("pod_ingress", "egress")];
        made_and_removed("everything_at_tcx_hooks_is_removed", Mode::Tcx, programs);
    }
}

#[test]
fn everything_at_clsact_hooks_is_removed() {
    made_and_removed("everything_at_clsact_hooks_is_removed", Mode::Clsact, &[("pod_egress", "ingress")]);
}
