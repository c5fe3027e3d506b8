//! The state of Spillway's objects in a cluster.

use std::net::IpAddr;

use anyhow::{Context, Result};
use serde_json::Value;

use super::Cluster;

/// An egress IP and the gateway that carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressIp {
    /// The address.
    pub address: IpAddr,
    /// The gateway that carries it now, if any.
    pub node: Option<String>,
    /// The epoch: rises with each change of the gateway.
    pub epoch: u64,
    /// The policies that use it.
    pub policies: Vec<String>,
}

impl EgressIp {
    /// Reads an object; `None` if it has no spec yet.
    pub(crate) fn of(object: &Value) -> Result<Option<Self>> {
        let (spec, status) = (&object["spec"], &object["status"]);
        if spec.is_null() {
            return Ok(None);
        }
        let address = spec["address"].as_str().unwrap_or_default();
        let policies = spec["policies"].as_array().into_iter().flatten();
        Ok(Some(EgressIp {
            address: address.parse().with_context(|| format!("an egress IP's address {address:?}"))?,
            node: status["node"].as_str().map(ToOwned::to_owned),
            epoch: status["epoch"].as_u64().unwrap_or_default(),
            policies: policies.filter_map(|one| Some(one["policy"].as_str()?.to_owned())).collect(),
        }))
    }

    /// Reads objects and sorts them by address, IPv4 first.
    pub(crate) fn all<'a>(objects: impl IntoIterator<Item = &'a Value>) -> Result<Vec<Self>> {
        let mut all: Vec<_> = objects.into_iter().filter_map(|one| Self::of(one).transpose()).collect::<Result<_>>()?;
        all.sort_by_key(|one| one.address);
        Ok(all)
    }
}

impl Cluster {
    /// Returns all egress IPs, sorted by address, IPv4 first.
    pub fn egress_ips(&self) -> Result<Vec<EgressIp>> {
        EgressIp::all(self.get(&["egressips"])?["items"].as_array().into_iter().flatten())
    }

    /// Returns the identity of the leading controller, which contains the name of its pod.
    pub fn leader(&self) -> Result<Option<String>> {
        let lease = self.get(&["lease", "-n", "spillway", "spillway-controller"])?;
        let holder = lease["spec"]["holderIdentity"].as_str().filter(|holder| !holder.is_empty());
        Ok(holder.map(ToOwned::to_owned))
    }

    /// Waits until all of Spillway's workloads are ready.
    pub fn wait_installed(&self) -> Result<()> {
        for workload in ["deployment/spillway-controller", "daemonset/spillway-agent"] {
            self.kubectl(&["rollout", "status", "-n", "spillway", workload, "--timeout=180s"])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn egress_ips_parse_with_and_without_owner() {
        let spec = json!({"address": "192.0.2.10", "pool": "public", "policies": [{"policy": "web", "weight": 1}]});
        let free = EgressIp { address: [192, 0, 2, 10].into(), node: None, epoch: 0, policies: vec!["web".to_owned()] };
        assert_eq!(EgressIp::of(&json!({"spec": spec})).unwrap(), Some(free.clone()));
        let owned = EgressIp::of(&json!({"spec": spec, "status": {"node": "gw1", "epoch": 4}})).unwrap();
        assert_eq!(owned, Some(EgressIp { node: Some("gw1".to_owned()), epoch: 4, ..free }));
        assert_eq!(EgressIp::of(&json!({"kind": "EgressIP"})).unwrap(), None);
    }
}
