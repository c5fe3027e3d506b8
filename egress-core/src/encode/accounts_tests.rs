//! Tests that numbers of accounts are stable and bounded, and that accounts that no pod of this node can use have none.

use super::*;
use crate::{
    encode::{EndpointView, PolicyView, SlotView},
    model::{EndpointId, PolicyKind},
};

fn address(n: u32) -> IpAddr {
    IpAddr::from((0xc000_0200 + n).to_be_bytes())
}

fn policy(n: usize) -> PolicyId {
    PolicyId::new(PolicyKind::Native, &format!("policy-{n}"))
}

/// Returns a view with pods by name and namespace, all selected by all policies, and with this many egress IPs for each policy.
fn view(pods: &[(&str, &str)], slots: &[u32]) -> NodeView {
    let mut view = NodeView::default();
    let mut next = 0;
    for (n, count) in slots.iter().enumerate() {
        let addresses: Vec<IpAddr> = (next..next + count).map(address).collect();
        next += count;
        view.egress_ips.extend(addresses.iter().map(|a| (*a, Default::default())));
        let slots = addresses.iter().map(|a| SlotView { address: *a, weight: 1, usable: true }).collect();
        view.policies.insert(policy(n), PolicyView { slots, ..PolicyView::default() });
    }
    let class: BTreeSet<PolicyId> = view.policies.keys().cloned().collect();
    view.classes.insert(class.clone(), Vec::new());
    for (name, namespace) in pods {
        let endpoint = EndpointView { class: class.clone(), ..EndpointView::default() };
        view.endpoints.insert(EndpointId::new(namespace, name, "uid"), endpoint);
    }
    view
}

fn account(n: usize, namespace: &str, egress_ip: Option<u32>) -> Account {
    Account { egress_ip: egress_ip.map(address), policy: policy(n), namespace: namespace.into() }
}

#[test]
fn pods_of_a_namespace_are_counted_together_by_policy_and_egress_ip() {
    let view = view(&[("a", "shop"), ("b", "shop"), ("c", "bank")], &[2]);
    let tables = Encoder::recover(&Tables::default()).encode(&view, &Tables::default()).unwrap();
    let all = accounts(&tables);
    let expected: BTreeSet<Account> =
        ["bank", "shop"].into_iter().flat_map(|ns| [None, Some(0), Some(1)].map(|ip| account(0, ns, ip))).collect();
    assert_eq!(all.values().cloned().collect::<BTreeSet<_>>(), expected);
    assert!(!all.contains_key(&u32::from(OTHER)));
    assert_eq!(tables.accounts.len(), 6, "three for each namespace, however many pods it has");
    assert_eq!(without_number(&view, &tables), 0);
}

#[test]
fn an_account_keeps_its_number_and_none_in_the_maps_is_given_away() {
    let two = view(&[("a", "shop"), ("b", "bank")], &[2]);
    let first = Encoder::recover(&Tables::default()).encode(&two, &Tables::default()).unwrap();
    let other = view(&[("c", "shop"), ("d", "desk")], &[2]);
    let second = Encoder::recover(&first).encode(&other, &first).unwrap();
    let (before, after) = (accounts(&first), accounts(&second));
    for (number, account) in &after {
        assert!(before.get(number).is_none_or(|b| b == account), "{number} changes its meaning");
        let kept = before.iter().find(|(_, b)| *b == account);
        assert!(kept.is_none_or(|(b, _)| b == number), "{account:?} gets another number");
    }
    assert_eq!(after.len(), 6);
}

#[test]
fn traffic_without_an_account_counts_as_other_and_refusals_come_first() {
    let names: Vec<String> = (0..9).map(|n| format!("ns{n}")).collect();
    let pods: Vec<(&str, &str)> = names.iter().map(|ns| ("pod", ns.as_str())).collect();
    let view = view(&pods, &[300]);
    let tables = Encoder::recover(&Tables::default()).encode(&view, &Tables::default()).unwrap();
    let all = accounts(&tables);
    assert_eq!(all.len(), MAX_ACCOUNTS - 1);
    assert_eq!(Encoder::recover(&tables).encode(&view, &tables).unwrap(), tables, "none changes its number");
    assert_eq!(without_number(&view, &tables), 9 * 301 - (MAX_ACCOUNTS - 1));
    assert_eq!(all.values().filter(|account| account.egress_ip.is_none()).count(), 9);
    assert!(all.keys().all(|number| (1..MAX_ACCOUNTS as u32).contains(number)));
}
