//! Lists the changes that this module's parent made on the node for `egressctl state`, and removes them for `egress-daemon cleanup`.

use std::fmt;

use rtnetlink::Handle;

use super::Warning;
use super::advertise::{self, AdvertiseError};
use super::firewall::{self, FirewallError};
use super::shaper::{self, ShaperError};
use super::sysctl::{Changed, SysctlError, Sysctls};
use super::tunnel::{self, TunnelError};
use egress_core::agent::machine::ShaperEnds;

/// One object that was created, or one setting that was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Artifact {
    /// A tunnel device, regardless of its name.
    TunnelDevice {
        /// Its name.
        name: String,
        /// Its ifindex.
        index: u32,
    },
    /// The shaper's pair of devices.
    Shaper {
        /// Their ifindexes.
        ends: ShaperEnds,
    },
    /// A rule or a route.
    Rule(String),
    /// A kernel setting that was changed.
    Sysctl {
        /// The path below /proc/sys.
        key: String,
        /// The previous and the new value.
        changed: Changed,
    },
}

impl fmt::Display for Artifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Artifact::TunnelDevice { name, index } => write!(f, "tunnel device {name} (ifindex {index})"),
            Artifact::Shaper { .. } => write!(f, "shaper devices {} and {}", shaper::NEAR, shaper::FAR),
            Artifact::Rule(rule) => f.write_str(rule),
            Artifact::Sysctl { key, changed } => write!(f, "sysctl {key}={} (was {})", changed.set, changed.previous),
        }
    }
}

/// Why something could not be listed or removed.
#[derive(Debug, thiserror::Error)]
pub enum CleanupError {
    /// The tunnel device.
    #[error(transparent)]
    Tunnel(#[from] TunnelError),
    /// The shaper.
    #[error(transparent)]
    Shaper(#[from] ShaperError),
    /// Rules and routes.
    #[error(transparent)]
    Firewall(#[from] FirewallError),
    /// Routes to egress IPs.
    #[error(transparent)]
    Advertise(#[from] AdvertiseError),
    /// The settings.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
}

/// Lists everything that was made here and still exists.
pub async fn inventory(handle: &Handle, sysctls: &Sysctls) -> Result<Vec<Artifact>, CleanupError> {
    let devices = tunnel::ours(handle).await?.into_iter().map(|(index, name)| Artifact::TunnelDevice { name, index });
    let settings = sysctls.changed().iter();
    let settings = settings.map(|(key, changed)| Artifact::Sysctl { key: key.clone(), changed: changed.clone() });
    let mut rules = firewall::inventory(handle).await?;
    rules.extend(advertise::inventory().await?);
    let rules = rules.into_iter().map(Artifact::Rule);
    // A foreign device with the shaper's name is not listed.
    let shaper = shaper::find(handle).await.ok().flatten().map(|ends| Artifact::Shaper { ends });
    Ok(devices.chain(rules).chain(shaper).chain(settings).collect())
}

/// Removes everything that was made here. Returns what is gone, and the settings that could not be restored.
pub async fn remove(handle: &Handle, sysctls: &mut Sysctls) -> Result<(Vec<Artifact>, Vec<Warning>), CleanupError> {
    let mut found = inventory(handle, sysctls).await?;
    firewall::remove(handle).await?;
    advertise::remove(handle).await?;
    for artifact in &found {
        match artifact {
            Artifact::TunnelDevice { name, .. } => drop(tunnel::delete(handle, name).await?),
            Artifact::Shaper { .. } => drop(shaper::delete(handle).await?),
            Artifact::Rule(_) | Artifact::Sysctl { .. } => {}
        }
    }
    let warnings = sysctls.restore()?;
    let left = sysctls.changed();
    found.retain(|artifact| !matches!(artifact, Artifact::Sysctl { key, .. } if left.contains_key(key)));
    Ok((found, warnings))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysctl::{forwarding_settings, read};
    use crate::host::testing::{Net, in_netns};
    use crate::host::tunnel::TunnelSpec;

    #[test]
    fn everything_is_listed_and_removed_by_another_process() {
        in_netns("everything_is_listed_and_removed_by_another_process", async || {
            let net = Net::here();
            let directory = tempfile::tempdir().unwrap();
            let open = || Sysctls::open(directory.path().join("sysctl.json")).unwrap();
            net.bridge("foreign").await;
            let spec = TunnelSpec { name: "other-name".into(), ..TunnelSpec::default() };
            let tunnel = tunnel::ensure(&net.handle, &spec).await.unwrap();
            assert_eq!(open().apply(&forwarding_settings(["foreign"])).unwrap(), []);

            let listed: Vec<String> =
                inventory(&net.handle, &open()).await.unwrap().iter().map(ToString::to_string).collect();
            let expected = [
                format!("tunnel device other-name (ifindex {})", tunnel.index),
                "sysctl net/ipv4/ip_forward=1 (was 0)".into(),
                "sysctl net/ipv6/conf/all/forwarding=1 (was 0)".into(),
                "sysctl net/ipv6/conf/foreign/accept_ra=2 (was 1)".into(),
            ];
            assert_eq!(listed, expected);

            let (removed, warnings) = remove(&net.handle, &mut open()).await.unwrap();
            assert_eq!((removed.len(), warnings), (4, vec![]));
            assert_eq!(inventory(&net.handle, &open()).await.unwrap(), []);
            assert_eq!(read("net/ipv4/ip_forward").unwrap().as_deref(), Some("0"));
            assert_eq!(read("net/ipv6/conf/foreign/accept_ra").unwrap().as_deref(), Some("1"));
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
            net.index("foreign").await;
        });
    }

    #[test]
    fn a_setting_that_cannot_be_restored_is_not_reported_as_removed() {
        in_netns("a_setting_that_cannot_be_restored_is_not_reported_as_removed", async || {
            let net = Net::here();
            let directory = tempfile::tempdir().unwrap();
            let journal = directory.path().join("sysctl.json");
            // No process can set this key.
            std::fs::write(&journal, r#"{"kernel/ostype": {"previous": "other", "set": "Linux"}}"#).unwrap();
            let mut sysctls = Sysctls::open(journal).unwrap();
            let (removed, warnings) = remove(&net.handle, &mut sysctls).await.unwrap();
            assert_eq!(removed, []);
            assert!(matches!(&warnings[..], [one] if one.object == "kernel/ostype"), "{warnings:?}");
            assert!(warnings[0].remedy.contains("sysctl -w kernel/ostype=other"), "{}", warnings[0]);
        });
    }
}
