//! Rules and routes in a real kernel.

use super::*;
use crate::host::{
    links::{Links, LinksOptions},
    testing::{Net, in_netns},
    tunnel::{self, TunnelSpec},
};
use std::process::Command;

fn spec(index: u32) -> Spec {
    Spec {
        mark: 0x1000,
        index,
        port: 8473,
        addresses: ["10.88.0.11".parse().unwrap(), "fd88::11".parse().unwrap()].into(),
        exits: ["eth0".into(), "spillway0".into()].into(),
        outside: ["lo".into(), "eth0".into()].into(),
        selects: true,
        hold: None,
    }
}

fn shown(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn host_stack_path_is_created_once_repaired_listed_and_removed() {
    in_netns("host_stack_path_is_created_once_repaired_listed_and_removed", async || {
        let net = Net::here();
        let tunnel = tunnel::ensure(&net.handle, &TunnelSpec::default()).await.unwrap();
        let spec = spec(tunnel.index);
        let links = Links::follow(LinksOptions::default()).await.unwrap();
        let mut way = StackPath::default();
        let foreign = [("ip", ["rule", "show"]), ("ip", ["-6", "rule"])].map(|(p, a)| shown(p, &a));

        let gateway = Spec { selects: false, ..spec.clone() };
        assert!(way.ensure(&net.handle, &links.current(), &gateway).await.unwrap());
        let now = [("ip", ["rule", "show"]), ("ip", ["-6", "rule"])].map(|(p, a)| shown(p, &a));
        assert_eq!(now, foreign, "no pod is selected: no rules");

        assert!(way.ensure(&net.handle, &links.current(), &spec).await.unwrap());
        let table = shown("nft", &["list", "table", "inet", "spillway"]);
        for part in [
            "meta priority 5350:1 notrack",
            "meta priority 5350:1 meta mark set meta mark | 0x00001000",
            "iifname \"lo\" udp dport 8473 counter name \"looped\" drop",
            "\"eth0\"",
            "\"spillway0\"",
            "ip daddr 10.88.0.11 udp dport 8473 notrack",
            "ip6 daddr fd88::11 udp dport 8473 notrack",
            "iifname != @outside udp dport 8473 counter name \"forged\" drop",
            "set outside {",
            "ct state invalid icmp type destination-unreachable icmp code frag-needed notrack",
            "ct state invalid icmpv6 type packet-too-big notrack",
            "type filter hook input",
            "meta priority 5350:3 counter name \"copied\" drop",
            "meta priority 5350:1 oifname != @exits counter name \"astray\" drop",
        ] {
            assert!(table.contains(part), "{part:?} is not in\n{table}");
        }
        for family in ["-4", "-6"] {
            let rules = shown("ip", &[family, "rule"]);
            assert!(
                rules.trim_end().ends_with("37712:\tfrom all fwmark 0x1000/0x1000 lookup 21328 proto 83"),
                "{rules}"
            );
            let routes = shown("ip", &[family, "route", "show", "table", "21328"]);
            for part in ["dev spillway0", "onlink"] {
                assert!(routes.contains(part), "{part:?} is not in\n{routes}");
            }
        }
        let fresh = Links::follow(LinksOptions::default()).await.unwrap();
        assert!(!way.ensure(&net.handle, &fresh.current(), &spec).await.unwrap(), "nothing was different");

        // Rules and routes that others remove are restored; those that are no longer wanted are removed.
        shown("nft", &["flush", "ruleset"]);
        shown("ip", &["rule", "del", "pref", "37712"]);
        assert!(way.ensure(&net.handle, &fresh.current(), &spec).await.unwrap());
        assert_eq!(shown("nft", &["list", "table", "inet", "spillway"]), table);
        let fewer = Spec { outside: ["lo".into()].into(), mark: 0x2000, ..spec.clone() };
        assert!(way.ensure(&net.handle, &fresh.current(), &fewer).await.unwrap());
        let rules = shown("ip", &["rule"]);
        assert!(!rules.contains("0x1000") && rules.contains("0x2000/0x2000"), "{rules}");

        // While a pod is starting: sets, and rules that use them.
        let untouched = ["10.96.0.0/16", "10.88.0.11/32", "10.88.0.12/32", "fd88::/64"].map(|net| net.parse().unwrap());
        let holding = Spec { hold: Some(untouched.into()), ..fewer.clone() };
        assert!(way.ensure(&net.handle, &fresh.current(), &holding).await.unwrap());
        assert!(!way.ensure(&net.handle, &fresh.current(), &holding).await.unwrap(), "nothing was different");
        let table = shown("nft", &["list", "table", "inet", "spillway"]);
        for part in [
            "10.88.0.11-10.88.0.12",
            "10.96.0.0/16",
            "224.0.0.0/3",
            "fd88::/64",
            "elements = { \"lo\" }",
            "meta priority != 5350:2 iifname != @outside ip daddr != @untouched4 counter name \"held\" drop",
            "ip6 daddr != @untouched6 counter name \"held\" drop",
        ] {
            assert!(table.contains(part), "{part:?} is not in\n{table}");
        }
        // More elements than fit into one message, or into the socket's buffer.
        let many = (0..20_000u32).map(|n| IpNet::from(IpAddr::from((0x0b00_0000 + 2 * n).to_be_bytes())));
        let many = Spec { hold: Some(many.collect()), ..fewer.clone() };
        assert!(way.ensure(&net.handle, &fresh.current(), &many).await.unwrap());
        assert!(shown("nft", &["list", "set", "inet", "spillway", "untouched4"]).contains("11.0.156.62"));
        assert!(way.ensure(&net.handle, &fresh.current(), &fewer).await.unwrap());
        assert!(!shown("nft", &["list", "table", "inet", "spillway"]).contains("untouched"));

        // The rules of an earlier agent stay: its programs may mark packets.
        let gateway = Spec { selects: false, ..fewer.clone() };
        assert!(StackPath::default().ensure(&net.handle, &fresh.current(), &gateway).await.is_ok());
        assert!(shown("ip", &["rule"]).contains("0x2000/0x2000"));

        let lines = inventory(&net.handle).await.unwrap();
        assert_eq!(lines.len(), 11 + 2 * (1 + 1), "{lines:#?}");
        assert_eq!(remove(&net.handle).await.unwrap(), lines);
        assert_eq!(inventory(&net.handle).await.unwrap(), Vec::<String>::new());
        assert_eq!([("ip", ["rule", "show"]), ("ip", ["-6", "rule"])].map(|(p, a)| shown(p, &a)), foreign);
        assert!(!shown("nft", &["list", "tables"]).contains("spillway"));
    });
}

#[test]
fn drop_counts_of_rules_survive_their_change_and_removal() {
    in_netns("drop_counts_of_rules_survive_their_change_and_removal", async || {
        let net = Net::here();
        let tunnel = tunnel::ensure(&net.handle, &TunnelSpec::default()).await.unwrap();
        let links = Links::follow(LinksOptions::default()).await.unwrap();
        let packets = || dropped().into_iter().map(|rule| (rule.name, rule.packets)).collect::<Vec<_>>();
        let names =
            ["drop_forward_tunnel_port", "drop_not_seen", "drop_astray", "drop_tunnel_loop", "drop_gateway_copy"];
        let none = names.map(|name| (name, 0));
        assert_eq!(packets(), none, "there is no table yet");
        let free = spec(tunnel.index);
        let holding = Spec { hold: Some(BTreeSet::new()), ..free.clone() };
        let counters = [(HELD, 5), (ASTRAY, 7), (FORGED, 9), (LOOPED, 11), (COPIED, 13)]
            .map(|(name, packets)| (name, nft::Counted { packets, bytes: 60 * packets }));
        let expected: Vec<_> = names.into_iter().zip([9, 5, 7, 11, 13]).collect();
        nft::replace(TABLE, &counters, &rules::sets(&holding), &rules::chains(&holding, true)).unwrap();
        assert_eq!(packets(), expected);
        let mut way = StackPath::default();
        for spec in [&free, &holding] {
            assert!(way.ensure(&net.handle, &links.current(), spec).await.unwrap());
            assert_eq!(packets(), expected);
        }
        let held = shown("nft", &["list", "counter", "inet", "spillway", "held"]);
        assert!(held.contains("packets 5 bytes 300"), "{held}");
    });
}
