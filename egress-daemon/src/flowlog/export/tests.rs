//! Tests of the records that collectors receive, and of records that they do not accept.

use super::ipfix::{Encoder, MAX_MESSAGE};
use super::*;
use egress_core::leaselog::PortLease;
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// 2026-11-25T14:03:00Z.
const AT: i64 = 1_795_615_380_000_000;

fn flow(number: u16, source: &str, seen: &str, destination: Option<&str>, fate: Fate) -> Record {
    let seen: SocketAddr = seen.parse().unwrap();
    Record::Flow(Flow {
        fate,
        egress_ip: seen.ip(),
        port: number,
        protocol: 6,
        ticket: 1,
        began: AT,
        pod: "prod/web".into(),
        policy: Some("partners".into()),
        source: source.parse().unwrap(),
        destination: destination.map(|to| to.parse().unwrap()),
    })
}

fn flow4(number: u16, fate: Fate) -> Record {
    flow(number, "10.1.0.9:40000", "192.0.2.10:0", Some("203.0.113.9:443"), fate)
}

fn ports(change: Change) -> Record {
    let lease =
        PortLease { egress_ip: "192.0.2.10".parse().unwrap(), first_port: 2048, last_port: 2111, node: "w1".into() };
    Record::Ports(Ports { at: AT, change, lease, holder: Some("172.18.0.3".parse().unwrap()) })
}

#[test]
fn a_collector_is_named_by_a_scheme_a_host_and_a_port() {
    for good in [
        "ipfix://192.0.2.7:4739",
        "json://logs.example:5170",
        "json://[2001:db8::7]:5170",
        "s3://logs",
        "s3://logs/egress/a",
    ] {
        assert_eq!(good.parse::<Collector>().unwrap().to_string(), good);
    }
    for (bad, why) in [
        ("192.0.2.7:4739", "no scheme"),
        ("syslog://192.0.2.7:514", "syslog is not a collector's scheme"),
        ("ipfix://192.0.2.7", "no port"),
        ("ipfix://192.0.2.7:0", "not a port"),
        ("ipfix://:4739", "not a host"),
        ("ipfix://2001:db8::7:4739", "not a host"),
        ("json://logs example:5170", "not a host"),
        ("s3://Logs", "not a bucket name"),
        ("s3://logs/with blank", "not a key prefix"),
    ] {
        let error = bad.parse::<Collector>().unwrap_err();
        assert!(error.contains(why), "{bad}: {error}");
    }
}

#[test]
fn a_line_of_json_has_the_names_of_a_segments_columns() {
    let records = [flow4(43_121, Fate::Began), flow4(43_121, Fate::Ended(AT + 2_500_000)), ports(Change::Granted)];
    let text = String::from_utf8(json::encode(&records, "w1", 3, AT)).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines,
        [
            r#"{"time":"2026-11-25T14:03:00.000000Z","event":"lost","node":"w1","lost":3}"#,
            concat!(
                r#"{"time":"2026-11-25T14:03:00.000000Z","event":"flow_began","node":"w1","egress_ip":"192.0.2.10","#,
                r#""egress_port":43121,"protocol":6,"namespace":"prod","pod":"web","policy":"partners","#,
                r#""source":"10.1.0.9","source_port":40000,"destination":"203.0.113.9","destination_port":443}"#
            ),
            concat!(
                r#"{"time":"2026-11-25T14:03:02.500000Z","event":"flow_ended","node":"w1","egress_ip":"192.0.2.10","#,
                r#""egress_port":43121,"protocol":6,"began":"2026-11-25T14:03:00.000000Z","namespace":"prod","#,
                r#""pod":"web","policy":"partners","source":"10.1.0.9","source_port":40000,"#,
                r#""destination":"203.0.113.9","destination_port":443}"#
            ),
            concat!(
                r#"{"time":"2026-11-25T14:03:00.000000Z","event":"ports_granted","node":"w1","#,
                r#""egress_ip":"192.0.2.10","first_port":2048,"last_port":2111}"#
            ),
        ]
    );
}

/// Decodes messages according to RFC 7011: the records, each as elements and values.
#[derive(Default)]
struct Reader {
    templates: std::collections::BTreeMap<u16, Vec<(u16, u16)>>,
    records: Vec<Vec<(u16, Vec<u8>)>>,
}

fn number(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

impl Reader {
    fn read(&mut self, message: &[u8]) {
        assert!(message.len() <= MAX_MESSAGE);
        assert_eq!((number(message), usize::from(number(&message[2..]))), (10, message.len()));
        let mut rest = &message[16..];
        while !rest.is_empty() {
            let (id, length) = (number(rest), usize::from(number(&rest[2..])));
            let (set, after) = rest.split_at(length);
            rest = after;
            if id == 2 { self.read_templates(&set[4..]) } else { self.read_records(id, &set[4..]) }
        }
    }

    fn read_templates(&mut self, mut set: &[u8]) {
        while !set.is_empty() {
            let (id, count) = (number(set), usize::from(number(&set[2..])));
            let fields = set[4..4 + 4 * count].chunks(4).map(|field| (number(field), number(&field[2..])));
            self.templates.insert(id, fields.collect());
            set = &set[4 + 4 * count..];
        }
    }

    fn read_records(&mut self, id: u16, mut set: &[u8]) {
        while !set.is_empty() {
            let mut record = Vec::new();
            for (element, length) in &self.templates[&id] {
                let (skip, length) = if *length == u16::MAX { (1, set[0].into()) } else { (0, usize::from(*length)) };
                record.push((*element, set[skip..skip + length].to_vec()));
                set = &set[skip + length..];
            }
            self.records.push(record);
        }
    }
}

fn value(record: &[(u16, Vec<u8>)], element: u16) -> &[u8] {
    record.iter().find(|(known, _)| *known == element).map_or(&[], |(_, value)| value)
}

#[test]
fn an_ipfix_message_has_the_nat_events_of_rfc_8158() {
    let six = flow(9, "[fd00::9]:40000", "[2001:db8::10]:0", Some("[2001:db8:1::9]:443"), Fate::Began);
    let unnamed = flow(7, "10.1.0.9:40000", "192.0.2.10:0", None, Fate::Refused(AT + 2_000_000));
    let records = [
        flow4(8, Fate::Began),
        flow4(8, Fate::Ended(AT + 1000)),
        unnamed,
        six,
        ports(Change::Held),
        ports(Change::Returned),
    ];
    let mut encoder = Encoder::default();
    let mut reader = Reader::default();
    reader.read(&encoder.templates(5));
    let (message, count) = encoder.records(&records, "w1", 5);
    reader.read(&message);
    assert_eq!((count, encoder.sequence), (6, 6));
    let events: Vec<u8> = reader.records.iter().map(|record| value(record, 230)[0]).collect();
    // NAT44 session create and delete, NAT44 BIB delete, (historic) translation create, port block allocation and de-allocation.
    assert_eq!(events, [4, 5, 9, 1, 16, 17]);
    let [began, ended, unnamed, six, held, _] = &reader.records[..] else { panic!("{} records", reader.records.len()) };
    let ms = |record: &Vec<(u16, Vec<u8>)>, element| i64::from_be_bytes(value(record, element).try_into().unwrap());
    assert_eq!((ms(began, 323), ms(ended, 152), ms(ended, 153)), (AT / 1000, AT / 1000, AT / 1000 + 1));
    assert_eq!(
        (value(began, 8), value(began, 225), value(began, 12)),
        (&[10, 1, 0, 9][..], &[192, 0, 2, 10][..], &[203, 0, 113, 9][..])
    );
    assert_eq!((number(value(began, 7)), number(value(began, 227)), number(value(began, 11))), (40_000, 8, 443));
    assert_eq!((value(began, 4), value(began, 371)), (&[6][..], &b"prod/web"[..]));
    assert_eq!((value(unnamed, 12), number(value(unnamed, 227))), (&[][..], 7));
    assert_eq!((value(six, 27).len(), value(six, 281).len(), value(six, 28).len()), (16, 16, 16));
    assert_eq!((value(held, 8), value(held, 225)), (&[172, 18, 0, 3][..], &[192, 0, 2, 10][..]));
    assert_eq!((number(value(held, 361)), number(value(held, 362)), value(held, 371)), (2048, 2111, &b"w1"[..]));
}

#[test]
fn messages_take_as_many_records_as_fit_and_number_them() {
    let mut records: Vec<Record> = (0..100).map(|port| flow4(port, Fate::Began)).collect();
    if let Some(Record::Flow(flow)) = records.get_mut(50) {
        flow.pod = "é".repeat(400).into();
    }
    let (mut encoder, mut reader, mut rest) = (Encoder { sequence: u32::MAX - 10 }, Reader::default(), &records[..]);
    reader.read(&encoder.templates(5));
    while !rest.is_empty() {
        let (message, count) = encoder.records(rest, "w1", 5);
        let before = u32::from_be_bytes(message[8..12].try_into().unwrap());
        assert_eq!(before.wrapping_add(count as u32), encoder.sequence);
        reader.read(&message);
        rest = &rest[count..];
    }
    let read: Vec<u16> = reader.records.iter().map(|record| number(value(record, 227))).collect();
    assert_eq!(read, (0..100).collect::<Vec<u16>>());
    assert_eq!(String::from_utf8(value(&reader.records[50], 371).to_vec()).unwrap(), "é".repeat(127));
}

/// Waits until a condition holds, for at most 20 s.
pub(in crate::flowlog) fn wait(what: &str, mut until: impl FnMut() -> bool) {
    let began = Instant::now();
    while !until() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::yield_now();
    }
}

fn start(format: Format, address: SocketAddr) -> (Exporters, std::sync::Arc<Sent>) {
    let exporters = Exporters::start(&[Collector { format, address: address.to_string() }], "w1");
    let counts = exporters.counts().remove(0);
    (exporters, counts)
}

#[test]
fn lost_json_records_are_counted_and_reported_on_reconnection() {
    // Between the two listeners, no other test takes the port of this address.
    let listener = TcpListener::bind("127.0.0.17:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let (exporters, counts) = start(Format::Json, address);
    exporters.send(vec![flow4(1, Fate::Began), flow4(2, Fate::Began)]);
    wait("records for an unreachable collector are lost", || counts.lost.load(Ordering::Relaxed) == 2);

    let listener = TcpListener::bind(address).unwrap();
    exporters.send(vec![flow4(3, Fate::Began)]);
    let mut lines = BufReader::new(listener.accept().unwrap().0).lines();
    let mut next = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    let (lost, first) = (next(), next());
    assert_eq!((&lost["event"], &lost["lost"]), (&"lost".into(), &2.into()), "{lost}");
    assert_eq!(first["egress_port"], 3, "{first}");
    drop(lines);

    // The collector closes the connection, so the next records arrive in another one.
    exporters.send(vec![flow4(4, Fate::Began)]);
    let mut lines = BufReader::new(listener.accept().unwrap().0).lines();
    let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!((&line["event"], &line["egress_port"]), (&"flow_began".into(), &4.into()), "{line}");
    // A record that has arrived is counted a moment later.
    let counted = || (counts.sent.load(Ordering::Relaxed), counts.lost.load(Ordering::Relaxed));
    wait("two records are sent and two are lost", || counted() == (2, 2));
}

#[test]
fn stalled_collector_costs_at_most_its_queue() {
    // The listener accepts nothing, so records fill the socket's buffers, and then the queue.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (exporters, counts) = start(Format::Json, listener.local_addr().unwrap());
    let batch: Vec<Record> = (0..50_000).map(|port| flow4(port, Fate::Began)).collect();
    let began = Instant::now();
    for _ in 0..10 {
        exporters.send(batch.clone());
    }
    assert!(counts.lost.load(Ordering::Relaxed) > 0, "the queue is unbounded");
    // The sender has not waited for the collector, and the drop waits for at most one attempt.
    drop(exporters);
    assert!(began.elapsed() < Duration::from_secs(20));
    // The drop did not wait for the last records.
    let known = || counts.sent.load(Ordering::Relaxed) + counts.lost.load(Ordering::Relaxed);
    wait("all records are counted", || known() == 500_000);
}

#[test]
fn slow_collector_does_not_delay_the_exit() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // The collector reads a little each time before the writer would give up.
    let (ended, end) = std::sync::mpsc::channel::<()>();
    let collector = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut some = vec![0; 1 << 18];
        while end.recv_timeout(Duration::from_millis(500)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            assert!(stream.read(&mut some).unwrap() > 0);
        }
    });
    let (exporters, counts) = start(Format::Json, address);
    exporters.send((0..u16::MAX).chain(0..u16::MAX).map(|port| flow4(port, Fate::Began)).collect());
    wait("the collector takes some", || counts.sent.load(Ordering::Relaxed) > 0);
    let began = Instant::now();
    drop(exporters);
    // Reading everything would take the collector more than a minute.
    let waited = began.elapsed();
    assert!(waited < Duration::from_secs(30), "{waited:?}");
    ended.send(()).unwrap();
    collector.join().unwrap();
}

#[test]
fn ipfix_collector_gets_templates_first_and_can_detect_losses() {
    let collector = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (exporters, counts) = start(Format::Ipfix, collector.local_addr().unwrap());
    exporters.send(vec![flow4(1, Fate::Began), ports(Change::Granted)]);
    let mut reader = Reader::default();
    let mut hear = || {
        let mut message = [0; 2048];
        let length = collector.recv(&mut message).unwrap();
        reader.read(&message[..length]);
        u32::from_be_bytes(message[8..12].try_into().unwrap())
    };
    assert_eq!((hear(), hear()), (0, 0));
    counts.lost.fetch_add(5, Ordering::Relaxed);
    exporters.send(vec![flow4(2, Fate::Began)]);
    assert_eq!(hear(), 2 + 5);
    assert_eq!(reader.records.len(), 3);
}
