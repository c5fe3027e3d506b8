//! A pod's last packets.

use anyhow::Result;
use lab::{Capture, Cni, Family, Lab, Pod, PodSpec, wait_until};

use crate::support::{PATIENCE, calm, egress, has_bpftool, knows, wait_in_force, wait_sources, web_pod};

/// Waits until the datapath knows `count` of a pod's two addresses.
fn wait_known(lab: &Lab, pod: &Pod, count: usize) -> Result<()> {
    let known = || Ok(Family::BOTH.iter().filter(|&&family| knows(lab, "worker1", pod.ips.ip(family))).count());
    wait_until("the datapath knows the pod, or does not", PATIENCE, known, |known| *known == count).map(drop)
}

/// docs/failures.md: gone-pod. The pod's object is deleted, as by `kubectl delete --force`, but the pod keeps running.
#[test]
fn gone_pod_keeps_its_policy_until_its_interface_is_gone() {
    lab::require_root!();
    lab::require!(has_bpftool(), "bpftool is missing: apt-get install bpftool");
    for cni in Cni::BOTH {
        Lab::builder().workers(1).gateways(1).cni(cni).run(|lab| {
            let (pod, server) = web_pod(lab, &[10])?;
            // Once the agent has handled a later change, it has also handled the earlier one.
            let stays = |lab: &mut Lab, name: &str, change: &dyn Fn(&mut Lab) -> Result<()>| {
                let capture = Capture::start(&server.ns, "eth0")?;
                change(lab)?;
                let next = lab.add_pod(PodSpec::new(name, "worker1"))?;
                wait_known(lab, &next, 2)?;
                wait_in_force(&pod, &server, &[10])?;
                let trace = capture.finish()?;
                for family in Family::BOTH {
                    let strangers = trace.unexpected_sources_towards(server.ips.ip(family), &egress(family, &[10]));
                    assert!(strangers.is_empty(), "{cni:?}, {name}: {strangers:?}");
                }
                anyhow::Ok(())
            };
            stays(lab, "next", &|lab| lab.manifests().remove_pod(&pod))?;
            // It is the last pod on this node that the policy selects, and a restarted agent has never seen its object.
            stays(lab, "later", &|lab| {
                lab.agent("worker1").kill()?;
                lab.start_agent("worker1", &calm())
            })?;
            // Once the interface is gone, another pod may have the address.
            lab.node("worker1").ns.ip(&[format!("link del {}", pod.host_interface)])?;
            wait_known(lab, &pod, 0)?;
            let heir = lab.add_pod(PodSpec::new("heir", "worker1").ips(pod.ips))?;
            for family in Family::BOTH {
                wait_sources(&heir.ns, &server, family, &[lab.node("worker1").underlay.ip(family)])?;
            }
            Ok(())
        });
    }
}
