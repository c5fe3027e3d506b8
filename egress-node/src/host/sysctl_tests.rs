//! Settings in a tree of files, including a tree that cannot be written.

use super::*;
use crate::host::testing::in_netns;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

struct Tree(tempfile::TempDir);

impl Tree {
    fn new(files: &[(&str, &str)]) -> Tree {
        let tree = Tree(tempfile::tempdir().unwrap());
        for (key, value) in files {
            let path = tree.path(key);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{value}\n")).unwrap();
        }
        tree
    }

    fn path(&self, key: &str) -> PathBuf {
        self.0.path().join("sys").join(key)
    }

    fn get(&self, key: &str) -> String {
        read_below(&self.0.path().join("sys"), key).unwrap().unwrap()
    }

    fn journal(&self) -> PathBuf {
        self.0.path().join("run/spillway/sysctl.json")
    }

    fn open(&self) -> Sysctls {
        Sysctls::below(self.0.path().join("sys"), self.journal()).unwrap()
    }
}

fn node() -> Tree {
    Tree::new(&[
        ("net/ipv4/ip_forward", "0"),
        ("net/ipv6/conf/all/forwarding", "0"),
        ("net/ipv6/conf/eth0/accept_ra", "1"),
        ("net/ipv6/conf/eth1/accept_ra", "0"),
    ])
}

#[test]
fn a_later_process_restores_changed_sysctls() {
    let node = node();
    let settings = forwarding_settings(["eth0", "eth1"]);
    assert_eq!(node.open().apply(&settings).unwrap(), []);
    assert_eq!(node.get("net/ipv4/ip_forward"), "1");
    assert_eq!(node.get("net/ipv6/conf/eth0/accept_ra"), "2");
    assert_eq!(node.get("net/ipv6/conf/eth1/accept_ra"), "0");
    // A restarted agent finds every setting as needed, and must not take its own values for the previous ones.
    node.open().apply(&settings).unwrap();
    let mut later = node.open();
    assert_eq!(later.changed()["net/ipv4/ip_forward"], Changed { previous: "0".into(), set: "1".into() });
    assert_eq!(later.restore().unwrap(), []);
    assert_eq!(node.get("net/ipv4/ip_forward"), "0");
    assert_eq!(node.get("net/ipv6/conf/all/forwarding"), "0");
    assert_eq!(node.get("net/ipv6/conf/eth0/accept_ra"), "1");
    assert!(!node.journal().exists());
}

#[test]
fn the_value_before_the_first_change_is_restored() {
    let node = node();
    node.open().apply(&forwarding_settings([])).unwrap();
    fs::write(node.path("net/ipv4/ip_forward"), "7").unwrap();
    node.open().apply(&forwarding_settings([])).unwrap();
    node.open().restore().unwrap();
    assert_eq!(node.get("net/ipv4/ip_forward"), "0");
}

#[test]
fn sysctls_changed_by_others_since_are_left_alone() {
    let node = node();
    node.open().apply(&forwarding_settings([])).unwrap();
    fs::write(node.path("net/ipv4/ip_forward"), "7").unwrap();
    node.open().restore().unwrap();
    assert_eq!(node.get("net/ipv4/ip_forward"), "7");
}

#[test]
fn a_setting_that_cannot_be_read_stays_in_the_journal() {
    let node = node();
    node.open().apply(&forwarding_settings([])).unwrap();
    let path = node.path("net/ipv4/ip_forward");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let mut sysctls = node.open();
    let warnings = sysctls.restore().unwrap();
    assert!(matches!(&warnings[..], [one] if one.object == "net/ipv4/ip_forward"), "{warnings:?}");
    assert!(warnings[0].remedy.contains("sysctl -w net/ipv4/ip_forward=0"), "{}", warnings[0]);
    assert!(sysctls.changed().contains_key("net/ipv4/ip_forward") && node.journal().exists());
    // A setting of a device that is gone needs no restoration.
    fs::remove_dir(&path).unwrap();
    assert_eq!(node.open().restore().unwrap(), []);
    assert!(!node.journal().exists());
}

#[test]
fn a_kernel_without_ipv6_needs_no_ipv6_settings() {
    let node = Tree::new(&[("net/ipv4/ip_forward", "0")]);
    assert_eq!(node.open().apply(&forwarding_settings(["eth0"])).unwrap(), []);
    assert_eq!(node.get("net/ipv4/ip_forward"), "1");
    let nothing = Tree::new(&[]);
    let warnings = nothing.open().apply(&forwarding_settings([])).unwrap();
    assert_eq!(warnings.iter().map(|warning| warning.object.as_str()).collect::<Vec<_>>(), ["net/ipv4/ip_forward"]);
}

#[test]
fn a_damaged_journal_is_named() {
    let node = node();
    fs::create_dir_all(node.journal().parent().unwrap()).unwrap();
    fs::write(node.journal(), "{").unwrap();
    let error = Sysctls::below(PathBuf::new(), node.journal()).unwrap_err().to_string();
    assert!(error.contains(&node.journal().display().to_string()), "{error}");
}

#[test]
fn read_only_sysctls_give_warnings_and_no_journal() {
    in_netns("read_only_sysctls_give_warnings_and_no_journal", async || {
        let node = node();
        let tree = node.0.path().join("sys");
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        mount(Some(&tree), &tree, none, MsFlags::MS_BIND, none).unwrap();
        mount(none, &tree, none, MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, none).unwrap();
        let mut sysctls = node.open();
        let warnings = sysctls.apply(&forwarding_settings([])).unwrap();
        assert_eq!(warnings.len(), 2);
        assert!(warnings[0].remedy.contains("sysctl -w net/ipv4/ip_forward=1"), "{}", warnings[0]);
        assert!(sysctls.changed().is_empty() && !node.journal().exists());
    });
}
