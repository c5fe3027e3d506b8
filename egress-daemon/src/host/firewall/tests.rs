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
        tunnel: "spillway0".into(),
        index,
        port: 8473,
        addresses: ["10.88.0.11".parse().unwrap(), "fd88::11".parse().unwrap()].into(),
        mtu: 1450,
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
fn everything_is_made_once_mended_listed_and_removed() {
    in_netns("everything_is_made_once_mended_listed_and_removed", async || {
        let net = Net::here();
        let tunnel = tunnel::ensure(&net.handle, &TunnelSpec::default()).await.unwrap();
        let spec = spec(tunnel.index);
        let links = Links::follow(LinksOptions::default()).await.unwrap();
        let mut way = LongWay::default();
        let foreign = [("ip", ["rule", "show"]), ("ip", ["-6", "rule"])].map(|(p, a)| shown(p, &a));

        let gateway = Spec { selects: false, ..spec.clone() };
        assert!(way.ensure(&net.handle, &links.current(), &gateway).await.unwrap());
        let now = [("ip", ["rule", "show"]), ("ip", ["-6", "rule"])].map(|(p, a)| shown(p, &a));
        assert_eq!(now, foreign, "no pod is selected: no rules");

        assert!(way.ensure(&net.handle, &links.current(), &spec).await.unwrap());
        let table = shown("nft", &["list", "table", "inet", "spillway"]);
        for part in [
            "meta priority 5350:1 meta mark set meta mark | 0x00001000 notrack",
            "ip daddr 10.88.0.11 udp dport 8473 notrack",
            "ip6 daddr fd88::11 udp dport 8473 notrack",
            "ct state invalid icmp type destination-unreachable icmp code frag-needed notrack",
            "ct state invalid icmpv6 type packet-too-big notrack",
            "meta mark & 0x00001000 != 0x00000000 ct state untracked oifname != \"spillway0\" counter name \"astray\" drop",
        ] {
            assert!(table.contains(part), "{part:?} is not in\n{table}");
        }
        for family in ["-4", "-6"] {
            let rules = shown("ip", &[family, "rule"]);
            for part in [
                "80:\tnot from all fwmark 0x1000/0x1000 goto 83",
                "iif eth0 [detached] goto 83",
                "iif lo goto 83",
                "82:\tfrom all lookup 21328",
            ] {
                assert!(rules.contains(part), "{part:?} is not in\n{rules}");
            }
            let routes = shown("ip", &[family, "route", "show", "table", "21328"]);
            for part in ["dev spillway0", "mtu 1450", "onlink", "blackhole default"] {
                assert!(routes.contains(part), "{part:?} is not in\n{routes}");
            }
        }
        let fresh = Links::follow(LinksOptions::default()).await.unwrap();
        assert!(!way.ensure(&net.handle, &fresh.current(), &spec).await.unwrap(), "nothing was different");

        // What others remove comes back; what is no longer wanted goes.
        shown("nft", &["flush", "ruleset"]);
        shown("ip", &["rule", "del", "pref", "82"]);
        assert!(way.ensure(&net.handle, &fresh.current(), &spec).await.unwrap());
        assert_eq!(shown("nft", &["list", "table", "inet", "spillway"]), table);
        let fewer = Spec { outside: ["lo".into()].into(), mark: 0x2000, ..spec.clone() };
        assert!(way.ensure(&net.handle, &fresh.current(), &fewer).await.unwrap());
        let rules = shown("ip", &["rule"]);
        assert!(!rules.contains("eth0") && !rules.contains("0x1000") && rules.contains("0x2000/0x2000"), "{rules}");

        // While a pod is starting: sets, and rules that look into them.
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
        // More than fits one message, or the socket's buffer.
        let many = (0..20_000u32).map(|n| IpNet::from(IpAddr::from((0x0b00_0000 + 2 * n).to_be_bytes())));
        let many = Spec { hold: Some(many.collect()), ..fewer.clone() };
        assert!(way.ensure(&net.handle, &fresh.current(), &many).await.unwrap());
        assert!(shown("nft", &["list", "set", "inet", "spillway", "untouched4"]).contains("11.0.156.62"));
        assert!(way.ensure(&net.handle, &fresh.current(), &fewer).await.unwrap());
        assert!(!shown("nft", &["list", "table", "inet", "spillway"]).contains("untouched"));

        // What an earlier agent made stays: its programs may mark packets.
        let gateway = Spec { selects: false, ..fewer.clone() };
        assert!(LongWay::default().ensure(&net.handle, &fresh.current(), &gateway).await.is_ok());
        assert!(shown("ip", &["rule"]).contains("0x2000/0x2000"));

        let lines = inventory(&net.handle).await.unwrap();
        assert_eq!(lines.len(), 8 + 2 * (4 + 2), "{lines:#?}");
        assert_eq!(remove(&net.handle).await.unwrap(), lines);
        assert_eq!(inventory(&net.handle).await.unwrap(), Vec::<String>::new());
        assert_eq!([("ip", ["rule", "show"]), ("ip", ["-6", "rule"])].map(|(p, a)| shown(p, &a)), foreign);
        assert!(!shown("nft", &["list", "tables"]).contains("spillway"));
    });
}

#[test]
fn what_rules_have_dropped_is_known_while_they_change_and_when_they_are_gone() {
    in_netns("what_rules_have_dropped_is_known_while_they_change_and_when_they_are_gone", async || {
        let net = Net::here();
        let tunnel = tunnel::ensure(&net.handle, &TunnelSpec::default()).await.unwrap();
        let links = Links::follow(LinksOptions::default()).await.unwrap();
        let packets = || dropped().into_iter().map(|rule| (rule.name, rule.packets)).collect::<Vec<_>>();
        assert_eq!(packets(), [("drop_not_seen", 0), ("drop_astray", 0)], "there is no table yet");
        let free = spec(tunnel.index);
        let holding = Spec { hold: Some(BTreeSet::new()), ..free.clone() };
        let counters =
            [(HELD, nft::Counted { packets: 5, bytes: 300 }), (ASTRAY, nft::Counted { packets: 7, bytes: 420 })];
        nft::replace(TABLE, &counters, &hold::sets(&holding), &rules::chains(&holding)).unwrap();
        assert_eq!(packets(), [("drop_not_seen", 5), ("drop_astray", 7)]);
        let mut way = LongWay::default();
        for spec in [&free, &holding] {
            assert!(way.ensure(&net.handle, &links.current(), spec).await.unwrap());
            assert_eq!(packets(), [("drop_not_seen", 5), ("drop_astray", 7)]);
        }
        let held = shown("nft", &["list", "counter", "inet", "spillway", "held"]);
        assert!(held.contains("packets 5 bytes 300"), "{held}");
    });
}
