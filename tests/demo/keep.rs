//! The lab that stays up: commands for looking around in it, and a server that tells callers their address.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result};
use lab::{Family, Lab};

use super::cluster::ECHO_PORT;
use super::screen::Screen;

/// Starts a process on the outside server that tells callers their address, and that outlives this process.
fn start_server(lab: &Lab, binaries: &Path) -> Result<()> {
    let mut command = lab.server("server1").ns.command(binaries.join("egressctl"));
    command.args(["connectivity", "serve", "--listen", &format!("[::]:{ECHO_PORT}")]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // A Ctrl-C at the terminal must not reach the server.
    command.process_group(0).spawn().context("cannot start the server that reports callers' addresses")?;
    Ok(())
}

/// Leaves the lab up and prints commands to use in it.
pub fn keep(lab: Lab, screen: &Screen, binaries: &Path) -> Result<()> {
    start_server(&lab, binaries)?;
    let hints = hints(&lab, binaries);
    lab.keep()?;
    screen.lines(&hints);
    Ok(())
}

fn hints(lab: &Lab, binaries: &Path) -> Vec<String> {
    let enter = |ns: &str| format!("nsenter --net=/run/netns/{ns}");
    let pod = lab.pod("web-1");
    let (node, pins) = (lab.node(&pod.node), lab.bpffs(&pod.node));
    let egressctl = |arguments: &str| {
        format!(
            "  {} {} {arguments} --bpffs {}",
            enter(node.ns.name()),
            binaries.join("egressctl").display(),
            pins.display()
        )
    };
    let target = lab.server("server1").ips.ip(Family::V4);
    let gateway = "gw1";
    let mut lines = vec![
        String::new(),
        format!("The lab {} is still up: its agents and its controller keep running. Look around in it:", lab.id()),
        String::new(),
        "ask the server several times which address it sees (each connection is a new flow):".to_owned(),
        format!("  {} bash -c 'cat </dev/tcp/{target}/{ECHO_PORT}'", enter(pod.ns.name())),
        format!("the state of Spillway on {}:", node.name),
        egressctl("policies"),
        egressctl("ips"),
        egressctl("flows"),
        egressctl(&format!("explain --pod {} --to {target}:{ECHO_PORT}/tcp", pod.key())),
        "the maps in the kernel, with field names:".to_owned(),
    ];
    lines.extend(flow_maps(&pins).iter().map(|map| format!("  bpftool map dump pinned {map} | head -40")));
    lines.extend([
        "edit a policy and see what changes; Spillway writes its objects to .spillway next to it:".to_owned(),
        format!("  ${{EDITOR:-vi}} {}", lab.manifests().dir().join("web-per-flow.yaml").display()),
        format!("  ls {}", lab.manifests().dir().join(".spillway/EgressIP").display()),
        format!("pull the cables of {gateway}, and plug them in again with `up`:"),
        format!(
            "  ip -n {0} link set {gateway} down; ip -n {1} link set {gateway} down",
            lab.underlay().name(),
            lab.external().name()
        ),
        "follow the logs:".to_owned(),
        format!("  tail -f {}", lab.dir().join("logs/*.log").display()),
        "remove it all:".to_owned(),
        "  cargo xtask demo --remove".to_owned(),
    ]);
    lines
}

/// Returns the pinned flow tables of a node.
fn flow_maps(pins: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![pins.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path
                .file_name()
                .is_some_and(|name| name.to_string_lossy().to_ascii_lowercase().starts_with("flows"))
            {
                found.push(path.display().to_string());
            }
        }
    }
    found.sort();
    found
}
