//! What the controller wrote: the egress IPs and the policies' conditions, as a person would read them in `.spillway/`.

use std::net::IpAddr;

use anyhow::{Context, Result};
use lab::Manifests;
pub use lab::cluster::EgressIp;
use serde::Deserialize;

#[derive(Deserialize)]
struct Object<S, T> {
    #[serde(default = "none")]
    spec: Option<S>,
    #[serde(default = "none")]
    status: Option<T>,
}

#[derive(Deserialize)]
struct IpSpec {
    address: IpAddr,
    #[serde(default)]
    policies: Vec<User>,
}

#[derive(Deserialize)]
struct User {
    policy: String,
}

#[derive(Deserialize, Default)]
struct IpStatus {
    node: Option<String>,
    #[serde(default)]
    epoch: u64,
}

#[derive(Deserialize)]
struct PolicyStatus {
    #[serde(default)]
    conditions: Vec<Condition>,
}

#[derive(Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    #[serde(default)]
    message: String,
}

fn none<T>() -> Option<T> {
    None
}

/// All egress IPs, sorted by address: IPv4 first.
pub fn egress_ips(manifests: &Manifests) -> Result<Vec<EgressIp>> {
    let names = manifests.written_names("EgressIP");
    let texts = names.iter().filter_map(|name| Some((name, manifests.written("EgressIP", name)?)));
    let mut all: Vec<EgressIp> = texts
        .filter_map(|(name, text)| parse(&text).with_context(|| format!("EgressIP {name}")).transpose())
        .collect::<Result<_>>()?;
    all.sort_by_key(|one| one.address);
    Ok(all)
}

/// The egress IPs of one policy.
pub fn of_policy(manifests: &Manifests, policy: &str) -> Result<Vec<EgressIp>> {
    let mut all = egress_ips(manifests)?;
    all.retain(|one| one.policies.iter().any(|user| user == policy));
    Ok(all)
}

/// Why a policy is not in force yet, in the controller's words; `None` when it is.
pub fn obstacle(manifests: &Manifests, policy: &str) -> Result<Option<String>> {
    let Some(text) = manifests.written("status/EgressGatewayPolicy", policy) else {
        return Ok(Some("the controller has not looked at it yet".to_owned()));
    };
    let object: Object<serde::de::IgnoredAny, PolicyStatus> =
        serde_saphyr::from_str(&text).with_context(|| format!("the status of policy {policy}"))?;
    let ready = object.status.and_then(|status| status.conditions.into_iter().find(|one| one.kind == "Ready"));
    Ok(match ready {
        Some(ready) if ready.status == "True" => None,
        Some(ready) => Some(ready.message),
        None => Some("it has no condition Ready yet".to_owned()),
    })
}

fn parse(text: &str) -> Result<Option<EgressIp>> {
    let object: Object<IpSpec, IpStatus> = serde_saphyr::from_str(text)?;
    let Some(spec) = object.spec else { return Ok(None) };
    let status = object.status.unwrap_or_default();
    let policies = spec.policies.into_iter().map(|user| user.policy).collect();
    Ok(Some(EgressIp { address: spec.address, node: status.node, epoch: status.epoch, policies }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_egress_ip_is_read_with_and_without_an_owner() {
        let text = "apiVersion: spillway.io/v1alpha1\nkind: EgressIP\nmetadata:\n  name: 192.0.2.10\nspec:\n  \
                    address: 192.0.2.10\n  pool: public\n  policies:\n  - policy: web\n    weight: 1\n";
        let free = EgressIp { address: [192, 0, 2, 10].into(), node: None, epoch: 0, policies: vec!["web".to_owned()] };
        assert_eq!(parse(text).unwrap(), Some(free.clone()));
        let owned = parse(&format!("{text}status:\n  node: gw1\n  epoch: 4\n")).unwrap();
        assert_eq!(owned, Some(EgressIp { node: Some("gw1".to_owned()), epoch: 4, ..free }));
        assert_eq!(parse("kind: EgressIP\n").unwrap(), None);
    }
}
