//! BGP speakers of Debian's packages, FRR and BIRD, in namespaces of the lab.

use std::fs;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User};

use crate::command::{feed, output};
use crate::netns::NetNs;
use crate::topology::Lab;
use crate::wait::wait_for;

const FRR: &str = "/usr/lib/frr";
const START: Duration = Duration::from_secs(20);

/// Why no BGP speaker can run here, if so.
pub fn obstacle() -> Option<&'static str> {
    let missing = |program: &str| Command::new(program).arg("--version").output().is_err();
    (missing("bird") || missing("vtysh")).then_some("FRR or BIRD is missing: apt-get install frr bird2")
}

/// A program that has left its parent, and the file with its process id. Killed when dropped.
#[derive(Debug)]
pub struct Daemon(PathBuf);

impl Drop for Daemon {
    fn drop(&mut self) {
        let pid = fs::read_to_string(&self.0).ok().and_then(|text| text.trim().parse().ok());
        if let Some(pid) = pid {
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
    }
}

/// A running FRR: zebra, bfdd and bgpd. They end when it is dropped.
#[derive(Debug)]
pub struct Frr {
    ns: NetNs,
    dir: PathBuf,
    daemons: Vec<Daemon>,
}

impl Frr {
    /// Starts it in a namespace, with a configuration as `vtysh` reads it.
    pub fn start(lab: &Lab, ns: &NetNs, config: &str) -> Result<Frr> {
        let dir = lab.dir().join(format!("frr-{}", ns.name()));
        fs::create_dir_all(&dir)?;
        let user = User::from_name("frr")?.context("FRR's package has made no user frr")?;
        chown(&dir, Some(user.uid.as_raw()), Some(user.gid.as_raw()))?;
        let mut frr = Frr { ns: ns.clone(), dir, daemons: Vec::new() };
        let empty = frr.dir.join("empty.conf");
        fs::write(&empty, "")?;
        for daemon in ["zebra", "bfdd", "bgpd"] {
            let mut command = ns.command(PathBuf::from(FRR).join(daemon));
            command.args(["-d", "-P", "0", "-f"]).arg(&empty).arg("--vty_socket").arg(&frr.dir);
            let pid = frr.dir.join(format!("{daemon}.pid"));
            command.arg("-i").arg(&pid).arg("-z").arg(frr.dir.join("zserv"));
            if daemon == "bfdd" {
                command.arg("--bfdctl").arg(frr.dir.join("bfdd.sock"));
            }
            output(&mut command)?;
            frr.daemons.push(Daemon(pid));
        }
        let whole = frr.dir.join("frr.conf");
        fs::write(&whole, config)?;
        output(frr.vtysh().arg("-f").arg(&whole)).with_context(|| format!("FRR's configuration\n{config}"))?;
        Ok(frr)
    }

    fn vtysh(&self) -> Command {
        let mut command = self.ns.command("vtysh");
        command.arg("--vty_socket").arg(&self.dir);
        command
    }

    /// The output of a command of `vtysh`.
    pub fn show(&self, command: &str) -> Result<String> {
        output(self.vtysh().arg("-c").arg(command))
    }
}

/// Starts BIRD in a namespace. It ends when the returned value is dropped.
pub fn bird(lab: &Lab, ns: &NetNs, config: &str) -> Result<Daemon> {
    let dir = lab.dir().join(format!("bird-{}", ns.name()));
    fs::create_dir_all(&dir)?;
    let (file, socket, pid) = (dir.join("bird.conf"), dir.join("bird.ctl"), dir.join("bird.pid"));
    fs::write(&file, config)?;
    output(ns.command("bird").arg("-c").arg(&file).arg("-s").arg(&socket).arg("-P").arg(&pid))
        .with_context(|| format!("BIRD's configuration\n{config}"))?;
    let bird = Daemon(pid);
    wait_for("BIRD listens", START, || {
        Ok(feed(ns.command("birdc").arg("-s").arg(&socket).arg("show status"), "").is_ok())
    })?;
    Ok(bird)
}
