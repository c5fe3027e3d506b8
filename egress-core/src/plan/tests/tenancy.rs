//! Tests of namespaced policies: which pools they may use, how much of them, and that no team gets another team's address.

use std::net::IpAddr;

use crate::model::*;
use crate::plan::{Changes, ConditionKind, Plan, Reason, plan, plan_and_remember};
use crate::testing::world::*;

fn of_namespace(namespace: &str, name: &str, count: u32, ips: &[IpAddr]) -> Policy {
    let request = PoolRequest { ips: ips.iter().copied().collect(), ..request("public", count) };
    let id = PolicyId::new(PolicyKind::Namespaced, &format!("{namespace}/{name}"));
    Policy { id, ..policy(name, Source::Pools(vec![request])) }
}

/// Returns a cluster whose pool allows namespaces with the label team, and gives two addresses to those with its value `small`.
fn world() -> (Snapshot, crate::health::Health) {
    let (mut snapshot, health) = cluster(2, 1);
    for (namespace, team) in [("shop", Some("small")), ("bank", Some("large")), ("other", None)] {
        let labels = team.map(|team| ("team".to_owned(), team.to_owned())).into_iter().collect();
        snapshot.namespaces.insert(namespace.into(), labels);
    }
    let pool = snapshot.pools.values_mut().next().unwrap();
    pool.allowed = Some(Selector::new([("team".to_owned(), Requirement::Exists)]));
    pool.quotas = vec![Quota { namespaces: Selector::label("team", "small"), max: 2 }];
    (snapshot, health)
}

fn addresses(plan: &Plan, policy: &str) -> usize {
    plan.outcomes[&policy.parse().unwrap()].slots.len()
}

fn condition<'a>(plan: &'a Plan, policy: &str, kind: ConditionKind) -> (bool, Reason, &'a str) {
    let condition = &plan.outcomes[&policy.parse().unwrap()].conditions[&kind];
    (condition.holds, condition.reason, &condition.message)
}

#[test]
fn tenant_a_namespace_uses_pools_that_allow_it() {
    let (mut snapshot, health) = world();
    add_policy(&mut snapshot, of_namespace("shop", "web", 1, &[]));
    add_policy(&mut snapshot, of_namespace("other", "web", 1, &[]));
    add_policy(&mut snapshot, policy("cluster", Source::Pools(vec![request("public", 1)])));
    let before = plan(&snapshot, &health, &Plan::default());
    assert_eq!(["ns/shop/web", "ns/other/web", "cluster"].map(|policy| addresses(&before, policy)), [1, 0, 1]);
    let (_, reason, message) = condition(&before, "ns/other/web", ConditionKind::Degraded);
    assert_eq!(reason, Reason::NotAllowed);
    assert_eq!(
        message,
        "pool public is not available to namespace other: name another in egressIPPools, or ask the pool's administrator to let its \
         allowedNamespaces select the namespace"
    );
    assert_eq!(condition(&before, "ns/other/web", ConditionKind::Ready).1, Reason::NoAddress);
    snapshot.pools.values_mut().for_each(|pool| pool.allowed = None);
    let after = plan(&snapshot, &health, &before);
    assert_eq!(["ns/shop/web", "ns/other/web", "cluster"].map(|policy| addresses(&after, policy)), [0, 0, 1]);
}

#[test]
fn tenant_the_policies_of_a_namespace_share_its_quota_and_the_older_one_comes_first() {
    let (mut snapshot, health) = world();
    add_policy(&mut snapshot, Policy { created: 1, ..of_namespace("shop", "a", 2, &[]) });
    add_policy(&mut snapshot, Policy { created: 0, ..of_namespace("shop", "b", 1, &[]) });
    add_policy(&mut snapshot, of_namespace("bank", "c", 5, &[]));
    let before = plan(&snapshot, &health, &Plan::default());
    assert_eq!(["ns/shop/a", "ns/shop/b", "ns/bank/c"].map(|policy| addresses(&before, policy)), [1, 1, 5]);
    let (_, reason, message) = condition(&before, "ns/shop/a", ConditionKind::Degraded);
    assert_eq!(reason, Reason::QuotaExceeded);
    assert!(message.starts_with("1 of 2 addresses of pool public given"), "{message}");
    assert!(condition(&before, "ns/shop/a", ConditionKind::Ready).0);
    assert_eq!(plan(&snapshot, &health, &before), before);
}

#[test]
fn tenant_many_foreign_addresses_get_a_short_message_without_other_pools() {
    let (mut snapshot, health) = world();
    let foreign: Vec<IpAddr> = (0..1000u16).map(|n| v4(7, (n / 250) as u8, (n % 250) as u8)).collect();
    add_policy(&mut snapshot, of_namespace("shop", "web", 1, &foreign));
    add_policy(&mut snapshot, of_namespace("other", "web", 1, &foreign));
    let after = plan(&snapshot, &health, &Plan::default());
    assert_eq!(
        condition(&after, "ns/shop/web", ConditionKind::Degraded),
        (
            true,
            Reason::AddressNotInPool,
            "egressIPs names addresses that are in none of the ranges of pool public: 10.7.0.0, 10.7.0.1, 10.7.0.2 and 997 more; \
             use some from 10.0.0.1-10.0.3.255"
        )
    );
    let (_, reason, message) = condition(&after, "ns/other/web", ConditionKind::Degraded);
    assert_eq!(reason, Reason::NotAllowed);
    assert!(!message.contains("10."), "{message}");
}

#[test]
fn tenant_cannot_get_the_address_of_a_node_or_router_by_requesting_it() {
    let (mut snapshot, health) = world();
    let (own, router) = (v4(0, 0, 5), v4(0, 0, 254));
    add_policy(&mut snapshot, of_namespace("bank", "thief", 2, &[own, router]));
    let before = plan(&snapshot, &health, &Plan::default());
    assert_eq!(before.egress_ips.keys().copied().collect::<Vec<_>>(), [own, router], "they are not reserved yet");
    snapshot.pools.values_mut().next().unwrap().subnet =
        Some(SubnetInfo { gateway: router, prefix_length: 24, vlan: None });
    let gateway = snapshot.nodes.get_mut(&"gw1".into()).unwrap();
    gateway.addresses = [own].into();
    let addresses = [InterfaceAddress { interface: "eth0".into(), net: own.into(), default_route: true }].into();
    gateway.report = Some(NodeReport { addresses, ..Default::default() });
    let after = plan(&snapshot, &health, &before);
    assert_eq!(after.egress_ips.keys().copied().collect::<Vec<_>>(), [v4(0, 0, 1), v4(0, 0, 2)]);
    let (holds, reason, message) = condition(&after, "ns/bank/thief", ConditionKind::Degraded);
    assert_eq!((holds, reason), (true, Reason::AddressInUse));
    assert!(message.contains("addresses of nodes: 10.0.0.5; ask") && message.contains("10.0.0.254"), "{message}");
}

#[test]
fn tenant_onnogateway_says_what_becomes_of_pods_that_a_cluster_scoped_policy_selects() {
    let (mut snapshot, health) = world();
    let stray = Policy { on_no_gateway: OnNoGateway::NodeIp, ..of_namespace("other", "stray", 1, &[]) };
    add_policy(&mut snapshot, stray);
    let alone = plan(&snapshot, &health, &Plan::default());
    let said = |plan: &Plan| condition(plan, "ns/other/stray", ConditionKind::Ready).2.to_owned();
    assert!(said(&alone).contains("leaves with the node's address"), "{}", said(&alone));
    let web = EndpointSelector { pod: Some(Selector::label("app", "web")), ..Default::default() };
    let destinations = vec!["192.0.2.0/24".parse().unwrap()];
    let cluster = policy("cluster", Source::Pools(Vec::new()));
    add_policy(&mut snapshot, Policy { selectors: vec![web], destinations, ..cluster });
    let (mut current, memo) = plan_and_remember(snapshot.clone(), &health, &alone);
    assert_eq!(said(&current), said(&alone), "it selects none of the same pods");
    // A pod that both select.
    add_pod(&mut snapshot, "web", "w0", labels(&[("app", "web")]));
    let web =
        snapshot.endpoints.iter().find(|(id, _)| *id.name == *"web").map(|(id, pod)| (id.clone(), Some(pod.clone())));
    let changes = Changes { pods: web.into_iter().collect(), ..Changes::default() };
    assert!(memo.change(&health, &mut current, changes).is_none(), "a full plan");
    let both = plan(&snapshot, &health, &current);
    assert!(
        said(&both).contains("is dropped, despite onNoGateway, for pods that a cluster-scoped policy also selects"),
        "{}",
        said(&both)
    );
}

#[test]
fn tenant_cannot_get_the_address_of_another_namespace_by_requesting_it() {
    let (mut snapshot, health) = world();
    let wanted = v4(0, 0, 9);
    add_policy(&mut snapshot, Policy { created: 5, ..of_namespace("shop", "web", 1, &[wanted]) });
    let first = plan(&snapshot, &health, &Plan::default());
    // An older policy, which was changed later.
    add_policy(&mut snapshot, Policy { created: 1, ..of_namespace("bank", "thief", 1, &[wanted]) });
    add_policy(&mut snapshot, Policy { created: 6, ..of_namespace("shop", "mail", 1, &[wanted]) });
    let second = plan(&snapshot, &health, &first);
    let users: Vec<String> = second.egress_ips[&wanted].users.keys().map(ToString::to_string).collect();
    assert_eq!(users, ["ns/shop/mail", "ns/shop/web"]);
    assert_eq!(addresses(&second, "ns/bank/thief"), 0);
    assert_eq!(condition(&second, "ns/bank/thief", ConditionKind::Conflicting).1, Reason::AddressInUse);
    // Cluster-scoped policies come before all others.
    let named = vec![gateway(Selector::everything(), AddressSource::Ip(wanted))];
    add_policy(&mut snapshot, Policy { created: 9, ..policy("cluster", Source::Gateways(named)) });
    let third = plan(&snapshot, &health, &second);
    let users: Vec<String> = third.egress_ips[&wanted].users.keys().map(ToString::to_string).collect();
    assert_eq!(users, ["cluster"]);
}

fn holders(plan: &Plan, address: IpAddr) -> Vec<String> {
    plan.egress_ips[&address].users.keys().map(ToString::to_string).collect()
}

/// docs/failures.md: tenant.
#[test]
fn tenant_cannot_get_a_draining_address_of_another_namespace_by_requesting_it() {
    let (mut snapshot, health) = world();
    snapshot.drain_timeout = std::time::Duration::from_secs(3600);
    add_policy(&mut snapshot, of_namespace("shop", "web", 1, &[]));
    let first = plan(&snapshot, &health, &Plan::default());
    let address = v4(0, 0, 1);
    assert_eq!(holders(&first, address), ["ns/shop/web"]);
    // The administrator moves the address to another pool, from which another team requests it.
    let public = snapshot.pools.values_mut().next().unwrap();
    public.ranges = vec![IpRange::new(v4(0, 0, 2), v4(0, 0, 9)).unwrap()];
    let other = Pool { allowed: public.allowed.clone(), ..pool("other", address, address) };
    snapshot.pools.insert(other.id.clone(), other);
    let request = PoolRequest { ips: [address].into(), ..request("other", 1) };
    let thief = Policy { source: Source::Pools(vec![request]), ..of_namespace("bank", "thief", 1, &[]) };
    add_policy(&mut snapshot, thief);
    let second = plan(&snapshot, &health, &first);
    assert!(second.egress_ips[&address].draining);
    assert_eq!(holders(&second, address), ["ns/shop/web"]);
    let (_, reason, message) = condition(&second, "ns/bank/thief", ConditionKind::Conflicting);
    assert_eq!(reason, Reason::AddressInUse);
    assert_eq!(message, "10.0.0.1 is used outside the namespace: remove it from egressIPs, or request another one");
    assert_eq!(plan(&snapshot, &health, &second), second, "planning again changes nothing");
    // After the drain, the other team may have it.
    snapshot.drained = [address].into();
    let third = plan(&snapshot, &health, &second);
    assert!(!third.egress_ips.contains_key(&address));
    assert_eq!(holders(&plan(&snapshot, &health, &third), address), ["ns/bank/thief"]);
}

#[test]
fn tenant_refused_addresses_take_no_quota_from_other_policies_of_the_namespace() {
    let (mut snapshot, health) = world();
    let wanted = v4(0, 0, 9);
    add_policy(&mut snapshot, Policy { created: 2, ..of_namespace("bank", "c", 1, &[wanted]) });
    add_policy(&mut snapshot, Policy { created: 0, ..of_namespace("shop", "a", 1, &[]) });
    add_policy(&mut snapshot, Policy { created: 1, ..of_namespace("shop", "b", 1, &[]) });
    let first = plan(&snapshot, &health, &Plan::default());
    let of = |plan: &Plan, policy: &str| {
        let slots = &plan.outcomes[&policy.parse().unwrap()].slots;
        slots.iter().map(|slot| slot.address).collect::<Vec<_>>()
    };
    assert_eq!(["ns/shop/a", "ns/shop/b"].map(|policy| of(&first, policy)), [[v4(0, 0, 1)], [v4(0, 0, 2)]]);
    add_policy(&mut snapshot, Policy { created: 0, ..of_namespace("shop", "a", 2, &[wanted]) });
    let second = plan(&snapshot, &health, &first);
    assert_eq!(["ns/shop/a", "ns/shop/b"].map(|policy| of(&second, policy)), [[v4(0, 0, 1)], [v4(0, 0, 2)]]);
    assert_eq!(condition(&second, "ns/shop/a", ConditionKind::Conflicting).1, Reason::AddressInUse);
    assert_eq!(condition(&second, "ns/shop/b", ConditionKind::Degraded).1, Reason::AsExpected);
}

#[test]
fn tenant_is_not_told_which_policy_of_another_namespace_has_an_address() {
    let (mut snapshot, health) = world();
    add_policy(&mut snapshot, Policy { created: 0, ..of_namespace("bank", "secret", 1, &[]) });
    add_policy(&mut snapshot, policy("hidden", Source::Pools(vec![request("public", 1)])));
    let first = plan(&snapshot, &health, &Plan::default());
    let addresses: Vec<IpAddr> = first.egress_ips.keys().copied().collect();
    // It is older, so that it takes precedence and has no other conflict.
    add_policy(&mut snapshot, Policy { created: -1, ..of_namespace("shop", "web", 2, &addresses) });
    let second = plan(&snapshot, &health, &first);
    let (_, reason, message) = condition(&second, "ns/shop/web", ConditionKind::Conflicting);
    assert_eq!(reason, Reason::AddressInUse);
    assert_eq!(
        message,
        "10.0.0.1 is used outside the namespace: remove it from egressIPs, or request another one; \
         10.0.0.2 is used outside the namespace: remove it from egressIPs, or request another one"
    );
}
