//! The programs' counts of flows' traffic by policy, namespace and egress IP, as metrics.
//!
//! Each account is a separate series. A sum over a policy's accounts would fall when one of them is removed, which Prometheus would treat
//! as a restart.

use super::family::{Family, Labels, counter, gauge};
use egress_common::{
    abi::{NameKey, name_kind},
    net,
    traffic::{AccountKey, OTHER, REFUSALS, REFUSED, Traffic},
};
use egress_core::encode::name_text;
use egress_node::datapath::maps::{Maps, MapsError};
use std::{collections::BTreeMap, net::IpAddr};

/// The label of traffic that has no account. It cannot be the name of a policy, a namespace or an address.
pub(super) const OTHERS: &str = "_other";

/// The counts of one account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Counted {
    number: u32,
    policy: String,
    namespace: String,
    /// `None` for refused flows.
    egress_ip: Option<String>,
    traffic: Traffic,
}

impl Counted {
    fn of(maps: &Maps, key: &AccountKey, number: u32) -> Result<Option<Self>, MapsError> {
        let name = |kind, id| Ok(maps.names.get(&NameKey { kind, id })?.as_ref().map(name_text));
        let egress_ip = match key.egress {
            REFUSED => None,
            index => Some(net::from_any(maps.egress_ips.get(index)?.addr).to_string()),
        };
        let names = (name(name_kind::POLICY, key.policy)?, name(name_kind::NAMESPACE, key.namespace)?);
        let (Some(policy), Some(namespace)) = names else { return Ok(None) };
        Ok(Some(Self { number, policy, namespace, egress_ip, traffic: maps.traffic(number)? }))
    }

    fn labels(&self) -> Labels {
        let mut labels = vec![("policy", self.policy.clone()), ("namespace", self.namespace.clone())];
        labels.extend(self.egress_ip.clone().map(|ip| ("egress_ip", ip)));
        labels
    }

    fn labels_and(&self, name: &'static str, value: &str) -> Labels {
        let mut labels = self.labels();
        labels.push((name, value.to_owned()));
        labels
    }
}

/// Returns the counts of translated and of refused flows that have no account.
fn others(traffic: Traffic) -> [Counted; 2] {
    [Some(OTHERS.to_owned()), None].map(|egress_ip| Counted {
        number: OTHER.into(),
        policy: OTHERS.into(),
        namespace: OTHERS.into(),
        egress_ip,
        traffic,
    })
}

/// Reads all accounts.
pub(super) fn read(maps: &Maps) -> Result<Vec<Counted>, MapsError> {
    let mut all: Vec<Counted> = others(maps.traffic(OTHER.into())?).into();
    for (key, number) in maps.accounts.entries()? {
        all.extend(Counted::of(maps, &key, number)?);
    }
    Ok(all)
}

/// Returns the metrics of these accounts. `flows` has each account's number of flows, by the account's number.
pub(super) fn families(all: &[Counted], flows: &BTreeMap<u32, u64>) -> Vec<Family> {
    let translated = || all.iter().filter(|counted| counted.egress_ip.is_some());
    let both_ways = |sent: fn(&Traffic) -> u64, received: fn(&Traffic) -> u64| {
        let of = |c: &Counted| {
            [("sent", sent), ("received", received)]
                .map(|(direction, value)| (c.labels_and("direction", direction), value(&c.traffic)))
        };
        translated().flat_map(of).collect()
    };
    let opened = translated().map(|c| (c.labels(), c.traffic.opened)).collect();
    let open = translated().map(|c| (c.labels(), flows.get(&c.number).copied().unwrap_or(0) as f64)).collect();
    let by_reason = |c: &Counted| {
        let reason = |name: &'static str| name.trim_start_matches("drop_");
        let of = |(reason_, count): (egress_common::verdict::Counter, u64)| {
            (c.labels_and("reason", reason(reason_.name())), count)
        };
        REFUSALS.into_iter().zip(c.traffic.refused).map(of).collect::<Vec<_>>()
    };
    let refused = all.iter().filter(|counted| counted.egress_ip.is_none()).flat_map(by_reason).collect();
    vec![
        counter(
            "spillway_policy_packets",
            "packets of flows, sent to the outside and received from there",
            both_ways(|t| t.sent_packets, |t| t.received_packets),
        ),
        counter(
            "spillway_policy_bytes",
            "bytes of their IP packets; headers of packets that were merged count once",
            both_ways(|t| t.sent_bytes, |t| t.received_bytes),
        ),
        counter("spillway_policy_flows_opened", "new flows that were translated", opened),
        counter("spillway_policy_flows_refused", "first packets of flows that were dropped, by reason", refused),
        gauge("spillway_policy_flows", "flows in the table, as last counted", open),
    ]
}

/// Returns an address as a label.
pub(super) fn of_egress_ip(ip: &IpAddr) -> Labels {
    vec![("egress_ip", ip.to_string())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_common::verdict::Counter;

    #[test]
    fn traffic_without_an_account_has_separate_series() {
        let mut traffic = Traffic { opened: 3, ..Traffic::NONE };
        traffic.refused[1] = 2;
        assert_eq!(REFUSALS[1], Counter::DropNoPort);
        let families = families(&others(traffic), &[(0, 7)].into());
        let label = |name, value: &str| (name, value.to_owned());
        let other = [label("policy", "_other"), label("namespace", "_other")];
        let with = |more: (&'static str, String)| other.iter().cloned().chain([more]).collect::<Labels>();
        assert_eq!(
            families[2],
            counter(
                "spillway_policy_flows_opened",
                "new flows that were translated",
                vec![(with(label("egress_ip", "_other")), 3)]
            )
        );
        assert_eq!(
            families[4].clone(),
            gauge(
                "spillway_policy_flows",
                "flows in the table, as last counted",
                vec![(with(label("egress_ip", "_other")), 7.0)]
            )
        );
        let reasons =
            ["no_gateway", "no_port", "port_share", "pod_share", "table_full"].into_iter().zip([0, 2, 0, 0, 0]);
        let refused = reasons.map(|(reason, count)| (with(label("reason", reason)), count)).collect();
        assert_eq!(
            families[3],
            counter("spillway_policy_flows_refused", "first packets of flows that were dropped, by reason", refused)
        );
    }
}
