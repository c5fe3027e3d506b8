//! `egressctl trace`: what it reports, and that tracing changes nothing.

use anyhow::Result;
use lab::process::Process;
use lab::traffic::{UdpClients, UdpOptions, UdpServer};
use lab::{Capture, Family, Lab, Pod, Server, wait_for, wait_until};

use crate::support::{PATIENCE, all_answered, assert_no_strangers, calm, egress, sources, web_pod};

/// Returns the kernel's IDs of the `pod_egress` programs that `worker1`'s agent has at an interface.
fn attached(lab: &Lab) -> Result<Vec<u64>> {
    let state = lab.egressctl("worker1", &["state"])?;
    let programs = state["programs"].as_array().cloned().unwrap_or_default();
    let at_a_pod = programs
        .iter()
        .filter(|one| one["name"] == "pod_egress" && one["attached"].as_array().is_some_and(|a| !a.is_empty()));
    Ok(at_a_pod.filter_map(|one| one["id"].as_u64()).collect())
}

/// Starts a trace of the pod, and waits until it has begun.
fn trace(lab: &Lab, arguments: &[&str]) -> Result<Process> {
    let mut tool = lab.start_egressctl("worker1", &[&["trace", "--pod", "default/web"], arguments].concat())?;
    let begun = |tool: &mut Process| Ok(tool.log().contains("tracing default/web") || !tool.alive()?);
    wait_for("the trace has begun", PATIENCE, || begun(&mut tool))?;
    anyhow::ensure!(tool.alive()?, "{}", tool.log());
    Ok(tool)
}

/// Starts queries from the pod to the server in both families, and a server that answers them.
fn stream(pod: &Pod, server: &Server) -> Result<(UdpServer, Vec<UdpClients>)> {
    let answering = UdpServer::start(&server.ns, &server.ips.both(53))?;
    let start = |family| UdpClients::start(&pod.ns, server.ips.at(family, 53), 10, UdpOptions::default());
    Ok((answering, Family::BOTH.into_iter().map(start).collect::<Result<_>>()?))
}

#[test]
fn trace_reports_every_decision_and_loses_no_packet_even_when_killed() {
    Lab::builder().workers(1).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let usual = attached(lab)?;
        assert_eq!(usual.len(), 1);
        let capture = Capture::start(&server.ns, "eth0")?;
        let (_answering, flows) = stream(&pod, &server)?;
        for family in Family::BOTH {
            let target = server.ips.ip(family).to_string();
            let mut tool = trace(lab, &["--to", &target])?;
            assert_ne!(attached(lab)?, usual);
            let address = egress(family, &[10])[0];
            let opened = format!(" of {address}");
            // A new connection, and the outside's answers.
            let told = wait_until(
                "a connection is reported",
                PATIENCE,
                || sources(&pod.ns, &server, family, 1).map(|_| tool.log()),
                |log| {
                    [
                        "policy web matches the pod and the destination",
                        "a flow is opened, with port",
                        &opened,
                        "it goes to node gw",
                    ]
                    .iter()
                    .chain(&[
                        "it answers a flow of the pod: its destination becomes the pod",
                        "from the pod:",
                        "to the pod:",
                    ])
                    .all(|part| log.contains(part))
                },
            )?;
            assert!(!told.contains('<'), "a number without a name: {told}");
            let busy = lab.egressctl_text("worker1", &["trace", "--pod", "default/web"]).unwrap_err();
            assert!(format!("{busy:#}").contains("only one can run at a time"), "{busy:#}");
            tool.kill()?;
            wait_until("the usual programs are back", PATIENCE, || attached(lab), |now| *now == usual)?;
        }
        // A trace with a limit stops by itself.
        let text =
            lab.egressctl_text("worker1", &["trace", "--pod", &pod.ips.v4.to_string(), "-n", "3", "-o", "json"])?;
        assert_eq!(text.lines().filter(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()).count(), 3);
        wait_until("the usual programs are back", PATIENCE, || attached(lab), |now| *now == usual)?;
        all_answered(&flows)?;
        let seen = capture.finish()?;
        assert_no_strangers(&seen, &server, &[10]);
        Ok(())
    });
}

#[test]
fn trace_ends_with_its_agent_and_the_next_one_has_the_usual_programs() {
    Lab::builder().workers(1).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let (_answering, flows) = stream(&pod, &server)?;
        for gently in [true, false] {
            let mut tool = trace(lab, &[])?;
            let traced = attached(lab)?;
            match gently {
                true => lab.agent("worker1").terminate()?,
                false => lab.agent("worker1").kill()?,
            }
            wait_for("the trace has ended", PATIENCE, || Ok(!tool.alive()?))?;
            assert!(tool.log().contains("ended the trace"), "{}", tool.log());
            // An agent that is told to stop restores the usual programs; if it dies, the next agent does.
            assert_eq!(attached(lab)? != traced, gently);
            lab.start_agent("worker1", &calm())?;
            wait_until("usual programs", PATIENCE, || attached(lab), |now| now.len() == 1 && *now != traced)?;
        }
        all_answered(&flows)
    });
}
