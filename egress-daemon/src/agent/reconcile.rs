//! Carrying a view out: everything that changes when objects, links or probes do.

use super::{
    Agent, Settings,
    blocks::Circumstances,
    facts::World,
    handover,
    hooks::Wanted,
    tell::{self, Running},
    view::{self, Facts},
};
use crate::{
    datapath::{encode::NodeView, load},
    host::{
        classify::{InterfaceRules, classify},
        sysctl, tunnel,
    },
    model::NodeName,
    store::{
        Key,
        lease::{LEASE_NAMESPACE, LeaseKeeper, LeaseTerms, gateway_lease},
    },
};
use egress_common::{
    abi::ticks,
    config::{self, Config},
};
use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

/// Bytes that a packet grows by in the tunnel: outer Ethernet is not counted, inner Ethernet (14), VXLAN (8), UDP (8) and
/// outer IPv4 (20) or IPv6 (40) are.
const OVERHEAD: [u32; 2] = [50, 70];
/// IP and TCP headers without options, for IPv4 and IPv6.
const HEADERS: [u32; 2] = [40, 60];
/// The smallest segment that is ever asked for (RFC 9293, section 3.7.1).
const MIN_MSS: u32 = 536;

/// What tells this node's interfaces apart.
pub(super) fn rules(world: &World, node: &NodeName, settings: &Settings) -> InterfaceRules {
    let node = world.snapshot.nodes.get(node);
    InterfaceRules {
        uplinks: settings.uplinks.clone(),
        pod_interfaces: settings.pod_interfaces.clone(),
        tunnel: settings.tunnel.name.clone(),
        node_addresses: node.into_iter().flat_map(|n| n.addresses.iter().copied()).collect(),
    }
}

impl Agent {
    /// Makes the view again and carries out what is different.
    pub(super) async fn reconcile(&mut self) {
        self.complaints.clear();
        let links = self.links.current();
        let rules = rules(&self.world, &self.node, &self.settings);
        self.roles = classify(&links, &rules);
        let config = self.config();
        let classes = view::classes_of(&self.world.snapshot, &self.node);
        self.used = view::used(&self.world.plan, &classes);
        self.decide_blocks();
        self.histories.update(&self.world.snapshot, &classes);
        let probes = self.gateways.states();
        self.handover.update(&handover::Circumstances {
            node: &self.node,
            snapshot: &self.world.snapshot,
            plan: &self.world.plan,
            probes: &probes,
            now: self.start.elapsed(),
        });
        let facts = Facts {
            node: &self.node,
            snapshot: &self.world.snapshot,
            plan: &self.world.plan,
            links: &links,
            roles: &self.roles,
            probes: &probes,
            handover: &self.handover,
            with_history: &self.histories.with_history(),
            except_cidrs: &self.settings.except_cidrs,
            silent: self.settings.silent,
            withheld: &self.withheld,
            withdrawn: &self.owned.withdrawn(),
            now: self.start.elapsed(),
            config,
        };
        let view = view::view(&facts, &mut self.effective);
        let announced = view::announced(&facts);
        let revision = self.world.highest_lease(&self.node).max(self.lease_revision);

        self.hooks.set(Wanted { rules, tunnel: self.tunnel.index });
        self.complaints.extend(self.hooks.complaints());
        let mut written = false;
        match self.encoder.encode(&view, self.writer.present()) {
            Ok(tables) => match self.writer.write(tables) {
                Ok(()) => {
                    self.lease_revision = revision;
                    self.carries = self.world.owned(&self.node);
                    written = true;
                }
                Err(e) => self.complaints.push(e.to_string()),
            },
            Err(overflow) => self.complaints.push(overflow.to_string()),
        }
        let probed = probed(&self.node, &view);
        self.gateways.set(&probed);
        let running = Running {
            uptime: self.start.elapsed(),
            store: &self.source,
            attach: self.hooks.mode(),
            tunnel_addresses: self.tunnel_addresses(),
            lease_held: self.lease.as_ref().map(|_| self.lease_held),
            lease_revision: self.lease_revision,
            gateways: &self.gateways,
            store_problems: self.store.problems(),
            complaints: &self.complaints,
        };
        self.publish.send_replace(Arc::new(tell::state(&self.world, &facts, &view, &running)));
        if written {
            self.withheld.written(self.start.elapsed());
        }
        let places = announced
            .into_iter()
            .filter_map(|(ip, place)| Some((ip, (place, self.world.plan.egress_ips.get(&ip)?.epoch))));
        self.owned.set(&if self.settings.silent { BTreeMap::new() } else { places.collect() });
        self.owned.tick();
        self.forward();
        self.keep_lease();
        for complaint in &self.complaints {
            tracing::error!("{complaint}");
        }
        self.status_due = true;
    }

    /// Decides which leased blocks are not used for new flows and which are given back. Whether the tables have to be
    /// written again.
    pub(super) fn decide_blocks(&mut self) -> bool {
        let reported = self.world.egress_node(&self.node).and_then(|n| n.status.as_ref());
        self.withheld.update(&Circumstances {
            node: &self.node,
            plan: &self.world.plan,
            used: &self.used,
            reported,
            ports: &self.ports,
            counted: self.counted,
            now: self.start.elapsed(),
        })
    }

    /// A gateway forwards.
    fn forward(&mut self) {
        if !self.world.may_be_gateway(&self.node) {
            return;
        }
        let links = self.links.current();
        let names: Vec<&str> =
            self.roles.uplinks.iter().filter_map(|i| Some(links.links.get(i)?.name.as_str())).collect();
        match self.sysctls.apply(&sysctl::forwarding_settings(names)) {
            Ok(warnings) => {
                self.complaints.extend(warnings.iter().map(|w| format!("{}: {}: {}", w.object, w.message, w.remedy)))
            }
            Err(e) => self.complaints.push(e.to_string()),
        }
    }

    /// Keeps the lease while this node may be a gateway.
    fn keep_lease(&mut self) {
        match (self.world.may_be_gateway(&self.node), self.lease.is_some()) {
            (true, false) => {
                let terms = LeaseTerms {
                    key: Key { namespace: LEASE_NAMESPACE.into(), name: gateway_lease(self.node.as_str()) },
                    identity: self.node.to_string(),
                    duration: self.settings.lease_duration,
                    renew_every: self.settings.lease_renew,
                };
                self.lease = Some(LeaseKeeper::start(self.store.clone(), terms));
            }
            // Dropped, it lapses: whatever this node owned goes to others.
            (false, true) => self.lease = None,
            _ => {}
        }
    }

    fn config(&self) -> Config {
        let links = self.links.current();
        let underlays = self.roles.underlays.keys().filter_map(|i| links.links.get(i));
        let mtu = underlays.map(|l| l.mtu).min().unwrap_or(tunnel::MTU).min(tunnel::MTU);
        let ipv6_underlay = self.tunnel_addresses().first().is_some_and(IpAddr::is_ipv6);
        let room = mtu.saturating_sub(OVERHEAD[ipv6_underlay as usize]);
        let mss = |family: usize| room.saturating_sub(HEADERS[family]).max(MIN_MSS);
        let t = &self.settings.timeouts;
        Config {
            tunnel_ifindex: self.tunnel.index,
            mss_v4: mss(0),
            mss_v6: mss(1),
            flags: load::config_flags(),
            tcp_established: ticks(t.tcp_established.as_secs()),
            tcp_transitory: ticks(t.tcp_transitory.as_secs()),
            udp: ticks(t.udp.as_secs()),
            icmp: ticks(t.icmp.as_secs()),
            ..config::UNSET
        }
    }

    /// Where other nodes reach this node's tunnel: its addresses in Kubernetes, IPv4 first, or those of the underlay.
    pub(super) fn tunnel_addresses(&self) -> Vec<IpAddr> {
        let links = self.links.current();
        let node = self.world.snapshot.nodes.get(&self.node);
        let mut addresses: Vec<IpAddr> = node.into_iter().flat_map(|n| n.addresses.iter().copied()).collect();
        addresses.retain(|a| links.by_address(*a).is_some());
        if addresses.is_empty() {
            addresses = self.roles.underlays.values().flatten().copied().collect();
        }
        addresses.sort_by_key(|a| (a.is_ipv6(), *a));
        addresses
    }
}

/// The gateways that policies of this node's pods use, and where they are.
fn probed(node: &NodeName, view: &NodeView) -> BTreeMap<NodeName, IpAddr> {
    let slots = view.policies.values().flat_map(|p| &p.slots);
    let owners = slots.filter_map(|s| view.egress_ips.get(&s.address)?.gateway.as_ref());
    owners
        .filter(|owner| *owner != node)
        .filter_map(|owner| Some((owner.clone(), *view.nodes.get(owner)?.first()?)))
        .collect()
}
