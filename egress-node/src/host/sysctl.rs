//! Reads, sets and restores the kernel settings that the datapath needs.
//!
//! A setting of our own device is removed with the device. Every other setting is recorded in a journal with its previous value before it
//! is changed, so that `cleanup` can restore it long after the agent has ended.
//!
//! The needed settings, and the reasons:
//! - Reverse-path filtering takes the larger of `all` and the device's own value. The programs redirect before the
//!   kernel routes, so their packets bypass the filter. Packets that they leave to the stack on the tunnel device (too
//!   large to forward) do not, and their source is an address of another node. So the device gets 2 (loose): then the
//!   result is 2 whatever `all` is or becomes. Pods' interfaces and uplinks keep their values: a packet that comes in
//!   there and reaches the filter has a source that is routed there.
//! - The tunnel device carries no address. IPv6 stays enabled on it, because a route through it needs that, but the device
//!   gets no link-local address and accepts no router advertisements.
//! - A route lookup by a program fails on a device that does not forward.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Warning;

/// The path at which the manifests mount the node's /proc/sys/net: an unprivileged container may only read its own.
const HOST: &str = "/host/proc/sys";

/// Returns the path at which settings are read and written. Both paths show those of this process's network namespace.
fn root() -> &'static Path {
    Path::new(if Path::new(HOST).join("net").exists() { HOST } else { "/proc/sys" })
}

/// One setting. Keys are paths below /proc/sys, such as `net/ipv4/conf/eth0.10/rp_filter` (a name may contain dots);
/// `sysctl` accepts them in this form, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The path below /proc/sys.
    pub key: String,
    /// The needed value; fields separated by single spaces.
    pub value: String,
    /// If set, the setting is changed only from this value.
    pub only_from: Option<String>,
}

impl Setting {
    fn new(key: impl Into<String>, value: &str) -> Setting {
        Setting { key: key.into(), value: value.to_owned(), only_from: None }
    }
}

/// Returns the settings that the tunnel device needs. They are removed with the device.
pub fn tunnel_settings(device: &str) -> Vec<Setting> {
    vec![
        Setting::new(format!("net/ipv4/conf/{device}/rp_filter"), "2"),
        Setting::new(format!("net/ipv4/conf/{device}/forwarding"), "1"),
        Setting::new(format!("net/ipv6/conf/{device}/addr_gen_mode"), "1"),
        Setting::new(format!("net/ipv6/conf/{device}/accept_ra"), "0"),
        Setting::new(format!("net/ipv6/conf/{device}/forwarding"), "1"),
    ]
}

/// Returns the settings that a node needs to forward for others (every gateway, and every node with pods). An uplink that accepts router
/// advertisements is set to continue, before forwarding makes it stop.
pub fn forwarding_settings<'a>(uplinks: impl IntoIterator<Item = &'a str>) -> Vec<Setting> {
    let keep_routers = |uplink: &str| Setting {
        only_from: Some("1".to_owned()),
        ..Setting::new(format!("net/ipv6/conf/{uplink}/accept_ra"), "2")
    };
    let mut settings = vec![Setting::new("net/ipv4/ip_forward", "1")];
    settings.extend(uplinks.into_iter().map(keep_routers));
    settings.push(Setting::new("net/ipv6/conf/all/forwarding", "1"));
    settings
}

/// A change of a setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changed {
    /// The value before.
    pub previous: String,
    /// The value that was set.
    pub set: String,
}

/// Why a setting could not be read, or the journal could not be kept.
#[derive(Debug, thiserror::Error)]
pub enum SysctlError {
    /// A file could not be read or written.
    #[error("cannot {action} {path}: {error}", path = path.display())]
    File {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        error: io::Error,
    },
    /// The journal does not have this program's format.
    #[error(
        "the journal {path} of changed kernel settings is damaged: {message}; \
         delete it after restoring the settings by hand", path = path.display()
    )]
    Journal {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
}

/// The kernel's settings, with the journal of the changed ones.
#[derive(Debug)]
pub struct Sysctls {
    root: PathBuf,
    journal: PathBuf,
    changed: BTreeMap<String, Changed>,
}

impl Sysctls {
    /// Takes over the journal in the file, if there is one. The file must not outlive the boot, so it belongs below /run.
    pub fn open(journal: impl Into<PathBuf>) -> Result<Sysctls, SysctlError> {
        Sysctls::below(root().into(), journal.into())
    }

    fn below(root: PathBuf, journal: PathBuf) -> Result<Sysctls, SysctlError> {
        let changed = match fs::read(&journal) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| SysctlError::Journal { path: journal.clone(), message: error.to_string() })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(SysctlError::File { action: "read", path: journal, error }),
        };
        Ok(Sysctls { root, journal, changed })
    }

    /// Returns the changes that were not restored, by key.
    pub fn changed(&self) -> &BTreeMap<String, Changed> {
        &self.changed
    }

    /// Sets the values that differ, and records the previous ones. A setting that cannot be changed, as on a read-only /proc/sys, is
    /// reported and does not stop the others. IPv6 settings of a kernel without IPv6 are skipped.
    pub fn apply(&mut self, settings: &[Setting]) -> Result<Vec<Warning>, SysctlError> {
        let mut warnings = Vec::new();
        for setting in settings {
            let Some(previous) = differing(&self.root, setting, &mut warnings) else { continue };
            let before = self.changed.clone();
            let changed = Changed { previous, set: setting.value.clone() };
            self.changed
                .entry(setting.key.clone())
                .and_modify(|entry| entry.set.clone_from(&changed.set))
                .or_insert(changed);
            self.save()?;
            if let Err(error) = fs::write(self.root.join(&setting.key), &setting.value) {
                warnings.push(refused(setting, &error));
                self.changed = before;
                self.save()?;
            }
        }
        Ok(warnings)
    }

    /// Restores the recorded values, except those that somebody has changed since. Only settings that could not be restored stay in the
    /// record.
    pub fn restore(&mut self) -> Result<Vec<Warning>, SysctlError> {
        let mut warnings = Vec::new();
        for (key, Changed { previous, set }) in std::mem::take(&mut self.changed) {
            let setting = Setting::new(key, &previous);
            let failed = match read_below(&self.root, &setting.key) {
                Ok(present) if present.as_ref() != Some(&set) => None,
                Ok(_) => {
                    fs::write(self.root.join(&setting.key), &previous).err().map(|error| refused(&setting, &error))
                }
                Err(error) => Some(refused(&setting, &error)),
            };
            if let Some(warning) = failed {
                warnings.push(warning);
                self.changed.insert(setting.key, Changed { previous, set });
            }
        }
        self.save()?;
        Ok(warnings)
    }

    fn save(&self) -> Result<(), SysctlError> {
        let failed = |error| SysctlError::File { action: "write", path: self.journal.clone(), error };
        if self.changed.is_empty() {
            return match fs::remove_file(&self.journal) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
                _ => Ok(()),
            };
        }
        let temporary = self.journal.with_extension("new");
        fs::create_dir_all(self.journal.parent().unwrap_or(Path::new("/"))).map_err(failed)?;
        let bytes = serde_json::to_vec(&self.changed).map_err(|error| failed(error.into()))?;
        fs::write(&temporary, bytes).map_err(failed)?;
        fs::rename(&temporary, &self.journal).map_err(failed)
    }
}

/// Sets the values that differ without recording them: for settings of our own device.
pub fn apply_to_own_device(settings: &[Setting]) -> Vec<Warning> {
    let root = root();
    let mut warnings = Vec::new();
    for setting in settings {
        if differing(root, setting, &mut warnings).is_some()
            && let Err(error) = fs::write(root.join(&setting.key), &setting.value)
        {
            warnings.push(refused(setting, &error));
        }
    }
    warnings
}

/// Returns the present value of a setting, its fields separated by single spaces; `None` if the kernel has no such setting.
pub fn read(key: &str) -> Result<Option<String>, SysctlError> {
    read_below(root(), key)
}

fn read_below(root: &Path, key: &str) -> Result<Option<String>, SysctlError> {
    let path = root.join(key);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text.split_whitespace().collect::<Vec<_>>().join(" "))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(SysctlError::File { action: "read", path, error }),
    }
}

/// Returns the present value, if the setting must be changed.
fn differing(root: &Path, setting: &Setting, warnings: &mut Vec<Warning>) -> Option<String> {
    match read_below(root, &setting.key) {
        Ok(Some(present)) => {
            let wanted = setting.only_from.as_ref().is_none_or(|only| *only == present);
            (wanted && present != setting.value).then_some(present)
        }
        Ok(None) if setting.key.starts_with("net/ipv6/") => None,
        Ok(None) => {
            warnings.push(refused(setting, &io::Error::from(io::ErrorKind::NotFound)));
            None
        }
        Err(error) => {
            warnings.push(refused(setting, &error));
            None
        }
    }
}

fn refused(setting: &Setting, error: &dyn std::fmt::Display) -> Warning {
    Warning {
        object: setting.key.clone(),
        message: format!("cannot be set to {}: {error}", setting.value),
        remedy: format!(
            "run `sysctl -w {}={}` on the node, or mount the node's /proc/sys/net at {HOST}/net in the agent's pod, as the manifests do",
            setting.key, setting.value
        ),
    }
}

#[cfg(test)]
#[path = "sysctl_tests.rs"]
mod tests;
