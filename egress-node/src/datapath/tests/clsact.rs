//! Hooks on kernels without TCX: filters of a clsact qdisc.

use super::BpfDir;
use crate::{
    datapath::{
        attach::{Attacher, Hook, Mode},
        load::{self, Programs, Sizes},
        strangers::{Lookout, at},
    },
    host::testing::{Net, NetNs, in_netns},
};
use aya::programs::{
    LinkOrder, TcAttachType,
    tc::{NlOptions, TcAttachOptions},
};
use std::{collections::BTreeMap, process::Command};

fn filters(interface: &str, direction: &str) -> String {
    let output = Command::new("tc").args(["filter", "show", "dev", interface, direction]).output();
    String::from_utf8(output.expect("the tool `tc` (package iproute2)").stdout).unwrap()
}

/// Returns the ids of the programs in a list of filters.
fn ids(filters: &str) -> Vec<u32> {
    let mut words = filters.split_whitespace();
    let mut ids = Vec::new();
    while let Some(word) = words.next() {
        if word == "id" {
            ids.extend(words.next().map(|id| id.parse::<u32>().unwrap()));
        }
    }
    ids
}

fn attacher(dir: &BpfDir) -> (Attacher, BTreeMap<&'static str, u32>) {
    let mut programs = Programs::load_lazily(&dir.pins, Sizes { max_flows: 64, ..Sizes::default() }).unwrap();
    let ids = crate::datapath::load::PROGRAMS.map(|p| (p, programs.get(p).unwrap().info().unwrap().id()));
    (Attacher::new(programs, dir.pins.clone(), Mode::Clsact), ids.into())
}

fn hooks(wanted: &[Hook]) -> BTreeMap<Hook, String> {
    wanted.iter().map(|hook| (*hook, "pod".to_owned())).collect()
}

/// Creates a pod's interface named `pod`. Returns the namespace of its other end, and its index.
async fn pod() -> (NetNs, u32) {
    let (net, other) = (Net::here(), NetNs::create());
    net.veth_into("pod", &other, "eth0").await;
    let index = net.index("pod").await;
    (other, index)
}

#[track_caller]
fn sync(attacher: &mut Attacher, wanted: &BTreeMap<Hook, String>, live: &BTreeMap<u32, String>) {
    let errors: Vec<String> = attacher.sync(wanted, live, true).iter().map(ToString::to_string).collect();
    assert!(errors.is_empty(), "{errors:?}");
}

#[test]
fn clsact_filters_are_attached_replaced_and_removed() {
    let Some(dir) = BpfDir::new("clsact") else { return };
    in_netns("clsact", || async move {
        let (_other, index) = pod().await;
        let live = BTreeMap::from([(index, "pod".to_owned())]);
        let both = hooks(&[("pod_egress", index), ("pod_ingress", index)]);

        let (mut first, first_ids) = attacher(&dir);
        sync(&mut first, &both, &live);
        assert_eq!(ids(&filters("pod", "ingress")), [first_ids["pod_egress"]]);
        assert_eq!(ids(&filters("pod", "egress")), [first_ids["pod_ingress"]]);
        sync(&mut first, &both, &live);
        assert_eq!(ids(&filters("pod", "ingress")), [first_ids["pod_egress"]]);

        // The agent ends, the filters stay, and another agent's programs replace them in one step.
        drop(first);
        assert_eq!(ids(&filters("pod", "ingress")), [first_ids["pod_egress"]]);
        let (mut second, second_ids) = attacher(&dir);
        sync(&mut second, &both, &live);
        assert_eq!(ids(&filters("pod", "ingress")), [second_ids["pod_egress"]]);
        assert_eq!(ids(&filters("pod", "egress")), [second_ids["pod_ingress"]]);

        // An interface that changes its role has only the program of its new role.
        let uplink = hooks(&[("uplink_ingress", index)]);
        sync(&mut second, &uplink, &live);
        assert_eq!(ids(&filters("pod", "ingress")), [second_ids["uplink_ingress"]]);
        assert_eq!(ids(&filters("pod", "egress")), [] as [u32; 0]);

        // Filters that an earlier agent attached and this agent does not want are removed, too.
        drop(second);
        let (mut third, _) = attacher(&dir);
        sync(&mut third, &BTreeMap::new(), &live);
        assert_eq!(ids(&filters("pod", "ingress")), [] as [u32; 0]);
    });
}

/// docs/failures.md: clsact-order.
#[test]
fn clsact_order_our_filter_stays_first_when_others_are_added() {
    let Some(dir) = BpfDir::new("clsact-order") else { return };
    in_netns("clsact-order", || async move {
        let (_other, index) = pod().await;
        let live = BTreeMap::from([(index, "pod".to_owned())]);
        let both = hooks(&[("pod_egress", index), ("pod_ingress", index)]);
        let (mut ours, own) = attacher(&dir);
        let mut strangers = Programs::load_lazily(&dir.pins, Sizes { max_flows: 64, ..Sizes::default() }).unwrap();
        let mut come = |direction: TcAttachType, priority: u16| {
            let program = strangers.get("tunnel_ingress").unwrap();
            let options = NlOptions { priority, ..NlOptions::default() };
            let link = program.attach_with_options("pod", direction, TcAttachOptions::Netlink(options)).unwrap();
            std::mem::forget(program.take_link(link).unwrap());
        };
        let sides = [("ingress", "pod_egress", TcAttachType::Ingress), ("egress", "pod_ingress", TcAttachType::Egress)];
        let first = |side: &str| ids(&filters("pod", side)).first().copied();
        sync(&mut ours, &both, &live);
        let number = |side: &str| ids(&filters("pod", side)).len();
        // More rounds than handles; within a priority the newest filter is the first.
        for round in 1..=3 {
            for (side, program, direction) in sides {
                come(direction, 1);
                assert_ne!(first(side), Some(own[program]), "round {round}");
                sync(&mut ours, &both, &live);
                assert_eq!((first(side), number(side)), (Some(own[program]), 1 + round), "{side}");
            }
        }
        // Foreign filters stay.
        sync(&mut ours, &BTreeMap::new(), &live);
        assert!(sides.iter().all(|(side, program, _)| number(side) == 3 && first(side) != Some(own[program])));
        // A filter of another kind, which ours cannot precede.
        sync(&mut ours, &both, &live);
        let kind = "filter add dev pod ingress prio 1 protocol ip matchall action ok".split(' ');
        let done = Command::new("tc").args("filter del dev pod ingress prio 1".split(' ')).status().unwrap();
        let added = Command::new("tc").args(kind).status().unwrap();
        assert!(done.success());
        if added.success() {
            let told = ours.sync(&both, &live, true);
            assert!(told.len() == 1 && told[0].to_string().contains("matchall"), "{told:?}");
            assert_eq!(first("ingress"), Some(own["pod_egress"]), "it is attached nevertheless");
        }
    });
}

/// Row syn-ack of docs/failures.md: programs that may bring packets into a pod past ours.
#[test]
fn syn_ack_foreign_programs_at_ingress_hooks_are_found() {
    let Some(dir) = BpfDir::new("strangers") else { return };
    in_netns("strangers", || async move {
        let (other, index) = pod().await;
        let live = BTreeMap::from([(index, "pod".to_owned())]);
        let (mut ours, _) = attacher(&dir);
        let own = ours.programs();
        assert_eq!(own.len(), load::PROGRAMS.len(), "those for drivers are not loaded yet");
        let mut lookout = Lookout::default();
        assert_eq!(lookout.look(&live, &own, true), None);
        sync(&mut ours, &hooks(&[("pod_egress", index), ("pod_ingress", index)]), &live);
        assert_eq!(lookout.look(&live, &own, true), None, "our own do not count");
        let mut strangers = Programs::load_lazily(&dir.pins, Sizes { max_flows: 64, ..Sizes::default() }).unwrap();
        let program = strangers.get("tunnel_ingress").unwrap();
        let mut come = |direction, options| {
            let link = program.attach_with_options("pod", direction, options).unwrap();
            program.take_link(link).unwrap()
        };
        let filter = || TcAttachOptions::Netlink(NlOptions { priority: 7, ..NlOptions::default() });
        let leaving = come(TcAttachType::Egress, filter());
        assert_eq!(lookout.look(&live, &own, true), None, "it sees only what leaves");
        assert_eq!(at(index, "pod", true, &own).unwrap().len(), 1);
        let mut ways = vec![("ingress (clsact)", filter())];
        if crate::datapath::attach::mode() == Mode::Tcx {
            ways.push(("ingress (tcx)", TcAttachOptions::TcxOrder(LinkOrder::last())));
        }
        for (hook, options) in ways {
            let coming = come(TcAttachType::Ingress, options);
            assert_eq!(lookout.look(&live, &own, false), None, "{hook}: not looked at yet");
            let told = lookout.look(&live, &own, true).unwrap_or_default().to_owned();
            assert!(told.contains("tunnel_ingress at pod") && told.ends_with(hook), "{told}");
            drop(coming);
            assert_eq!(lookout.look(&live, &own, true), None, "{hook} is gone");
        }
        drop(leaving);
        let others = "filter add dev pod ingress prio 9 protocol ip matchall action ok".split(' ');
        if Command::new("tc").args(others).status().unwrap().success() {
            assert_eq!(lookout.look(&live, &own, true), None, "a filter without a program");
        }
        // A new interface is searched immediately, and one that is gone no longer counts.
        Net::here().veth_into("new", &other, "eth1").await;
        let new = Net::here().index("new").await;
        let both = BTreeMap::from([(index, "pod".to_owned()), (new, "new".to_owned())]);
        aya::programs::tc::qdisc_add_clsact("new").unwrap();
        let _link = program.attach_with_options("new", TcAttachType::Ingress, filter()).unwrap();
        assert!(lookout.look(&both, &own, false).is_some());
        assert_eq!(lookout.look(&live, &own, false), None);
    });
}
