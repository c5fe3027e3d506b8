//! The shipped examples do what their comments say, in both families. (They are also tested on a real cluster, which has only IPv4.)

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use lab::{Family, Lab, PodSpec};

use crate::per_endpoint::{assignments_of, loads};
use crate::support::{egress, sources, start, wait_in_force, wait_sources};

/// The egress IP of each pod.
type Dealt = BTreeMap<String, IpAddr>;

/// Writes every file of `manifests/examples`.
fn write_examples(lab: &Lab) -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/examples");
    let mut count = 0;
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let (Some(name), Some("yaml")) = (path.file_stem(), path.extension().and_then(|e| e.to_str())) else {
            continue;
        };
        lab.manifests().write(&name.to_string_lossy(), &fs::read_to_string(&path)?)?;
        count += 1;
    }
    ensure!(count >= 5, "only {count} examples in {}", folder.display());
    Ok(())
}

#[test]
fn the_examples_do_what_they_say_in_both_families() {
    Lab::builder().run(|lab| {
        write_examples(lab)?;
        let web = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let mail = lab.add_pod(PodSpec::new("mail", "worker2").label("app", "mail"))?;
        let nodes = ["worker1", "worker2", "worker1"];
        for (number, node) in nodes.into_iter().enumerate() {
            lab.add_pod(PodSpec::new(&format!("ledger-{number}"), node).label("app", "ledger"))?;
        }
        start(lab)?;
        let (usual, partner) = (lab.server("server1").clone(), lab.server("far1").clone());
        // web: any of three egress IPs; its partner sees an address of its own.
        wait_in_force(&web, &usual, &[10, 11, 12])?;
        wait_in_force(&web, &partner, &[40])?;
        // mail: the addresses named in its policy; IPv6 is left alone.
        wait_sources(&mail.ns, &usual, Family::V4, &egress(Family::V4, &[30, 31, 32]))?;
        let plain = sources(&mail.ns, &usual, Family::V6, 8)?;
        let ours = egress(Family::V6, &(10..=40).collect::<Vec<_>>());
        ensure!(!plain.is_empty() && plain.keys().all(|ip| !ours.contains(ip)), "{plain:?}");
        // ledger: one address per pod, assigned in turn; it changes only when necessary.
        let of_ledger = |lab: &Lab, good: fn(&Dealt) -> bool| -> Result<[Dealt; 2]> {
            let of = |family| assignments_of("ledger", lab, family, &[20, 21, 22], good);
            Ok([of(Family::V4)?, of(Family::V6)?])
        };
        let before = of_ledger(lab, |all| loads(all) == [1, 1, 1])?;
        lab.add_pod(PodSpec::new("ledger-15", "worker2").label("app", "ledger"))?;
        let more = of_ledger(lab, |all| all.len() == 4)?;
        lab.remove_pod("ledger-1")?;
        let fewer = of_ledger(lab, |all| all.len() == 3)?;
        for (before, (more, fewer)) in before.iter().zip(more.iter().zip(&fewer)) {
            assert!(before.iter().all(|(pod, ip)| more[pod] == *ip), "{before:?} {more:?}");
            assert!(fewer.iter().all(|(pod, ip)| more[pod] == *ip), "{more:?} {fewer:?}");
        }
        Ok(())
    });
}
