//! Pools with addresses in their own subnets and VLANs.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::Result;
use lab::traffic::{BulkServer, Direction, ServerMode, TcpClients, TcpOptions, TcpServer, bulk};
use lab::{Family, Lab, PodSpec, Server, Vlans, topology::Dual};

use crate::support::{PATIENCE, answers_in_fragments, at, counter, of_app, pool, start, wait_in_force, wait_sources};

/// The gateway of the subnet with this number, which is also the server's address in that subnet.
pub fn gateway(number: u8) -> Dual {
    Dual { v4: Ipv4Addr::new(172, 16, number, 1), v6: Ipv6Addr::new(0xfd16, 0, 0, number.into(), 0, 0, 0, 1) }
}

/// A pool of two addresses of this family in the subnet with this number.
pub fn in_subnet(name: &str, family: Family, number: u8, vlan: Option<u16>) -> String {
    let (start, end, length) = match family {
        Family::V4 => (format!("172.16.{number}.10"), format!("172.16.{number}.11"), 24),
        Family::V6 => (format!("fd16:0:0:{number:x}::10"), format!("fd16:0:0:{number:x}::11"), 64),
    };
    let vlan = vlan.map_or(String::new(), |vlan| format!(", vlan: {vlan}"));
    format!(
        "apiVersion: spillway.io/v1beta1\nkind: EgressIPPool\nmetadata: {{name: {name}}}\nspec:\n  ipRanges: [{{start: \"{start}\", end: \"{end}\"}}]\n  \
         nodeSelector: {{matchLabels: {{egress: \"true\"}}}}\n  subnetInfo: {{gateway: \"{}\", prefixLength: {length}{vlan}}}\n",
        gateway(number).ip(family)
    )
}

/// Returns the addresses of a pool in one subnet.
pub fn addresses(family: Family, number: u8) -> [IpAddr; 2] {
    [0x10, 0x11].map(|host: u16| match family {
        Family::V4 => IpAddr::from([172, 16, number, if host == 0x10 { 10 } else { 11 }]),
        Family::V6 => IpAddr::from(Ipv6Addr::new(0xfd16, 0, 0, number.into(), 0, 0, 0, host)),
    })
}

/// Returns the number of packets that the drivers of both gateways forwarded, and of all packets that the gateways forwarded.
fn sent_by_gateways(lab: &Lab) -> Result<[u64; 2]> {
    let sum = |names: &[&str]| {
        let each = ["gw1", "gw2"].into_iter().flat_map(|gateway| names.iter().map(move |name| (gateway, name)));
        each.map(|(gateway, name)| counter(lab, gateway, name)).sum::<Result<u64>>()
    };
    Ok([sum(&["xdp_sent"])?, sum(&["gateway_forwarded", "gateway_replied"])?])
}

/// Twenty concurrent VLANs, each with its own subnet, gateway and policy.
#[test]
fn twenty_subnets_in_vlans_of_their_own() {
    const COUNT: u8 = 20;
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let server = lab.server("server1").clone();
        let vlans: BTreeMap<u16, Vec<String>> = (1..=COUNT)
            .map(|number| {
                let gateway = gateway(number);
                (100 + u16::from(number), vec![format!("{}/24", gateway.v4), format!("{}/64", gateway.v6)])
            })
            .collect();
        let _vlans = Vlans::start(&server.ns, "eth0", &vlans)?;
        let mut pods = Vec::new();
        for number in 1..=COUNT {
            let (app, vlan) = (format!("app{number}"), Some(100 + u16::from(number)));
            let pools = Family::BOTH.map(|family| format!("{app}-{}", format!("{family:?}").to_lowercase()));
            for (family, name) in Family::BOTH.into_iter().zip(&pools) {
                lab.manifests().write(name, &in_subnet(name, family, number, vlan))?;
            }
            let [v4, v6] = &pools;
            lab.manifests().write(
                &app,
                &of_app(&app, &format!("\n  egressIPPools: [{{name: {v4}, count: 2}}, {{name: {v6}, count: 2}}]")),
            )?;
            pods.push((number, lab.add_pod(PodSpec::new(&app, "worker1").label("app", &app))?));
        }
        start(lab)?;
        for (number, pod) in &pods {
            // The server is reachable only in the VLAN: its address there is the subnet's gateway.
            let inside =
                Server { name: format!("vlan{}", 100 + u16::from(*number)), ips: gateway(*number), ..server.clone() };
            for family in Family::BOTH {
                wait_sources(&pod.ns, &inside, family, &addresses(family, *number))?;
            }
        }
        let before = sent_by_gateways(lab)?;
        // All VLANs carry connections concurrently.
        let targets = |number: u8| Family::BOTH.map(|family| at(gateway(number).ip(family), 80));
        let listening: Vec<SocketAddr> = (1..=COUNT).flat_map(targets).collect();
        let _streams = TcpServer::start(&server.ns, &listening, ServerMode::Stream)?;
        let mut all = Vec::new();
        for (number, pod) in &pods {
            for target in targets(*number) {
                all.push(TcpClients::establish(&pod.ns, target, 1, TcpOptions::default())?);
            }
        }
        all.iter().try_for_each(|clients| clients.wait_progress(3, PATIENCE))?;
        drop(all);
        // Bulk traffic passes, too: merged packets keep their tag. So do fragments that have waited.
        let (number, pod) = &pods[6];
        let inside = Server { ips: gateway(*number), ..server.clone() };
        for family in Family::BOTH {
            answers_in_fragments(pod, &inside, family)?;
            let target = at(gateway(*number).ip(family), 5001);
            let _listening = BulkServer::start(&server.ns, &[target])?;
            for direction in [Direction::Upload, Direction::Download] {
                bulk(&pod.ns, target, direction, 4 << 20)?;
            }
        }
        if std::env::var_os("SPILLWAY_TEST_XDP").is_some() {
            let now = sent_by_gateways(lab)?;
            let [by_drivers, all] = [now[0] - before[0], now[1] - before[1]];
            // Only fragments are left to TC. If drivers served only one direction, their share would be about half.
            assert!(all > 1000 && by_drivers > all * 9 / 10, "{by_drivers} of {all}: {:?}", lab.counters("gw1")?);
        }
        Ok(())
    });
}

#[test]
fn a_subnet_without_a_vlan_has_a_gateway_of_its_own() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let server = lab.server("server1").clone();
        let inside = Server { ips: gateway(1), ..server.clone() };
        server.ns.ip(&[
            format!("addr add {}/24 dev eth0", inside.ips.v4),
            format!("addr add {}/64 dev eth0", inside.ips.v6),
        ])?;
        lab.manifests().write("v4", &in_subnet("v4", Family::V4, 1, None))?;
        lab.manifests().write("v6", &in_subnet("v6", Family::V6, 1, None))?;
        lab.manifests()
            .write("web", &of_app("web", "\n  egressIPPools: [{name: v4, count: 2}, {name: v6, count: 2}]"))?;
        // A pool in the node's own subnet keeps working next to it.
        lab.manifests().write("public", &pool("public", 40, 41, Some("10s")))?;
        lab.manifests().write("api", &of_app("api", "\n  egressIPPools: [{name: public, count: 2}]"))?;
        let web = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let local = lab.add_pod(PodSpec::new("local", "gw1").label("app", "web"))?;
        let api = lab.add_pod(PodSpec::new("api", "worker1").label("app", "api"))?;
        start(lab)?;
        for family in Family::BOTH {
            for pod in [&web, &local] {
                wait_sources(&pod.ns, &inside, family, &addresses(family, 1))?;
            }
        }
        wait_in_force(&api, &server, &[40, 41])
    });
}
