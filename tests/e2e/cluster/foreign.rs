//! Objects of Cilium and Antrea: `kubectl apply` of the same YAML, with the components that read these objects.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use lab::wait_for;
use serde_json::Value;

use crate::Test;
use crate::world::{InstalledCluster, PATIENCE, egress};

pub const TESTS: &[Test] = &[
    ("foreign::policies_of_cilium_are_carried_out_and_events_tell_of_them", policies_of_cilium),
    ("foreign::egresses_of_antrea_are_carried_out_and_have_their_status", egresses_of_antrea),
];

/// Installs Spillway from its manifests, with these components.
fn install_with(world: &InstalledCluster, components: &str) -> Result<()> {
    let copy = world.cluster.dir().join("manifests");
    if copy.exists() {
        fs::remove_dir_all(&copy)?;
    }
    copy_folder(&world.manifests, &copy)?;
    let file = copy.join("kustomization.yaml");
    let text = fs::read_to_string(&file)?;
    fs::write(&file, format!("{text}components: [{components}]\n"))?;
    world.cluster.install(&copy)
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (entry, to) = (entry?.path(), to.to_owned());
        let to = to.join(entry.file_name().unwrap_or_default());
        if entry.is_dir() {
            copy_folder(&entry, &to)?;
        } else {
            fs::copy(&entry, &to)?;
        }
    }
    Ok(())
}

/// Returns our definition of another system's kind.
fn definition(world: &InstalledCluster, plural: &str) -> Result<String> {
    let file = world.manifests.join(format!("crds/foreign/{plural}.yaml")).display().to_string();
    world.cluster.kubectl(&["create", "--dry-run=client", "-o", "json", "-f", &file])
}

fn established(world: &InstalledCluster, plural_and_group: &str) -> Result<()> {
    let name = format!("crd/{plural_and_group}");
    world.cluster.kubectl(&["wait", "--for=condition=Established", &name, "--timeout=60s"]).map(drop)
}

/// Waits for an Event about an object with this reason, and returns its text.
fn event(world: &InstalledCluster, kind: &str, name: &str, reason: &str) -> Result<String> {
    let of = |list: &Value| {
        let all = list["items"].as_array().into_iter().flatten();
        let mut all = all.filter(|event| {
            event["regarding"]["kind"] == kind && event["regarding"]["name"] == name && event["reason"] == reason
        });
        all.next().map(|event| event["note"].as_str().unwrap_or_default().to_owned())
    };
    let events = ["events.events.k8s.io", "-n", "default"];
    let found = world.until(&format!("{kind} {name} has an event {reason}"), &events, |list| of(list).is_some())?;
    of(&found).context("an event")
}

fn policies_of_cilium(world: &InstalledCluster) -> Result<()> {
    // The component comes first: the kind may be added later.
    install_with(world, "components/cilium")?;
    // Cilium's own definition has no status and no columns.
    let mut theirs: Value = serde_json::from_str(&definition(world, "ciliumegressgatewaypolicies")?)?;
    let version = theirs.pointer_mut("/spec/versions/0").and_then(Value::as_object_mut).context("a version")?;
    version.remove("subresources");
    version.remove("additionalPrinterColumns");
    let fields = version.get_mut("schema").and_then(|schema| schema.pointer_mut("/openAPIV3Schema/properties"));
    fields.and_then(Value::as_object_mut).context("fields")?.remove("status");
    world.cluster.apply(&theirs.to_string())?;
    established(world, "ciliumegressgatewaypolicies.cilium.io")?;

    let gateway = world.cluster.netns("gateway2")?;
    gateway.ip(&["addr replace 192.0.2.50/24 dev eth1".to_owned()])?;
    let pods = world.deploy("web", 2)?;
    let policy = |name: &str, gateway: &str| {
        world.cluster.apply(&format!(
            "apiVersion: cilium.io/v2
kind: CiliumEgressGatewayPolicy
metadata:
  name: {name}
spec:
  selectors:
  - podSelector:
      matchLabels:
        app: web
        # The following label selects default namespace
        io.kubernetes.pod.namespace: default
  destinationCIDRs:
  - \"0.0.0.0/0\"
  egressGateway:
    nodeSelector:
      matchLabels:
        {gateway}
"
        ))
    };
    policy("egress-sample", "egress: \"true\"\n    egressIP: 192.0.2.50")?;
    for pod in &pods {
        world.wait_sources(pod, 0, &egress([50]))?;
    }
    event(world, "CiliumEgressGatewayPolicy", "egress-sample", "Ready")?;
    // Cilium silently ignores this policy.
    policy("both", "egress: \"true\"\n    egressIP: 192.0.2.50\n    interface: eth1")?;
    let said = event(world, "CiliumEgressGatewayPolicy", "both", "Invalid")?;
    ensure!(said.contains("interface") && said.contains("egressIP"), "{said}");
    let described = world.cluster.kubectl(&["describe", "cegp", "both"])?;
    ensure!(described.contains("Invalid"), "{described}");
    // A gateway by interface, on another node.
    policy("egress-sample", "kubernetes.io/hostname: gateway3\n    interface: eth1")?;
    for pod in &pods {
        world.wait_sources(pod, 0, &egress([103]))?;
    }
    gateway.ip(&["addr del 192.0.2.50/24 dev eth1".to_owned()])?;

    // Our definition has a status, and columns that show it.
    world.cluster.apply(&definition(world, "ciliumegressgatewaypolicies")?)?;
    world.cluster.kubectl(&["rollout", "restart", "-n", "spillway", "deployment/spillway-controller"])?;
    world.wait_installed()?;
    wait_for("the columns show it", PATIENCE, || {
        let rows = world.cluster.kubectl(&["get", "cegp"])?;
        let row = |name: &str| rows.lines().find(|row| row.starts_with(name)).unwrap_or_default().to_owned();
        let (served, refused) = (row("egress-sample"), row("both"));
        Ok(served.contains("True") && served.contains("192.0.2.103") && refused.contains("Invalid"))
    })?;
    world.cluster.kubectl(&["delete", "cegp", "--all"])?;
    for pod in &pods {
        world.wait_sources(pod, 0, &[world.plain(&pod.node)])?;
    }
    Ok(())
}

fn egresses_of_antrea(world: &InstalledCluster) -> Result<()> {
    install_with(world, "components/cilium, components/antrea")?;
    for plural in ["egresses", "externalippools"] {
        world.cluster.apply(&definition(world, plural)?)?;
        established(world, &format!("{plural}.crd.antrea.io"))?;
    }
    let pods = world.deploy("web", 2)?;
    world.cluster.apply(
        "apiVersion: crd.antrea.io/v1beta1
kind: ExternalIPPool
metadata:
  name: prod-external-ip-pool
spec:
  ipRanges:
  - cidr: 192.0.2.32/28
  nodeSelector:
    matchLabels:
      egress: \"true\"
---
apiVersion: crd.antrea.io/v1beta1
kind: Egress
metadata:
  name: egress-web
spec:
  appliedTo:
    podSelector:
      matchLabels:
        app: web
  externalIPPool: prod-external-ip-pool
---
apiVersion: crd.antrea.io/v1beta1
kind: Egress
metadata:
  name: egress-nowhere
spec:
  appliedTo:
    podSelector: {}
",
    )?;
    let condition = |object: &Value, kind: &str| {
        let all = object["status"]["conditions"].as_array().into_iter().flatten();
        all.filter(|one| one["type"] == kind).any(|one| one["status"] == "True")
    };
    let served = world.until("egress-web is assigned", &["egress.crd.antrea.io", "egress-web"], |object| {
        condition(object, "IPAllocated") && condition(object, "IPAssigned") && condition(object, "Ready")
    })?;
    let text = |field: &str| served["status"][field].as_str().unwrap_or_default().to_owned();
    let (ip, node) = (text("egressIP"), text("egressNode"));
    for pod in &pods {
        world.wait_sources(pod, 0, &[ip.parse()?])?;
    }
    ensure!(world.owners()?.get(&ip.parse()?).is_some_and(|(owner, _)| *owner == node), "{node} has {ip}");
    let rows = world.cluster.kubectl(&["get", "egress.crd.antrea.io", "egress-web"])?;
    let columns: Vec<&str> = rows.lines().next().unwrap_or_default().split_whitespace().collect();
    ensure!(columns == ["NAME", "EGRESSIP", "AGE", "NODE"], "{rows}");
    ensure!(rows.contains(&ip) && rows.contains(&node), "{rows}");
    world.until("14 addresses, one in use", &["externalippools", "prod-external-ip-pool"], |pool| {
        pool["status"]["usage"]["total"] == 14 && pool["status"]["usage"]["used"] == 1
    })?;
    let said = event(world, "Egress", "egress-nowhere", "Invalid")?;
    ensure!(said.contains("externalIPPool"), "{said}");
    event(world, "Egress", "egress-web", "Ready")?;

    // With only an address, the Egress uses whatever node has it.
    let gateway = world.cluster.netns("gateway1")?;
    gateway.ip(&["addr replace 192.0.2.60/24 dev eth1".to_owned()])?;
    world.cluster.kubectl(&[
        "patch",
        "egress.crd.antrea.io",
        "egress-web",
        "--type=merge",
        "-p",
        r#"{"spec":{"externalIPPool":null,"egressIP":"192.0.2.60"}}"#,
    ])?;
    for pod in &pods {
        world.wait_sources(pod, 0, &egress([60]))?;
    }
    world.until("the pool is free", &["externalippools", "prod-external-ip-pool"], |pool| {
        pool["status"]["usage"]["used"] == 0
    })?;
    gateway.ip(&["addr del 192.0.2.60/24 dev eth1".to_owned()])?;
    world.until("egress-web is not assigned", &["egress.crd.antrea.io", "egress-web"], |object| {
        !condition(object, "IPAssigned")
    })?;
    world.cluster.kubectl(&["delete", "egresses.crd.antrea.io,externalippools", "--all"])?;
    for pod in &pods {
        world.wait_sources(pod, 0, &[world.plain(&pod.node)])?;
    }
    Ok(())
}
