//! The state of Spillway's objects in a cluster.

use std::net::IpAddr;

use anyhow::{Context, Result};

use super::Cluster;

/// An egress IP and the gateway that carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressIp {
    /// The address.
    pub address: IpAddr,
    /// The gateway, if one carries it now.
    pub node: Option<String>,
    /// Rises with each change of the gateway.
    pub epoch: u64,
    /// The policies that use it.
    pub policies: Vec<String>,
}

impl Cluster {
    /// All egress IPs, sorted by address: IPv4 first.
    pub fn egress_ips(&self) -> Result<Vec<EgressIp>> {
        let list = self.get(&["egressips"])?;
        let mut all = Vec::new();
        for ip in list["items"].as_array().into_iter().flatten() {
            let policies = ip["spec"]["policies"].as_array().into_iter().flatten();
            all.push(EgressIp {
                address: ip["spec"]["address"]
                    .as_str()
                    .unwrap_or_default()
                    .parse()
                    .context("an egress IP's address")?,
                node: ip["status"]["node"].as_str().map(ToOwned::to_owned),
                epoch: ip["status"]["epoch"].as_u64().unwrap_or_default(),
                policies: policies.filter_map(|one| Some(one["policy"].as_str()?.to_owned())).collect(),
            });
        }
        all.sort_by_key(|one| one.address);
        Ok(all)
    }

    /// Which controller leads: the name of its pod and more.
    pub fn leader(&self) -> Result<Option<String>> {
        let lease = self.get(&["lease", "-n", "spillway", "spillway-controller"])?;
        let holder = lease["spec"]["holderIdentity"].as_str().filter(|holder| !holder.is_empty());
        Ok(holder.map(ToOwned::to_owned))
    }

    /// Waits until all of Spillway runs.
    pub fn wait_installed(&self) -> Result<()> {
        for workload in ["deployment/spillway-controller", "daemonset/spillway-agent"] {
            self.kubectl(&["rollout", "status", "-n", "spillway", workload, "--timeout=180s"])?;
        }
        Ok(())
    }
}
