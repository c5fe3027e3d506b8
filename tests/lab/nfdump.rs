//! An IPFIX collector from Debian's package nfdump.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde_json::Value;

use crate::netns::NetNs;
use crate::process::Process;
use crate::topology::Lab;
use crate::wait::wait_for;

const NAME: &str = "nfcapd";
const START: Duration = Duration::from_secs(20);
/// The seconds after which a file is complete and can be read: the minimum of nfcapd.
const ROTATION: &str = "2";

/// Returns the reason why no collector can run here, if there is one.
pub fn obstacle() -> Option<&'static str> {
    Command::new(NAME).arg("-V").output().is_err().then_some("nfcapd is missing: apt-get install nfdump")
}

/// A running collector.
#[derive(Debug)]
pub struct Nfcapd {
    dir: PathBuf,
    process: Process,
}

impl Nfcapd {
    /// The address and port where it listens, in its namespace.
    pub const LISTENS: &str = "127.0.0.1:4739";

    /// Starts a collector in a namespace.
    pub fn start(lab: &Lab, ns: &NetNs) -> Result<Nfcapd> {
        let dir = lab.dir().join(format!("{NAME}-{}", ns.name()));
        fs::create_dir_all(&dir)?;
        let (host, port) = Self::LISTENS.split_once(':').unwrap_or_default();
        let mut command = ns.command(NAME);
        command.arg("-w").arg(&dir).args(["-b", host, "-p", port, "-t", ROTATION]);
        let process = Process::start(NAME, None, command, &lab.dir().join("logs"))?;
        wait_for("nfcapd listens", START, || Ok(process.log().contains("Startup nfcapd")))?;
        Ok(Nfcapd { dir, process })
    }

    /// Returns the records that `nfdump` prints from all complete files.
    pub fn records(&self) -> Result<Vec<Value>> {
        let output = Command::new("nfdump").arg("-R").arg(&self.dir).args(["-q", "-o", "json"]).output()?;
        // nfdump fails while there is no file. Without a summary (-q), its output is a list without brackets.
        Ok(serde_json::from_str(&format!("[{}]", String::from_utf8_lossy(&output.stdout))).unwrap_or_default())
    }

    /// Returns its log.
    pub fn log(&self) -> String {
        self.process.log()
    }
}
