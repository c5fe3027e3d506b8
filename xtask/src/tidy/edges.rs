//! Which module may name what: the pure modules stay pure, and the adapters do not know each other.

use std::path::{Component, Path as FilePath};

use super::Finding;
use super::files::Tree;
use super::source::Path;

/// The folder whose modules have rules.
const SOURCES: &str = "egress-daemon/src";

/// Modules that compute and do nothing else.
const PURE: [&str; 5] = ["health", "model", "plan", "snapshot", "translate"];
const NOT_PURE: [&str; 29] = [
    "aya",
    "axum",
    "crate::agent",
    "crate::controller",
    "crate::datapath",
    "crate::host",
    "crate::observe",
    "crate::store",
    "kube::Api",
    "kube::Client",
    "kube::Config",
    "kube::api::Api",
    "kube::client",
    "kube::config",
    "kube::runtime",
    "libc",
    "netlink_packet_route",
    "nix",
    "rtnetlink",
    "std::env",
    "std::fs",
    "std::net::TcpListener",
    "std::net::TcpStream",
    "std::net::UdpSocket",
    "std::process",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
    "tokio",
];

/// Modules that each adapt one thing outside, and meet only in the agent and the controller.
const ADAPTERS: [&str; 3] = ["datapath", "host", "store"];

/// Checks every file of the daemon.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (file, source) in &tree.rust {
        let Ok(inside) = file.strip_prefix(SOURCES) else { continue };
        let module = module_path(inside);
        let Some(top) = module.first().map(String::as_str) else { continue };
        // Tests against the real kernel join what the modules keep apart: they are shells of their own.
        if module.get(1).is_some_and(|m| m == "tests") && !PURE.contains(&top) {
            continue;
        }
        for path in source.paths() {
            if let Some(message) = broken(top, &absolute(&path, &module)) {
                findings.push(Finding { path: file.clone(), line: path.line, message });
            }
        }
    }
    findings
}

/// Why a module may not name a path.
fn broken(module: &str, path: &Path) -> Option<String> {
    if PURE.contains(&module) {
        let forbidden = NOT_PURE.iter().find(|forbidden| reaches(path, forbidden))?;
        return Some(format!("`{module}` is pure (no I/O, no clock, no kernel) and must not name {forbidden}"));
    }
    let other = ADAPTERS.iter().find(|other| **other != module && reaches(path, &format!("crate::{other}")))?;
    ADAPTERS
        .contains(&module)
        .then(|| format!("`{module}` and `{other}` must not know each other: use a trait in domain words"))
}

/// Whether a path names something at or below `forbidden`. An import of a module brings in all that is below it.
fn reaches(path: &Path, forbidden: &str) -> bool {
    let mut forbidden_segments = forbidden.split("::");
    let mut segments = path.segments.iter();
    loop {
        match (segments.next(), forbidden_segments.next()) {
            (_, None) => return true,
            (None, Some(_)) => return path.imported && path.segments.len() > 1,
            (Some(segment), Some(wanted)) if segment == wanted => {}
            _ => return false,
        }
    }
}

/// `plan/ports.rs` -> [plan, ports]; crate roots and binaries -> [].
fn module_path(file: &FilePath) -> Vec<String> {
    let names = file.with_extension("").components().filter_map(name).collect::<Vec<_>>();
    match names.first().map(String::as_str) {
        Some("bin" | "main" | "lib") => Vec::new(),
        _ => names.into_iter().filter(|name| name != "mod").collect(),
    }
}

fn name(component: Component<'_>) -> Option<String> {
    component.as_os_str().to_str().map(ToOwned::to_owned)
}

/// Replaces leading `self` and `super` by the module's own path. A path within the block of an inline module counts as
/// one of the file's own module.
fn absolute(path: &Path, module: &[String]) -> Path {
    let mut base = module.to_vec();
    let mut relative = false;
    let mut rest = path.segments.as_slice();
    while let Some((first, behind)) = rest.split_first() {
        match first.as_str() {
            "self" => {}
            "super" => drop(base.pop()),
            _ => break,
        }
        (relative, rest) = (true, behind);
    }
    if !relative {
        return path.clone();
    }
    let segments = std::iter::once("crate".to_owned()).chain(base).chain(rest.iter().cloned()).collect();
    Path { segments, ..path.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(file: &str, text: &str) -> Vec<usize> {
        check(&Tree::of(&[(file, text)])).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn pure_modules_do_no_io_and_read_no_clock() {
        let text = "use std::time::Duration;\nuse std::time::{Duration, Instant};\nuse std::{fs, net::IpAddr};\n\
                    use kube::{core::Selector, Client};\nfn f() { std::time::SystemTime::now(); }\nuse std::time;\n\
                    use tokio::sync::mpsc;\nuse super::super::host::links;\nuse crate::model;\nuse kube::CustomResource;";
        assert_eq!(lines("egress-daemon/src/plan/ports.rs", text), [2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(lines("egress-daemon/src/health.rs", text), [2, 3, 4, 5, 6, 7, 8]);
        assert!(lines("egress-daemon/src/agent/run.rs", text).is_empty());
        assert!(lines("tests/plan/ports.rs", text).is_empty());
    }

    #[test]
    fn adapters_do_not_know_each_other() {
        let text = "use crate::{host::Links, model};\nuse super::maps;\nfn f() { crate::store::open() }";
        assert_eq!(lines("egress-daemon/src/datapath/load.rs", text), [1, 3]);
        assert_eq!(lines("egress-daemon/src/host/mod.rs", text), [3]);
        assert!(lines("egress-daemon/src/main.rs", text).is_empty());
    }
}
