//! `kubectl spillway`: what one node's `egressctl` reports, for all nodes of a cluster.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context, Result, bail, ensure};
use lab::NetNs;
use lab::cluster::SERVERS;
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
use serde_json::Value;

use crate::Test;
use crate::world::{InstalledCluster, PATIENCE, egress};

pub const TESTS: &[Test] = &[
    ("plugin::all_nodes_are_asked_from_where_kubectl_works", all_nodes_are_asked),
    ("plugin::what_flows_is_shown_and_traced_on_all_nodes", what_flows_is_shown),
    ("plugin::connectivity_test_checks_each_policy_against_an_outside_server", promises_are_tested),
];

/// The plugin in a directory of PATH, as users install it.
struct Plugin(PathBuf);

impl Plugin {
    fn new(world: &InstalledCluster) -> Result<Plugin> {
        let program = lab::process::binary("egressctl")?;
        Ok(Plugin(world.cluster.kubectl_folder(&[("kubectl-spillway", &program)])?))
    }

    fn run(&self, line: &str) -> Result<Output> {
        let mut command = Command::new(self.0.join("kubectl"));
        Ok(command.arg("spillway").args(line.split(' ')).current_dir(&self.0).output()?)
    }

    /// Returns the output of a command, which must succeed.
    fn says(&self, line: &str) -> Result<String> {
        let Output { status, stdout, stderr } = self.run(line)?;
        ensure!(status.success(), "{line}: {status}: {}", String::from_utf8_lossy(&stderr));
        Ok(String::from_utf8(stdout)?)
    }
}

fn all_nodes_are_asked(world: &InstalledCluster) -> Result<()> {
    let plugin = Plugin::new(world)?;
    let pods = world.deploy("web", 2)?;
    world.pool("public", 10, 11)?;
    world.policy("web", "web", "0.0.0.0/0", 2)?;
    let status = plugin.says("status --wait --timeout 90")?;
    ensure!(status.contains("EgressGatewayPolicy") && !status.contains("NO"), "{status}");
    for pod in &pods {
        world.wait_sources(pod, 0, &egress([10, 11]))?;
    }

    let nodes: Value = serde_json::from_str(&plugin.says("endpoints -o json")?)?;
    let nodes = nodes.as_array().context("no array")?;
    let agents = world.cluster.get(&["pods", "-n", "spillway", "-l", "app.kubernetes.io/component=agent"])?;
    ensure!(Some(nodes.len()) == agents["items"].as_array().map(Vec::len), "{nodes:?}");
    let known: Vec<&Value> = nodes.iter().filter_map(|node| node["items"].as_array()).flatten().collect();
    for pod in &pods {
        ensure!(known.iter().any(|endpoint| endpoint.to_string().contains(&pod.name)), "no {} in {known:?}", pod.name);
    }

    let pod = &pods[0];
    let explained = plugin.says(&format!("explain --pod default/{} --to {}:80/tcp", pod.name, SERVERS[0]))?;
    ensure!(explained.starts_with(&format!("Node {}\n", pod.node)) && explained.contains("policy web"), "{explained}");
    ensure!(explained.matches("Node ").count() == 1, "{explained}");
    for (line, why) in
        [("flowz", "unrecognized subcommand"), ("flows --pod default/nobody", "pod default/nobody is missing")]
    {
        let output = plugin.run(line)?;
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success() && told.contains(why), "{line}: {told}");
    }

    let policy = |to: &str| {
        format!(
            "apiVersion: spillway.io/v1beta1\nkind: EgressGatewayPolicy\nmetadata: {{name: another}}\n\
             spec: {{selectors: [{{podSelector: {{}}}}], destinationCIDRs: [{to}], egressIPPools: [{{name: public, count: 1}}]}}\n"
        )
    };
    for (text, code, told) in [
        (policy("198.51.100.0/24"), 1, "flows of 6 nodes"),
        (policy("anywhere"), 2, "destinationCIDRs"),
        (String::new(), 0, "nothing"),
    ] {
        fs::write(plugin.0.join("changed.yaml"), &text)?;
        let Output { status, stdout, stderr } = plugin.run("diff -f changed.yaml")?;
        let said = String::from_utf8([stdout, stderr].concat())?;
        ensure!(status.code() == Some(code) && said.contains(told), "{text}: {status}: {said}");
    }

    plugin.says("sysdump -f dump.tar.gz")?;
    let unpacked = plugin.0.join("dump");
    fs::create_dir_all(&unpacked)?;
    let tar = Command::new("tar").arg("-xzf").arg(plugin.0.join("dump.tar.gz")).arg("-C").arg(&unpacked).status()?;
    ensure!(tar.success(), "tar: {tar}");
    let read = |name: &str| fs::read_to_string(unpacked.join(name)).with_context(|| name.to_owned());
    ensure!(read("objects.yaml")?.contains("kind: EgressGatewayPolicy"));
    ensure!(read(&format!("nodes/{}/endpoints.json", pod.node))?.contains(&pod.name));
    let errors = Command::new("find").arg(&unpacked).args(["-name", "*.error"]).output()?.stdout;
    ensure!(errors.is_empty(), "not answered: {}", String::from_utf8_lossy(&errors));
    let secrets =
        Command::new("grep").args(["-rnE", "kind: Secret|PRIVATE KEY|token:"]).arg(&unpacked).output()?.stdout;
    ensure!(secrets.is_empty(), "secrets in {}", String::from_utf8_lossy(&secrets));
    Ok(())
}

/// Waits until an event of the page at an address contains all of `wanted`.
fn wait_page(ns: &NetNs, at: SocketAddr, wanted: &[&str]) -> Result<()> {
    ns.run(|| {
        let mut stream = TcpStream::connect(at)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(format!("GET /events HTTP/1.0\r\nHost: {at}\r\n\r\n").as_bytes())?;
        let mut last = String::new();
        for line in BufReader::new(stream).lines() {
            last = line.with_context(|| format!("nothing of {wanted:?} in {last}"))?;
            if wanted.iter().all(|wanted| last.contains(wanted)) {
                return Ok(());
            }
        }
        bail!("the page has ended: {last}")
    })
}

fn what_flows_is_shown(world: &InstalledCluster) -> Result<()> {
    let plugin = Plugin::new(world)?;
    let pods = world.deploy("web", 2)?;
    world.pool("public", 10, 10)?;
    world.policy("web", "web", "0.0.0.0/0", 1)?;
    for pod in &pods {
        world.wait_sources(pod, 0, &egress([10]))?;
    }
    let target: SocketAddr = format!("{}:7777", SERVERS[0]).parse()?;
    let _server = TcpServer::start(&world.outside()?, &[target], ServerMode::Stream)?;
    let clients = pods.iter().map(|pod| TcpClients::establish(&pod.ns, target, 2, TcpOptions::default()));
    let _clients = clients.collect::<Result<Vec<_>>>()?;

    let listen: SocketAddr = "127.0.0.1:8475".parse()?;
    let mut serve = Command::new(plugin.0.join("kubectl"));
    serve.args(["spillway", "serve", "--listen", &listen.to_string()]);
    let serve = Running::start(serve, "open http://")?;
    let named: Vec<String> = pods.iter().map(|pod| format!("default/{}", pod.name)).collect();
    let wanted = [named[0].as_str(), &named[1], "\"egressIp\":\"192.0.2.10\"", &target.to_string()];
    wait_page(&world.cluster.netns("cp")?, listen, &wanted)?;
    drop(serve);

    // The controller knows no pods and no destinations.
    let controllers = world.cluster.pods("spillway", "app.kubernetes.io/component=controller")?;
    let controller = controllers.first().context("no controller")?;
    let wanted =
        ["namespace default", "\"policy\":\"web\"", "\"egressIp\":\"192.0.2.10\"", &pods[0].node, &pods[1].node];
    wait_page(&controller.ns, SocketAddr::new(controller.ip.into(), 9473), &wanted)?;

    let traced = plugin.says(&format!("trace --pod {} --to {target} -n 3 -o json", named[0]))?;
    ensure!(traced.lines().count() == 3 && traced.contains("192.0.2.10"), "{traced}");
    Ok(())
}

/// A program that runs until this is dropped. The test prints the program's stderr.
struct Running(Child);

impl Running {
    /// Starts a program, and waits for its first line on stderr, which must contain this text.
    fn start(mut command: Command, says: &str) -> Result<Running> {
        let mut running = Running(command.stderr(Stdio::piped()).spawn()?);
        let mut stderr = BufReader::new(running.0.stderr.take().context("its stderr")?);
        let mut line = String::new();
        stderr.read_line(&mut line)?;
        ensure!(line.contains(says), "{line}");
        // A program whose stderr is closed or full fails or stops at its next message. The thread ends with the program.
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::stderr()));
        Ok(running)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the program that tells clients their addresses.
fn server_outside(world: &InstalledCluster, address: &str) -> Result<Running> {
    let mut command = world.outside()?.command(lab::process::binary("egressctl")?);
    command.args(["connectivity", "serve", "--listen", address]);
    Running::start(command, "telling clients")
}

fn promises_are_tested(world: &InstalledCluster) -> Result<()> {
    let plugin = Plugin::new(world)?;
    world.pool("public", 10, 12)?;
    world.policy("web", "web", "0.0.0.0/0", 2)?;
    world.policy("elsewhere", "db", "192.168.0.0/16", 1)?;
    world.team("shop", true)?;
    plugin.says("status --wait --timeout 90")?;
    let address = format!("{}:8474", SERVERS[2]);
    let server = server_outside(world, &address)?;
    // Returns whether the test succeeded, and the result of each policy.
    let test = || -> Result<(bool, BTreeMap<String, String>)> {
        let output = plugin.run(&format!("connectivity test --server {address} --timeout 60 -o json"))?;
        let view: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        let text = |item: &Value, field: &str| item[field].as_str().unwrap_or_default().to_owned();
        let line = |item: &Value| (text(item, "policy"), format!("{} {}", text(item, "result"), text(item, "message")));
        let items = view["items"].as_array().context("no items")?;
        Ok((output.status.success(), items.iter().map(line).collect()))
    };

    let (ok, results) = test()?;
    ensure!(ok, "{results:?}");
    for (policy, result) in
        [("web", "ok "), ("ns/shop/team", "ok "), ("", "ok "), ("elsewhere", "skipped its destinations")]
    {
        ensure!(results.get(policy).is_some_and(|said| said.starts_with(result)), "{policy}: {results:?}");
    }

    // Acts like another NAT that translates the packets from gateways.
    let outside = world.outside()?;
    outside.nft(
        "table ip broken {\n chain in {\n type nat hook input priority 100;\n ip saddr 192.0.2.10-192.0.2.12 tcp dport 8474 snat to 192.0.2.99\n }\n}\n",
    )?;
    let (ok, results) = test()?;
    outside.nft("delete table ip broken")?;
    let said = results.get("web").context("no result for web")?;
    ensure!(
        !ok && said.starts_with("FAILED") && said.contains("192.0.2.99") && said.contains("never saw 192.0.2.1"),
        "{said}"
    );

    drop(server);
    let (ok, results) = test()?;
    ensure!(!ok && results["web"].contains("Connection refused"), "{results:?}");
    for kind in ["pods", "namespaces"] {
        let arguments = [kind, "-A", "-l", "spillway.io/connectivity-test"];
        world.until(&format!("no {kind} of the test are left"), &arguments, |list| {
            list["items"] == Value::Array(Vec::new())
        })?;
    }
    let output = plugin.run("connectivity test")?;
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && told.contains("egressctl connectivity serve"), "{told}");
    world.cluster.kubectl(&["delete", "namespace", "shop", "--wait=true"]).map(drop)
}
