//! Chooses the pods that test whether policies keep their promises, and judges the results. Pure.

use super::ask::Asked;
use egress_core::model::{Distribution, Labels, Policy, Selector, ZoneMode};
use egress_objects::translate::NAMESPACE_NAME;
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

/// The prefix of the names of the test's pods and namespaces.
pub const PREFIX: &str = "spillway-test";
/// The number of connections of a pod whose policy does not promise to use all egress IPs.
const CONNECTIONS: u32 = 16;
/// The number of connections for each egress IP that must be seen. With this many, a test misses an egress IP by chance
/// once in 10^10 times.
const CONNECTIONS_EACH: u64 = 24;
/// The maximum number of connections. A test that needs more takes too long, and does not check that all egress IPs are used.
const MAX_CONNECTIONS: u64 = 4_000;

/// An egress IP of a policy, as in the policy's status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The address.
    pub address: IpAddr,
    /// Its share of new flows, relative to the other slots' weights.
    pub weight: u32,
    /// Whether its gateway is alive.
    pub healthy: bool,
}

/// A policy, and the egress IPs that take new flows.
#[derive(Clone, Debug)]
pub struct Known {
    /// The policy.
    pub policy: Policy,
    /// Its egress IPs except draining ones.
    pub slots: Vec<Slot>,
}

impl Known {
    /// Returns the policy's kind and name.
    pub fn name(&self) -> String {
        self.policy.id.to_string()
    }
}

/// The namespace of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Home {
    /// An existing namespace.
    Existing(String),
    /// A namespace that is created with these labels for the test, and deleted afterwards.
    New(String, Labels),
}

impl Home {
    /// Returns the namespace's name.
    pub fn name(&self) -> &str {
        match self {
            Home::Existing(name) | Home::New(name, _) => name,
        }
    }
}

/// A rule for the source addresses that a server sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Only these addresses, and each of them.
    All,
    /// Only these addresses.
    Any,
    /// Only one of these addresses.
    One,
    /// None of these addresses.
    NoneOf,
}

/// The source addresses that one server may see of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    /// The server.
    pub server: SocketAddr,
    /// The rule for `addresses`.
    pub rule: Rule,
    /// The egress IPs of the server's family.
    pub addresses: BTreeSet<IpAddr>,
}

/// A pod, and the source addresses that servers may see of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// The policy; `None` for the pod that no policy selects.
    pub policy: Option<String>,
    /// The pod's name.
    pub pod: String,
    /// Its namespace.
    pub home: Home,
    /// Its labels.
    pub labels: Labels,
    /// The nodes on which it may run.
    pub nodes: Selector,
    /// The number of connections that it opens to each server.
    pub connections: u32,
    /// The promises, one for each server.
    pub promises: Vec<Promise>,
}

/// The test of a policy, or of the pod that no policy selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Case {
    /// Tested with a pod.
    Tried(Trial),
    /// Not tested.
    Skipped {
        /// The policy; `None` for the pod that no policy selects.
        policy: Option<String>,
        /// The reason.
        reason: String,
    },
}

/// A pod that does not exist yet.
struct Subject {
    home: Home,
    /// The labels that the namespace has or will have.
    namespace: Labels,
    labels: Labels,
    nodes: Selector,
}

/// Returns a case for each policy, and one for a pod that no policy selects. `namespaces` are the cluster's namespaces with their labels.
pub fn cases(known: &[Known], namespaces: &[(String, Labels)], servers: &[SocketAddr]) -> Vec<Case> {
    let policies = known.iter().enumerate().map(|(n, one)| {
        let name = format!("{PREFIX}-{n}");
        let trial =
            subject(&one.policy, &name, namespaces).and_then(|subject| of_policy(one, known, subject, name, servers));
        trial.map_or_else(|reason| Case::Skipped { policy: Some(one.name()), reason }, Case::Tried)
    });
    policies.chain([unselected(known, servers)]).collect()
}

/// Returns a pod that a policy selects, or why no pod can be.
fn subject(policy: &Policy, name: &str, namespaces: &[(String, Labels)]) -> Result<Subject, String> {
    let mut reason = "it has no selectors".to_owned();
    for selector in &policy.selectors {
        let pod = selector.pod.as_ref().map_or(Some(Labels::new()), Selector::satisfying);
        let home = home(selector.namespace.as_ref(), name, namespaces);
        match (pod, home) {
            (Some(labels), Some((home, namespace))) => {
                let nodes = selector.node.clone().unwrap_or_default();
                return Ok(Subject { home, namespace, labels, nodes });
            }
            (None, _) => reason = "no labels satisfy its podSelector".to_owned(),
            (_, None) => reason = "no namespace satisfies its namespaceSelector".to_owned(),
        }
    }
    Err(reason)
}

/// Returns a namespace that a selector selects, with its labels. The namespace is new unless the selector requires a name.
fn home(selector: Option<&Selector>, name: &str, namespaces: &[(String, Labels)]) -> Option<(Home, Labels)> {
    let everything = Selector::everything();
    let selector = selector.unwrap_or(&everything);
    let mut labels = selector.satisfying()?;
    if labels.contains_key(NAMESPACE_NAME) {
        let (name, labels) = namespaces.iter().find(|(_, labels)| selector.matches(labels))?;
        return Some((Home::Existing(name.clone()), labels.clone()));
    }
    let home = Home::New(name.to_owned(), labels.clone());
    labels.insert(NAMESPACE_NAME.to_owned(), name.to_owned());
    selector.matches(&labels).then_some((home, labels))
}

fn of_policy(
    one: &Known,
    known: &[Known],
    subject: Subject,
    pod: String,
    servers: &[SocketAddr],
) -> Result<Trial, String> {
    let mut reason = "its destinations contain none of the servers".to_owned();
    let (mut promises, mut connections) = (Vec::new(), CONNECTIONS);
    for &server in servers {
        let winner = winner(known, &subject, server.ip());
        match winner {
            Some(winner) if winner.policy.id == one.policy.id => match promise(one, server) {
                Some((promise, needed)) => {
                    promises.push(promise);
                    connections = connections.max(needed);
                }
                None => reason = format!("it has no egress IP for {}", server.ip()),
            },
            Some(winner) if prefix(&one.policy, server.ip()).is_some() => {
                reason = format!("{} takes the packets of such a pod for {}", winner.name(), server.ip());
            }
            _ => {}
        }
    }
    if promises.is_empty() {
        return Err(reason);
    }
    let Subject { home, labels, nodes, .. } = subject;
    Ok(Trial { policy: Some(one.name()), pod, home, labels, nodes, connections, promises })
}

/// Returns a policy's promise for packets to a server, and the number of connections that verify it. Returns `None` if it
/// has no egress IP for them.
fn promise(one: &Known, server: SocketAddr) -> Option<(Promise, u32)> {
    let slots: Vec<&Slot> = one.slots.iter().filter(|slot| slot.address.is_ipv4() == server.is_ipv4()).collect();
    let least = slots.iter().map(|slot| slot.weight).min()?.max(1);
    let whole: u64 = slots.iter().map(|slot| u64::from(slot.weight)).sum();
    let needed = (CONNECTIONS_EACH * whole).div_ceil(u64::from(least));
    let everywhere = one.policy.zone == ZoneMode::Any && !one.policy.prefer_local_node;
    let rule = match one.policy.distribution {
        Distribution::PerEndpoint => Rule::One,
        Distribution::PerFlow if !everywhere || needed > MAX_CONNECTIONS => Rule::Any,
        Distribution::PerFlow if slots.iter().all(|slot| slot.healthy) => Rule::All,
        Distribution::PerFlow => Rule::Any,
    };
    let addresses = slots.iter().map(|slot| slot.address).collect();
    Some((Promise { server, rule, addresses }, if rule == Rule::All { needed as u32 } else { CONNECTIONS }))
}

/// Returns the case of the pod that no policy selects. Its packets must not leave with any policy's egress IP.
fn unselected(known: &[Known], servers: &[SocketAddr]) -> Case {
    let pod = format!("{PREFIX}-unselected");
    let namespace = Labels::from([(NAMESPACE_NAME.to_owned(), pod.clone())]);
    let home = Home::New(pod.clone(), Labels::new());
    let subject = Subject { home, namespace, labels: Labels::new(), nodes: Selector::everything() };
    if let Some(winner) = servers.iter().find_map(|server| winner(known, &subject, server.ip())) {
        return Case::Skipped { policy: None, reason: format!("{} also selects pods without labels", winner.name()) };
    }
    let addresses: BTreeSet<IpAddr> = known.iter().flat_map(|one| &one.slots).map(|slot| slot.address).collect();
    let promises =
        servers.iter().map(|&server| Promise { server, rule: Rule::NoneOf, addresses: addresses.clone() }).collect();
    let Subject { home, labels, nodes, .. } = subject;
    Case::Tried(Trial { policy: None, pod, home, labels, nodes, connections: CONNECTIONS, promises })
}

/// Returns the policy that takes a pod's packets for a destination: the longest prefix wins, then the older policy. The
/// pod's node is not known yet, so policies for some nodes count as if they were for all nodes.
fn winner<'a>(known: &'a [Known], subject: &Subject, to: IpAddr) -> Option<&'a Known> {
    let selects = |policy: &Policy| {
        let holds = |selector: &Option<Selector>, labels| selector.as_ref().is_none_or(|one| one.matches(labels));
        policy.selectors.iter().any(|one| holds(&one.pod, &subject.labels) && holds(&one.namespace, &subject.namespace))
    };
    let candidates = known.iter().filter(|one| selects(&one.policy));
    let candidates = candidates.filter_map(|one| Some((prefix(&one.policy, to)?, one)));
    candidates.max_by(|(a, one), (b, other)| a.cmp(b).then(other.policy.precedence(&one.policy))).map(|(_, one)| one)
}

/// Returns the length of the longest prefix by which a policy steers packets for a destination.
fn prefix(policy: &Policy, to: IpAddr) -> Option<u8> {
    let longest = |nets: &[IpNet]| nets.iter().filter(|net| net.contains(&to)).map(IpNet::prefix_len).max();
    longest(&policy.destinations).filter(|_| longest(&policy.excluded).is_none())
}

/// Returns the broken promises for a pod; empty if all were kept.
pub fn judge(trial: &Trial, asked: &[Asked]) -> Vec<String> {
    let of = |promise: &Promise| match asked.iter().find(|one| one.server == promise.server) {
        Some(asked) => broken(promise, asked),
        None => vec![format!("{} was not queried", promise.server)],
    };
    trial.promises.iter().flat_map(of).collect()
}

fn broken(promise: &Promise, asked: &Asked) -> Vec<String> {
    let Promise { server, rule, addresses } = promise;
    let seen = sources(asked);
    let mut problems = Vec::new();
    // Spillway does not promise that a pod that no policy selects reaches the outside at all.
    if let (true, Some(error)) = (*rule != Rule::NoneOf, asked.errors.first()) {
        problems.push(format!("{} failures at {server}, the first: {error}", asked.errors.len()));
    }
    let wrong = seen.keys().filter(|source| addresses.contains(source) == (*rule == Rule::NoneOf));
    problems.extend(wrong.map(|source| match rule {
        Rule::NoneOf => format!("{server} saw {source}, which is an egress IP of a policy"),
        _ => format!("{server} saw {source}, which is not an egress IP of this policy"),
    }));
    if *rule == Rule::One && seen.len() > 1 {
        problems.push(format!("{server} saw {} addresses: with PerEndpoint a pod has one", seen.len()));
    }
    let missing = addresses.iter().filter(|address| !asked.tcp.contains_key(address));
    if *rule == Rule::All && asked.errors.is_empty() {
        problems.extend(missing.map(|address| format!("{server} never saw {address}")));
    }
    problems
}

/// Returns how often a server saw each source address, over TCP and UDP together.
pub fn sources(asked: &Asked) -> BTreeMap<IpAddr, u32> {
    let mut seen = asked.tcp.clone();
    for (source, count) in &asked.udp {
        *seen.entry(*source).or_default() += count;
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::{
        model::{EndpointSelector, Requirement, Source},
        testing,
    };

    fn servers() -> Vec<SocketAddr> {
        vec!["203.0.113.7:8474".parse().unwrap()]
    }

    fn ip(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    fn known(name: &str, addresses: &[u8]) -> Known {
        let slot = |last: &u8| Slot { address: ip(*last), weight: 1, healthy: true };
        let mut policy = testing::world::policy(name, Source::Pools(Vec::new()));
        policy.selectors = vec![EndpointSelector { pod: Some(Selector::label("app", name)), ..Default::default() }];
        Known { policy, slots: addresses.iter().map(slot).collect() }
    }

    fn only(known: Known) -> Case {
        cases(&[known], &[], &servers()).remove(0)
    }

    fn tried(case: Case) -> Trial {
        match case {
            Case::Tried(trial) => trial,
            Case::Skipped { reason, .. } => panic!("skipped: {reason}"),
        }
    }

    fn reason(case: Case) -> String {
        match case {
            Case::Skipped { reason, .. } => reason,
            Case::Tried(trial) => panic!("{trial:?}"),
        }
    }

    #[test]
    fn a_policy_is_tested_by_a_pod_that_it_selects() {
        let mut one = known("web", &[10, 11]);
        one.policy.selectors[0].namespace = Some(Selector::label("team", "a"));
        one.policy.selectors[0].node = Some(Selector::label("zone", "z1"));
        let trial = tried(only(one));
        assert_eq!(trial.labels, Labels::from([("app".into(), "web".into())]));
        assert_eq!(trial.home, Home::New("spillway-test-0".into(), Labels::from([("team".into(), "a".into())])));
        assert_eq!(trial.nodes, Selector::label("zone", "z1"));
        let promise = Promise { server: servers()[0], rule: Rule::All, addresses: [ip(10), ip(11)].into() };
        assert_eq!(trial.promises, [promise]);
        assert_eq!(trial.connections, 48);
    }

    #[test]
    fn namespace_required_by_name_is_used_and_must_exist() {
        let mut one = known("web", &[10]);
        one.policy.selectors[0].namespace = Some(Selector::label(NAMESPACE_NAME, "shop"));
        let labels = |name: &str| Labels::from([(NAMESPACE_NAME.to_owned(), name.to_owned())]);
        let namespaces = ["default", "shop"].map(|name| (name.to_owned(), labels(name)));
        let trial = tried(cases(&[one.clone()], &namespaces, &servers()).remove(0));
        assert_eq!(trial.home, Home::Existing("shop".into()));
        assert_eq!(
            reason(cases(&[one], &namespaces[..1], &servers()).remove(0)),
            "no namespace satisfies its namespaceSelector"
        );
    }

    #[test]
    fn destination_of_another_policy_is_not_tested() {
        let (older, mut younger) = (known("web", &[10]), known("b", &[11]));
        younger.policy.selectors = older.policy.selectors.clone();
        younger.policy.created = 1;
        let both = cases(&[older.clone(), younger.clone()], &[], &servers());
        assert_eq!(tried(both[0].clone()).promises[0].addresses, [ip(10)].into());
        assert_eq!(reason(both[1].clone()), "web takes the packets of such a pod for 203.0.113.7");
        younger.policy.destinations = vec!["203.0.113.0/24".parse().unwrap()];
        let both = cases(&[older, younger.clone()], &[], &servers());
        assert_eq!(reason(both[0].clone()), "b takes the packets of such a pod for 203.0.113.7");
        younger.policy.excluded = vec!["203.0.113.7/32".parse().unwrap()];
        assert_eq!(reason(only(younger)), "its destinations contain none of the servers");
    }

    #[test]
    fn contradictory_selectors_are_skipped() {
        let mut one = known("web", &[10]);
        let requirements = [("app", Requirement::Exists), ("app", Requirement::DoesNotExist)];
        one.policy.selectors[0].pod = Some(Selector::new(requirements.map(|(key, one)| (key.to_owned(), one))));
        assert_eq!(reason(only(one)), "no labels satisfy its podSelector");
    }

    #[test]
    fn the_promise_follows_the_distribution_and_the_gateways() {
        let rule = |change: fn(&mut Known)| {
            let mut one = known("web", &[10, 11]);
            change(&mut one);
            let trial = tried(only(one));
            (trial.promises[0].rule, trial.connections)
        };
        assert_eq!(rule(|_| {}), (Rule::All, 48));
        assert_eq!(rule(|one| one.slots[0].weight = 9), (Rule::All, 240));
        assert_eq!(rule(|one| one.slots[0].weight = 1_000), (Rule::Any, 16));
        assert_eq!(rule(|one| one.slots[0].healthy = false), (Rule::Any, 16));
        assert_eq!(rule(|one| one.policy.zone = ZoneMode::Prefer), (Rule::Any, 16));
        assert_eq!(rule(|one| one.policy.prefer_local_node = true), (Rule::Any, 16));
        assert_eq!(rule(|one| one.policy.distribution = Distribution::PerEndpoint), (Rule::One, 16));
        assert_eq!(reason(only(known("web", &[]))), "it has no egress IP for 203.0.113.7");
    }

    #[test]
    fn unselected_pod_is_also_tested() {
        let last = |known: &[Known]| cases(known, &[], &servers()).pop().unwrap();
        let trial = tried(last(&[known("web", &[10])]));
        assert_eq!((trial.policy, trial.promises[0].rule), (None, Rule::NoneOf));
        assert_eq!(trial.promises[0].addresses, [ip(10)].into());
        let mut everybody = known("all", &[10]);
        everybody.policy.selectors = vec![EndpointSelector { pod: Some(Selector::everything()), ..Default::default() }];
        assert_eq!(reason(last(&[everybody])), "all also selects pods without labels");
    }

    #[test]
    fn broken_promises_are_reported() {
        let problems = |rule, tcp: &[u8], udp: &[u8], errors: &[&str]| {
            let seen = |all: &[u8]| all.iter().map(|last| (ip(*last), 8)).collect();
            let asked = Asked {
                server: servers()[0],
                tcp: seen(tcp),
                udp: seen(udp),
                errors: errors.iter().map(|error| (*error).to_owned()).collect(),
            };
            broken(&Promise { server: servers()[0], rule, addresses: [ip(10), ip(11)].into() }, &asked).join("\n")
        };
        for (rule, tcp, udp) in [
            (Rule::All, &[10, 11][..], &[10][..]),
            (Rule::Any, &[11], &[10]),
            (Rule::One, &[11], &[11]),
            (Rule::NoneOf, &[9], &[]),
        ] {
            assert_eq!(problems(rule, tcp, udp, &[]), "", "{rule:?}");
        }
        assert!(problems(Rule::All, &[10], &[11], &[]).contains("never saw 192.0.2.11"));
        assert!(problems(Rule::Any, &[10], &[9], &[]).contains("192.0.2.9, which is not an egress IP"));
        assert!(problems(Rule::One, &[10], &[11], &[]).contains("saw 2 addresses"));
        assert!(problems(Rule::NoneOf, &[10], &[], &[]).contains("192.0.2.10, which is an egress IP of a policy"));
        assert!(
            problems(Rule::Any, &[], &[], &["TCP: timed out"])
                .contains("1 failures at 203.0.113.7:8474, the first: TCP: timed out")
        );
        assert_eq!(problems(Rule::NoneOf, &[], &[], &["TCP: timed out"]), "");
        let trial = tried(only(known("web", &[10])));
        assert_eq!(judge(&trial, &[]), ["203.0.113.7:8474 was not queried"]);
    }
}
