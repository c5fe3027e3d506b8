//! `tunnel_ingress` behind a real tunnel device: packets to a gateway from other nodes, and from hosts that are not nodes.

use super::{
    frames::{TCP, UDP, ip, seal, tcp, udp},
    rig::*,
    scenes,
};
use crate::{
    datapath::{
        Pins,
        attach::{Attacher, Mode, mode},
        load::Programs,
    },
    host::{
        testing::{Net, NetNs, in_netns, soon},
        tunnel::{self, TunnelSpec},
    },
};
use egress_common::{
    abi::{TUNNEL_PORT, VNI_FORWARD, VNI_REPLY},
    flow::{FlowKey, Reverse},
    net, port_block,
    verdict::Counter,
};
use egress_core::encode::NodeView;
use std::{
    collections::BTreeMap,
    net::{IpAddr, TcpListener, TcpStream, UdpSocket},
};

/// The addresses of the gateway, of another node, and of a host that is not a node.
const GATEWAY: &str = "10.0.0.1";
const SOURCE: &str = "10.0.0.2";
const NOBODY: &str = "10.0.0.9";

/// Sends a frame as a tunnel device would, from an address of the other namespace.
fn send(other: &NetNs, from: &str, vni: u32, frame: &[u8]) {
    let packet = [&[8, 0, 0, 0][..], &(vni << 8).to_be_bytes(), frame].concat();
    let from: IpAddr = from.parse().unwrap();
    other.run(|| async move {
        UdpSocket::bind((from, 0)).unwrap().send_to(&packet, (GATEWAY, TUNNEL_PORT)).unwrap();
    });
}

async fn counted(rig: &Rig, counter: Counter, n: u64) {
    soon(counter.name(), async {
        while rig.count(counter) < n {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(rig.count(counter), n, "{}: {:?}", counter.name(), rig.writer.maps().counters());
}

/// Returns a view in which this node owns [`EGRESS4`], and `n2`, whose tunnel address is [`SOURCE`], holds [`OTHER_BLOCK`] of it. This node
/// does not own 192.0.2.99.
fn view(uplink: u32, tunnel: u32) -> NodeView {
    let mut view = scene();
    let owned = view.egress_ips.get_mut(&addr(EGRESS4)).unwrap();
    owned.gateway = Some(scenes::node(0));
    owned.forwards = true;
    owned.interface = Some(uplink);
    let elsewhere = view.egress_ips[&addr(EGRESS6)].clone();
    view.egress_ips.insert(addr("192.0.2.99"), elsewhere);
    view.nodes.insert(scenes::node(1), vec![addr("10.0.0.77")]);
    view.nodes.insert(scenes::node(2), vec![addr(SOURCE)]);
    view.config.as_mut().unwrap().tunnel_ifindex = tunnel;
    view
}

/// The namespace of another host, and the index of the pod's interface.
struct GatewayFixture {
    other: NetNs,
    pod: u32,
    _attached: Attacher,
}

/// Makes this namespace a gateway, with [`view`] in its maps and the programs at a real tunnel device and a pod's interface.
async fn gateway(rig: &mut Rig) -> GatewayFixture {
    let net = Net::here();
    let other = NetNs::create();
    net.veth_into("eth0", &other, "there").await;
    net.veth("pod", "inside").await;
    net.up("pod").await;
    net.up("inside").await;
    net.address("eth0", "10.0.0.1/24").await;
    other.run(|| async {
        let net = Net::here();
        net.address("there", "10.0.0.2/24").await;
        net.address("there", "10.0.0.9/24").await;
    });
    let tunnel = tunnel::ensure(&net.handle, &TunnelSpec::default()).await.unwrap();
    let (uplink, pod) = (net.index("eth0").await, net.index("pod").await);
    rig.write(&view(uplink, tunnel.index));
    let live = BTreeMap::from([(tunnel.index, "spillway0".to_owned()), (pod, "pod".to_owned())]);
    let wanted = [("tunnel_ingress", tunnel.index), ("pod_ingress", pod)];
    let wanted = wanted.map(|hook| (hook, live[&hook.1].clone())).into();
    let pins: Pins = rig.pins().clone();
    let programs = Programs::load_lazily(&pins, SIZES).unwrap();
    let mut attacher = Attacher::new(programs, pins, mode());
    assert!(attacher.mode() == Mode::Tcx || attacher.mode() == Mode::Clsact);
    let errors = attacher.sync(&wanted, &live, true);
    assert!(errors.is_empty(), "{errors:?}");
    GatewayFixture { other, pod, _attached: attacher }
}

/// Returns a segment with this source, as a source node sends it.
fn from(egress: &str, port: u16) -> Vec<u8> {
    seal(ip(addr(egress), addr(SERVER4), TCP, &[], &tcp(port, 443, 2, &[])))
}

/// The inner MAC address does not matter, although the stack would drop packets because of it.
#[test]
fn otherhost_frames_with_any_inner_mac_address_are_forwarded() {
    let Some(mut rig) = Rig::new("otherhost", &NodeView::default()) else { return };
    in_netns("otherhost", || async move {
        let GatewayFixture { other, .. } = &gateway(&mut rig).await;
        let block = port_block::first_port(OTHER_BLOCK);
        for (n, mac) in [[0x06, 0xde, 0xad, 0xbe, 0xef, 0], [0xff; 6], [0; 6]].into_iter().enumerate() {
            let mut frame = from(EGRESS4, block);
            frame[..6].copy_from_slice(&mac);
            send(other, SOURCE, VNI_FORWARD, &frame);
            counted(&rig, Counter::Forwarded, n as u64 + 1).await;
        }
    });
}

#[test]
fn gateway_forwards_only_packets_from_ports_leased_to_the_sender() {
    let Some(mut rig) = Rig::new("gateway", &NodeView::default()) else { return };
    in_netns("gateway", || async move {
        let GatewayFixture { other, pod, .. } = &gateway(&mut rig).await;
        let block = port_block::first_port(OTHER_BLOCK);
        send(other, SOURCE, VNI_FORWARD, &from(EGRESS4, block + 63));
        counted(&rig, Counter::Forwarded, 1).await;
        for (n, forged) in [block + 64, port_block::first_port(OWN_BLOCKS[0]), 80].into_iter().enumerate() {
            send(other, SOURCE, VNI_FORWARD, &from(EGRESS4, forged));
            counted(&rig, Counter::DropNotLeased, n as u64 + 1).await;
        }
        send(other, NOBODY, VNI_FORWARD, &from(EGRESS4, block));
        counted(&rig, Counter::DropStranger, 1).await;
        for (n, address) in ["192.0.2.99", "192.0.2.55", POD4].into_iter().enumerate() {
            send(other, SOURCE, VNI_FORWARD, &from(address, block));
            counted(&rig, Counter::DropNotOwner, n as u64 + 1).await;
        }
        assert_eq!(rig.count(Counter::Forwarded), 1);

        // A reply whose forward half is gone, in the tick of the reverse half: it is delivered, and not taken for a connection from
        // outside, after which the pod's packets would leave untranslated.
        let port = port_block::first_port(OWN_BLOCKS[0]);
        let reply = seal(ip(addr(SERVER4), addr(EGRESS4), UDP, &[], &udp(53, port, b"answer")));
        let v4 = |a: &str| match addr(a) {
            IpAddr::V4(a) => net::v4(a),
            IpAddr::V6(_) => unreachable!("an IPv4 address"),
        };
        let key = FlowKey {
            src: v4(EGRESS4),
            dst: v4(SERVER4),
            src_port: port.to_be(),
            dst_port: 53u16.to_be(),
            proto: u32::from(UDP),
        };
        let mut value = Reverse {
            check: 0,
            pod: v4(POD4),
            pod_port: 4000u16.to_be(),
            state: egress_common::tcp::seen::CONFIRMED,
            ifindex: *pod,
            policy: 1,
            account: 0,
            egress: 1,
            egress_generation: 1,
            endpoint: rig.writer.maps().v4.endpoints.get(&v4(POD4)).unwrap().map_or(0, |e| e.id),
            // At most one tick older than any packet of this test.
            last_seen: now_tick(),
            pod_mac: [0x1111; 3],
            host_mac: [0x2222; 3],
        };
        value.seal(&key);
        send(other, NOBODY, VNI_REPLY, &reply);
        counted(&rig, Counter::DropStranger, 2).await;
        let mut maps = crate::datapath::maps::Maps::open(rig.pins()).unwrap();
        maps.v4.reverse.set(&key, &value).unwrap();
        send(other, SOURCE, VNI_REPLY, &reply);
        counted(&rig, Counter::Delivered, 1).await;
        assert_eq!(rig.count(Counter::Untouched), 0);
        // The converse, to show that the test works: a packet for the pod's own address opens a connection.
        let inbound = seal(ip(addr(SERVER4), addr(POD4), UDP, &[], &udp(54, 4000, b"hello")));
        assert_eq!(rig.run("pod_ingress", &inbound).0, NEXT);
        assert_eq!(rig.count(Counter::Untouched), 1);
    });
}

#[test]
fn own_socket_packets_reach_the_stack_and_flow_packets_the_block_holder() {
    const ACK: u8 = 16;
    let Some(mut rig) = Rig::new("own-sockets", &NodeView::default()) else { return };
    in_netns("own-sockets", || async move {
        let net = Net::here();
        net.address("lo", "192.0.2.10/32").await;
        net.address("lo", "203.0.113.5/32").await;
        let set = |rig: &mut Rig, node_address: bool| {
            let mut view = view(1, 0);
            view.egress_ips.get_mut(&addr(EGRESS4)).unwrap().node_address = node_address;
            rig.write(&view);
        };
        set(&mut rig, true);
        let port = port_block::first_port(OTHER_BLOCK);
        let from = |proto: u8, transport: Vec<u8>| seal(ip(addr(SERVER4), addr(EGRESS4), proto, &[], &transport));
        let segment = |remote: u16, flags: u8| from(TCP, tcp(remote, port, flags, &[]));
        let datagram = |remote: u16| from(UDP, udp(remote, port, b"hello"));
        let verdict = |rig: &mut Rig, frame: &[u8]| rig.run("uplink_ingress", frame).0;
        assert_eq!(verdict(&mut rig, &segment(443, 2)), REDIRECT, "nobody listens");
        assert_eq!(verdict(&mut rig, &datagram(53)), REDIRECT);

        let listener = TcpListener::bind((addr(EGRESS4), port)).unwrap();
        assert_eq!(verdict(&mut rig, &segment(443, 2)), NEXT);
        assert_eq!(verdict(&mut rig, &segment(443, 2 | ACK)), REDIRECT, "an answer to a flow");
        assert_eq!(verdict(&mut rig, &segment(443, ACK)), REDIRECT);
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let remote = client.local_addr().unwrap();
        let known = seal(ip(remote.ip(), addr(EGRESS4), TCP, &[], &tcp(remote.port(), port, ACK, &[])));
        assert_eq!(verdict(&mut rig, &known), NEXT);
        let other = seal(ip(remote.ip(), addr(EGRESS4), TCP, &[], &tcp(remote.port() ^ 1, port, ACK, &[])));
        assert_eq!(verdict(&mut rig, &other), REDIRECT);

        let socket = UdpSocket::bind((addr(EGRESS4), port)).unwrap();
        assert_eq!(verdict(&mut rig, &datagram(53)), REDIRECT, "and a copy to the stack");
        socket.connect((addr(SERVER4), 53)).unwrap();
        assert_eq!(verdict(&mut rig, &datagram(53)), NEXT);
        assert_eq!(verdict(&mut rig, &datagram(54)), REDIRECT);

        set(&mut rig, false);
        for frame in [segment(443, 2), known, datagram(53)] {
            assert_eq!(verdict(&mut rig, &frame), REDIRECT, "no socket has a floating address");
        }
    });
}

/// Returns the number of IPv4 packets that this namespace's stack has received.
fn received() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
    let row = text.lines().filter(|line| line.starts_with("Ip:")).nth(1).unwrap();
    row.split_whitespace().nth(3).unwrap().parse().unwrap()
}

#[test]
fn masq_ports_replies_to_masqueraded_leased_ports_also_reach_the_stack() {
    let Some(mut rig) = Rig::new("masquerades", &NodeView::default()) else { return };
    in_netns("masquerades", || async move {
        Net::here().address("lo", "192.0.2.10/32").await;
        let set = |rig: &mut Rig, node_address: bool, idle: u32| {
            let mut view = view(1, 0);
            let e = view.egress_ips.get_mut(&addr(EGRESS4)).unwrap();
            (e.node_address, e.here) = (node_address, node_address);
            view.config.as_mut().unwrap().udp = idle;
            rig.write(&view);
        };
        set(&mut rig, true, 100);
        let (first, own) = (port_block::first_port(OTHER_BLOCK), port_block::first_port(OWN_BLOCKS[0]));
        let leaves = |rig: &mut Rig, port: u16, ingress: u32| {
            let frame = seal(ip(addr(EGRESS4), addr(SERVER4), UDP, &[], &udp(port, 53, b"question")));
            let result = rig.run_with("exit_egress", &frame, &[(INGRESS_IFINDEX, ingress)]).unwrap();
            assert_eq!(result, (NEXT, frame));
        };
        let reply = |rig: &mut Rig, port: u16, remote: u16| {
            let frame = seal(ip(addr(SERVER4), addr(EGRESS4), UDP, &[], &udp(remote, port, b"answer")));
            rig.run("uplink_ingress", &frame).0
        };
        let before = received();
        assert_eq!(reply(&mut rig, first, 53), REDIRECT, "only the lessee's");
        leaves(&mut rig, first, 0);
        assert_eq!(reply(&mut rig, first, 53), REDIRECT, "the host's own packets have sockets");
        leaves(&mut rig, first, 1);
        assert_eq!(reply(&mut rig, first + 1, 53), REDIRECT, "another port");
        assert_eq!(reply(&mut rig, first, 54), REDIRECT, "another port of the server");
        set(&mut rig, false, 100);
        assert_eq!(reply(&mut rig, first, 53), REDIRECT, "a floating address");
        set(&mut rig, true, 100);
        assert_eq!(reply(&mut rig, first, 53), REDIRECT);
        leaves(&mut rig, own, 1);
        reply(&mut rig, own, 53);
        let copies = async |n: u64| {
            soon("copies", async {
                while received() < before + n {
                    tokio::task::yield_now().await;
                }
            })
            .await;
            assert_eq!(received(), before + n);
        };
        copies(2).await;

        // For TCP, the server decides which connection a segment belongs to: the one whose SYN the server answered last.
        const ACK: u8 = 16;
        const RST: u8 = 4;
        let opens = seal(ip(addr(EGRESS4), addr(SERVER4), TCP, &[], &tcp(first, 443, 2, &[])));
        let segment = |rig: &mut Rig, flags: u8, acknowledged: u32| {
            let mut body = tcp(443, first, flags, &[]);
            body[8..12].copy_from_slice(&acknowledged.to_be_bytes());
            rig.run("uplink_ingress", &seal(ip(addr(SERVER4), addr(EGRESS4), TCP, &[], &body))).0
        };
        // The sequence number after that of a segment that `tcp` makes.
        const ANSWER: u32 = 2;
        let opens = |rig: &mut Rig| rig.run_with("exit_egress", &opens, &[(INGRESS_IFINDEX, 1)]).unwrap().0;
        assert_eq!(opens(&mut rig), NEXT);
        assert_eq!(segment(&mut rig, ACK, ANSWER), REDIRECT, "of the connection that the SYN hit");
        assert_eq!(segment(&mut rig, RST, 5000), REDIRECT);
        assert_eq!(segment(&mut rig, 2 | ACK, ANSWER ^ 1 << 20), REDIRECT, "the answer to another SYN");
        assert_eq!(segment(&mut rig, RST | ACK, ANSWER), NEXT, "refused");
        assert_eq!(segment(&mut rig, 2 | ACK, ANSWER), NEXT);
        assert_eq!(opens(&mut rig), NEXT, "once more");
        for (flags, verdict) in [(ACK, NEXT), (2, REDIRECT), (RST, REDIRECT), (ACK, NEXT)] {
            assert_eq!(segment(&mut rig, flags, 5000), verdict, "{flags}");
        }
        assert_eq!(segment(&mut rig, 2 | ACK, 5000), REDIRECT, "another connection has the 5-tuple");
        assert_eq!(segment(&mut rig, ACK, 5000), REDIRECT);

        // A reset that answers no SYN may belong to either connection.
        copies(3).await;

        // Nothing has left for longer than the idle timeout.
        set(&mut rig, true, 1);
        let tick = now_tick();
        soon("three ticks later", async {
            while now_tick() < tick + 3 {
                tokio::task::yield_now().await;
            }
        })
        .await;
        assert_eq!(reply(&mut rig, first, 53), REDIRECT);
        leaves(&mut rig, first, 1);
        assert_eq!(reply(&mut rig, first, 53), REDIRECT);
        copies(4).await;
    });
}

#[test]
fn egress_ip_hint_never_matches_another_or_a_removed_address() {
    let Some(mut rig) = Rig::new("hints", &NodeView::default()) else { return };
    let place = |a: &IpAddr| egress_common::egress::hint(net::any(*a)[3]);
    let wanted = place(&addr(EGRESS4));
    let twin = (1..).map(|n: u32| IpAddr::from((0x0a01_0000 + n).to_be_bytes())).find(|a| place(a) == wanted).unwrap();
    let mut both = view(1, 0);
    let mut unleased = both.egress_ips[&addr(EGRESS4)].clone();
    unleased.leases.clear();
    both.egress_ips.insert(twin, unleased);
    // An address of the other family with the same last word.
    let cousin = addr("2001:db8::c000:20a");
    assert_eq!(net::any(cousin)[3], net::any(addr(EGRESS4))[3]);
    both.egress_ips.insert(cousin, both.egress_ips[&twin].clone());
    let mut one = both.clone();
    one.egress_ips.remove(&addr(EGRESS4));
    let verdict = |rig: &mut Rig, to: IpAddr| {
        let port = port_block::first_port(OTHER_BLOCK);
        let from = addr(if to.is_ipv4() { SERVER4 } else { SERVER6 });
        rig.run("uplink_ingress", &seal(ip(from, to, UDP, &[], &udp(53, port, b"answer")))).0
    };
    rig.write(&both);
    for _ in 0..2 {
        for unleased in [twin, cousin] {
            assert_eq!(verdict(&mut rig, unleased), SHOT, "nobody has its port");
            assert_eq!(verdict(&mut rig, addr(EGRESS4)), REDIRECT, "another node has its port");
        }
    }
    rig.write(&one);
    assert_eq!(verdict(&mut rig, addr(EGRESS4)), NEXT, "it is no egress IP");
    rig.write(&both);
    assert_eq!(verdict(&mut rig, addr(EGRESS4)), REDIRECT);
}
