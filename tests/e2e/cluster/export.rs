//! Logs that leave the nodes: segments in a real object store.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use lab::cluster::SERVERS;
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::Test;
use crate::world::{InstalledCluster, PATIENCE, egress};

pub const TESTS: &[Test] =
    &[("export::whois_answers_from_a_bucket_for_a_pod_and_agents_that_are_gone", whois_answers_from_a_bucket)];

/// The store's address in the nodes' network.
const STORE: &str = "10.77.0.1:7070";
const BUCKET: &str = "egress-logs";

/// A Versity gateway: S3's protocol in front of a directory.
struct Store {
    child: Child,
    dir: PathBuf,
}

impl Store {
    fn start(world: &InstalledCluster) -> Result<Store> {
        let dir = world.cluster.dir().join("s3");
        fs::create_dir_all(dir.join(BUCKET))?;
        let mut command = world.cluster.netns("cp")?.command(world.cluster.binaries().join("versitygw"));
        command
            .args(["--access", "spillway", "--secret", "not-a-secret", "--port", STORE, "posix", "--nometa"])
            .arg(&dir);
        let log = fs::File::create(world.cluster.dir().join("s3.log"))?;
        let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn().context("versitygw")?;
        Ok(Store { child, dir })
    }

    /// Returns whether the bucket has a segment of a node's log.
    fn has(&self, node: &str, log: &str) -> bool {
        let files = fs::read_dir(self.dir.join(BUCKET).join("spillway").join(node).join(log));
        let is_segment = |path: &Path| fs::read(path).is_ok_and(|content| content.starts_with(b"PAR1"));
        files.is_ok_and(|files| files.flatten().any(|file| is_segment(&file.path())))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.child.kill().and_then(|()| self.child.wait()).ok();
    }
}

/// Gives all agents these settings and replaces the agents.
fn configure(world: &InstalledCluster, settings: &str) -> Result<()> {
    let patch = json!({"data": {"config.yaml": settings}}).to_string();
    world.cluster.kubectl(&["patch", "-n", "spillway", "configmap/spillway-config", "-p", &patch])?;
    world.roll_out("daemonset/spillway-agent")
}

fn whois_answers_from_a_bucket(world: &InstalledCluster) -> Result<()> {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "spillway-export", "namespace": "spillway"},
        "stringData": {
            "AWS_ACCESS_KEY_ID": "spillway", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT": format!("http://{STORE}"), "AWS_ALLOW_HTTP": "true",
        },
    });
    world.cluster.apply(&secret.to_string())?;
    let result = told_from_a_bucket(world);
    world.cluster.kubectl(&["delete", "-n", "spillway", "secret/spillway-export"])?;
    // The later tests expect the usual settings.
    world.cluster.kubectl(&["delete", "-n", "spillway", "configmap/spillway-config"])?;
    world.cluster.install(&world.manifests)?;
    world.roll_out("daemonset/spillway-agent")?;
    result
}

fn told_from_a_bucket(world: &InstalledCluster) -> Result<()> {
    configure(world, &format!("flowLog: {{mode: Flows, destinations: true, export: ['s3://{BUCKET}/spillway']}}\n"))?;
    let pods = world.deploy("web", 1)?;
    world.pool("public", 10, 10)?;
    world.policy("web", "web", "203.0.113.0/24", 1)?;
    let pod = &pods[0];
    world.wait_sources(pod, 0, &egress([10]))?;
    let (owner, _) = world.wait_owners(1, "")?.into_values().next().context("no owner")?;
    let target = format!("{}:8080", SERVERS[0]);
    let server = TcpServer::start(&world.outside()?, &[target.parse()?], ServerMode::Stream)?;
    let client = TcpClients::establish(&pod.ns, target.parse()?, 1, TcpOptions::default())?;
    let flows =
        wait_until("the server sees the flow", PATIENCE, || Ok(server.source_of_flow()), |all| !all.is_empty())?;
    let seen = flows.values().next().context("no flow")?;
    // If a pod is removed within the same second, its name is no longer known when its flow is logged.
    let written = format!("grep -q ',{},' /var/lib/spillway/*/flows/*.journal", seen.port());
    wait_for("the flow is logged", PATIENCE, || {
        Ok(world.cluster.on_node(&pod.node)?.args(["sh", "-c", &written]).status()?.success())
    })?;
    let seen = seen.to_string();
    let now = Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ"]).output()?.stdout;
    let began = String::from_utf8(now)?.trim().to_owned();
    drop(client);
    world.cluster.kubectl(&["delete", "deployment", "web", "--wait=true", "--cascade=foreground"])?;

    // Segments are finished while the store is unreachable, so they wait for it.
    world.roll_out("daemonset/spillway-agent")?;
    let store = Store::start(world)?;
    wait_for("the bucket has the logs of the pod's node and of the gateway", PATIENCE, || {
        Ok(store.has(&pod.node, "flows") && store.has(&owner, "leases"))
    })?;
    let to = format!("{target}/tcp");
    let copy = store.dir.join(BUCKET).join("spillway");
    let ask = || -> Result<Value> {
        let mut command = Command::new(lab::process::binary("egressctl")?);
        command.args(["whois", &seen, "--at", &began, "--to", &to, "-o", "json", "--log"]).arg(&copy);
        let output = command.output()?;
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("whois: {}", String::from_utf8_lossy(&output.stderr)))
    };
    // Older segments of the gateway may arrive before the one for that time.
    let leased = |answer: &Value| answer["nodes"][0]["node"] == pod.node.as_str();
    let answer = wait_until("the bucket names the node", PATIENCE, ask, leased)?;
    ensure!(answer["recorded"][0]["pod"] == format!("default/{}", pod.name), "{answer}");
    ensure!(answer["recorded"][0]["node"] == pod.node.as_str(), "{answer}");
    Ok(())
}
