//! BGP speakers from Debian's packages (FRR and BIRD) in namespaces of the lab.

use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::unistd::User;

use crate::command::output;
use crate::netns::NetNs;
use crate::topology::Lab;
use crate::wait::wait_for;

const FRR: &str = "/usr/lib/frr";
const START: Duration = Duration::from_secs(20);

/// Returns the reason why no BGP speaker can run here, if there is one.
pub fn obstacle() -> Option<&'static str> {
    let missing = |program: &str| Command::new(program).arg("--version").output().is_err();
    (missing("bird") || missing("vtysh")).then_some("FRR or BIRD is missing: apt-get install frr bird2")
}

/// A running FRR instance: zebra, bfdd and bgpd. They end with the lab.
#[derive(Debug)]
pub struct Frr {
    ns: NetNs,
    dir: PathBuf,
}

impl Frr {
    /// Starts FRR in a namespace, with a configuration in the format of `vtysh -f`.
    pub fn start(lab: &mut Lab, ns: &NetNs, config: &str) -> Result<Frr> {
        let dir = lab.dir().join(format!("frr-{}", ns.name()));
        fs::create_dir_all(&dir)?;
        let user = User::from_name("frr")?.context("the user frr does not exist: install the package frr")?;
        chown(&dir, Some(user.uid.as_raw()), Some(user.gid.as_raw()))?;
        let frr = Frr { ns: ns.clone(), dir };
        let empty = frr.dir.join("empty.conf");
        fs::write(&empty, "")?;
        for daemon in ["zebra", "bfdd", "bgpd"] {
            let mut command = ns.command(PathBuf::from(FRR).join(daemon));
            command.args(["-P", "0", "-f"]).arg(&empty).arg("--vty_socket").arg(&frr.dir);
            command.arg("-i").arg(frr.dir.join(format!("{daemon}.pid"))).arg("-z").arg(frr.dir.join("zserv"));
            if daemon == "bfdd" {
                command.arg("--bfdctl").arg(frr.dir.join("bfdd.sock"));
            }
            lab.start_program(&format!("{daemon}-{}", ns.name()), None, command)?;
            let socket = frr.dir.join(format!("{daemon}.vty"));
            wait_for(&format!("{daemon} listens"), START, || Ok(UnixStream::connect(&socket).is_ok()))?;
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

    /// Returns the output of a `vtysh` command.
    pub fn show(&self, command: &str) -> Result<String> {
        output(self.vtysh().arg("-c").arg(command))
    }
}

/// Starts BIRD in a namespace. It ends with the lab.
pub fn bird(lab: &mut Lab, ns: &NetNs, config: &str) -> Result<()> {
    let dir = lab.dir().join(format!("bird-{}", ns.name()));
    fs::create_dir_all(&dir)?;
    let (file, socket) = (dir.join("bird.conf"), dir.join("bird.ctl"));
    fs::write(&file, config)?;
    let mut command = ns.command("bird");
    command.arg("-f").arg("-c").arg(&file).arg("-s").arg(&socket);
    lab.start_program(&format!("bird-{}", ns.name()), None, command)?;
    wait_for("BIRD listens", START, || Ok(UnixStream::connect(&socket).is_ok()))
        .with_context(|| format!("BIRD's configuration\n{config}"))
}
