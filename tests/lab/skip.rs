//! Skips tests that cannot run, and records them.

use std::fs::File;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::Result;

use crate::scope::Scope;

/// Returns the reason why tests of the lab cannot run here: not root, or a program or kernel feature is missing.
pub fn obstacle() -> Option<String> {
    static FOUND: OnceLock<Option<String>> = OnceLock::new();
    FOUND.get_or_init(look).clone()
}

fn look() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("not root: network namespaces require root".to_owned());
    }
    for program in ["ip", "nft"] {
        let found = Command::new(program).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if found.is_err() {
            return Some(format!("{program} is missing: apt-get install iproute2 nftables"));
        }
    }
    let namespace = std::thread::spawn(|| nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)).join();
    if !matches!(namespace, Ok(Ok(()))) {
        return Some(
            "cannot create network namespaces here: the kernel lacks them, or CAP_SYS_ADMIN is missing".to_owned(),
        );
    }
    None
}

/// Returns the reason why this kernel's drivers cannot serve VLAN devices by XDP, if there is one.
pub fn vlan_xdp_obstacle() -> Result<Option<&'static str>> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split('.').map_while(|number| number.parse::<u32>().ok());
    if [numbers.next(), numbers.next()] < [Some(6), Some(3)] {
        return Ok(Some("this kernel does not report the XDP features of drivers: that needs Linux 6.3 or later"));
    }
    let mut scope = Scope::open()?;
    let ns = scope.namespace("vlans")?;
    let lines = ["link add card type veth peer name other", "link add link card name device type vlan id 1"];
    let made = ns.ip(&lines.map(str::to_owned));
    Ok(made.is_err().then_some("this kernel has no VLAN devices (8021q)"))
}

/// Records that `test` was skipped, in the file that SPILLWAY_SKIPS names (and on standard error).
pub fn record(test: &str, reason: &str) {
    let line = format!("SKIP {test}: {reason}\n");
    eprint!("{line}");
    if let Some(path) = std::env::var_os("SPILLWAY_SKIPS") {
        let file = File::options().create(true).append(true).open(&path);
        if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
            eprintln!("cannot record the skipped test in {}: {error}", path.display());
        }
    }
}

/// The return value of a skipped test.
pub trait Skipped {
    /// Returns the value of a test that did nothing.
    fn skipped() -> Self;
}

impl Skipped for () {
    fn skipped() {}
}

impl<E> Skipped for Result<(), E> {
    fn skipped() -> Result<(), E> {
        Ok(())
    }
}

/// Expands to the path of the calling function, for [`record`].
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        let name = std::any::type_name_of_val(&here);
        name.strip_suffix("::here").unwrap_or(name)
    }};
}

/// Returns from a test, recorded as skipped, unless it runs as root with all that the lab needs. For tests that need
/// this outside of [`Builder::run`](crate::Builder::run), which checks this itself.
#[macro_export]
macro_rules! require_root {
    () => {
        if let Some(reason) = $crate::skip::obstacle() {
            $crate::skip::record($crate::test_name!(), &reason);
            return $crate::skip::Skipped::skipped();
        }
    };
}

/// Returns from a test, recorded as skipped for `$reason`, unless `$condition` holds.
#[macro_export]
macro_rules! require {
    ($condition:expr, $($reason:tt)+) => {
        if !$condition {
            $crate::skip::record($crate::test_name!(), &format!($($reason)+));
            return $crate::skip::Skipped::skipped();
        }
    };
}
