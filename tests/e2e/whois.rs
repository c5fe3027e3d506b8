//! `egressctl whois` and `diff`, while real flows are live.

use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use lab::process::binary;
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Family, Lab, StartOptions, wait_for, wait_until};
use serde_json::Value;

use crate::support::{CALM, PATIENCE, web, web_pod, web_pod_with};

/// The age of the time that the questions are about. Clocks are assumed to differ by up to two seconds, and a log is written every second.
const AGO: Duration = Duration::from_secs(4);

/// Returns a time in the past as users write it.
fn ago(by: Duration) -> Result<String> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.saturating_sub(by).as_secs();
    let text = Command::new("date").args(["-u", "-d", &format!("@{seconds}"), "+%Y-%m-%dT%H:%M:%SZ"]).output()?.stdout;
    Ok(String::from_utf8(text)?.trim().to_owned())
}

#[test]
fn whois_names_the_node_from_a_gateways_log_and_the_pod_from_its_living_flow() {
    Lab::builder().workers(2).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let target = server.ips.at(Family::V4, 80);
        let _client = TcpClients::establish(&pod.ns, target, 1, TcpOptions::default())?;
        wait_for("the server sees the flow", PATIENCE, || Ok(!streams.source_of_flow().is_empty()))?;
        let seen = streams.source_of_flow().values().next().context("nobody came")?.to_string();
        let target = format!("{target}/tcp");

        // The gateway knows the node.
        let ask = || lab.egressctl("gw1", &["whois", &seen, "--at", &ago(AGO)?]);
        let certain = |answer: &Value| answer["nodeCertain"] == true;
        let answer = wait_until("the log of gw1 is certain", PATIENCE, ask, certain)?;
        assert_eq!(answer["nodes"][0]["node"], "worker1", "{answer}");
        assert_eq!(answer["podCertain"], false, "{answer}");

        // The node knows the pod.
        let ask = || lab.egressctl("worker1", &["whois", &seen, "--to", &target]);
        let certain = |answer: &Value| answer["podCertain"] == true;
        let answer = wait_until("worker1 is certain of the pod", PATIENCE, ask, certain)?;
        assert_eq!(answer["flows"][0]["pod"], "default/web", "{answer}");
        assert_eq!(answer["flows"][0]["policy"], "web", "{answer}");
        assert_eq!(answer["nodes"][0]["node"], "worker1", "{answer}");

        // A free port has no holder, and a time without a zone is refused.
        let free = format!("{}:80", seen.rsplit_once(':').context("no port")?.0);
        assert_eq!(lab.egressctl("gw1", &["whois", &free])?["nodes"], Value::Array(Vec::new()));
        let refused = lab.egressctl_text("gw1", &["whois", &seen, "--at", "2026-11-25T14:03"]).unwrap_err();
        assert!(format!("{refused:#}").contains("the time zone is missing"), "{refused:#}");
        Ok(())
    });
}

#[test]
fn whois_names_the_pod_of_a_flow_that_has_ended_when_the_pod_and_its_node_are_gone() {
    let options = StartOptions::new().config(&format!("{CALM}flowLog: {{mode: Flows, destinations: true}}\n"));
    Lab::builder().workers(2).run(|lab| {
        let (pod, server) = web_pod_with(lab, &[10], &options)?;
        let streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let target = server.ips.at(Family::V4, 80);
        let client = TcpClients::establish(&pod.ns, target, 1, TcpOptions::default())?;
        wait_for("the server sees the flow", PATIENCE, || Ok(!streams.source_of_flow().is_empty()))?;
        let seen = streams.source_of_flow().values().next().context("nobody came")?.to_string();

        // While the flow is live, the question need not name the server: the node's log misses no flow.
        let mut at = String::new();
        let ask = || {
            at = ago(AGO)?;
            lab.egressctl("worker1", &["whois", &seen, "--at", &at])
        };
        let certain =
            |answer: &Value| answer["podCertain"] == true && !answer["recorded"].as_array().is_none_or(Vec::is_empty);
        wait_until("the log of worker1 is certain", PATIENCE, ask, certain)?;

        drop(client);
        lab.remove_pod("default/web")?;
        let ask = || lab.egressctl("worker1", &["whois", &seen, "--at", &at]);
        let over = |answer: &Value| {
            answer["flows"].as_array().is_some_and(Vec::is_empty) && answer["recorded"][0]["ended"].is_string()
        };
        let answer = wait_until("the flow has ended", PATIENCE, ask, over)?;
        assert_eq!(answer["podCertain"], true, "{answer}");

        // Another node gives the same answer from the logs alone.
        assert_eq!(lab.counters("worker1")?["flow_log_lost"], 0);
        lab.kill_node("worker1")?;
        let logs = lab.state().to_string_lossy().into_owned();
        let answer = lab.egressctl("worker2", &["whois", &seen, "--at", &at, "--log", &logs])?;
        let flow = &answer["recorded"][0];
        assert_eq!((&answer["podCertain"], &answer["nodeCertain"]), (&true.into(), &true.into()), "{answer}");
        assert_eq!(
            (&flow["pod"], &flow["policy"], &flow["node"]),
            (&"default/web".into(), &"web".into(), &"worker1".into()),
            "{answer}"
        );
        assert_eq!((&flow["protocol"], &flow["to"]), (&"tcp".into(), &target.to_string().into()), "{answer}");
        Ok(())
    });
}

/// Returns the exit code and the output.
fn diff(lab: &Lab, file: &str, more: &[&str]) -> Result<(i32, Value)> {
    let mut command = lab.node("worker1").ns.command(binary("egressctl")?);
    command.args(["diff", "-o", "json", "-f", file, "--manifests"]).arg(lab.manifests().dir());
    let output = command.args(more).arg("--bpffs").arg(lab.bpffs("worker1")).output()?;
    let code = output.status.code().context("killed")?;
    if code > 1 {
        bail!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok((code, serde_json::from_slice(&output.stdout)?))
}

#[test]
fn diff_says_which_flows_would_break_before_a_change_is_applied() {
    Lab::builder().workers(1).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let clients = TcpClients::establish(&pod.ns, server.ips.at(Family::V4, 80), 3, TcpOptions::default())?;
        let file = lab.dir().join("changed.yaml");
        let name = file.to_string_lossy().into_owned();
        std::fs::write(&file, web(&[10]))?;
        let (code, view) = diff(lab, &name, &[])?;
        assert_eq!((code, &view["items"]), (0, &Value::Array(Vec::new())), "{view}");

        std::fs::write(&file, web(&[11]))?;
        let (code, view) = diff(lab, &name, &[])?;
        let items = view["items"].as_array().context("no items")?;
        let breaking = items.iter().filter(|item| item["becomes"] == "breaks" && item["flow"]["remotePort"] == 80);
        assert_eq!((code, breaking.count()), (1, 3), "{view}");
        // Nothing was applied.
        clients.wait_progress(10, PATIENCE)?;
        assert!(streams.sources().keys().all(|address| *address == crate::support::egress(Family::V4, &[10])[0]));

        // The prediction was right.
        lab.manifests().write("web", &web(&[11]))?;
        let stalled = || Ok(clients.wait_progress(10, Duration::from_secs(2)).is_err());
        wait_for("the connections break", PATIENCE, stalled)?;
        std::fs::write(&file, "kind: EgressGatewayPolicy\n")?;
        assert!(diff(lab, &name, &[]).is_err());
        Ok(())
    });
}
