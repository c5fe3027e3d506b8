//! Tests of the lease log while a cluster's objects change and the disk fails.

use super::*;
use crate::store::Files;
use egress_core::leaselog::LeaseEvent;
use serde_json::json;
use std::path::Path;

const SECOND: i64 = 1_000_000;

struct LogFixture {
    directory: tempfile::TempDir,
    store: Store,
    follower: Follower,
}

impl LogFixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Files::open(directory.path()).unwrap();
        let log = directory.path().join("log");
        let limits = Limits { directory: log, retention: Duration::from_secs(3600), bytes: MAX_BYTES };
        let follower = Follower::new(limits, "gw1", store.clone(), Arc::default());
        Self { directory, store, follower }
    }

    /// Looks at this second, connected to the store.
    fn look(&mut self, second: i64) {
        self.look_when(second, second, true);
    }

    fn look_when(&mut self, second: i64, uptime: i64, connected: bool) {
        self.follower.look(Moment { at: second * SECOND, uptime: uptime * SECOND }, connected);
    }

    fn log(&self) -> std::path::PathBuf {
        self.directory.path().join("log")
    }

    async fn gateway(&self, name: &str) {
        let object = json!({"metadata": {"name": "192.0.2.1"}, "spec": {"address": "192.0.2.1"}});
        let object: EgressIP = serde_json::from_value(object).unwrap();
        let mut object = self.store.create(&object).await.unwrap();
        let status = object.status.get_or_insert_default();
        (status.node, status.carriers) = (Some(name.into()), vec![name.into()]);
        self.store.replace_status(&object).await.unwrap();
    }

    /// Gives a node these blocks, as (first, count). `None` removes its object.
    async fn lease(&self, node: &str, blocks: Option<&[(u16, u16)]>) {
        let present = self.store.get::<EgressNode>(&Key::cluster(node));
        let ranges: Vec<_> = blocks
            .into_iter()
            .flatten()
            .map(|(first, count)| json!({"first": first, "count": count, "revision": 1}))
            .collect();
        let spec = json!({"blocks": [{"egressIP": "192.0.2.1", "ranges": ranges}]});
        let object: EgressNode = serde_json::from_value(json!({"metadata": {"name": node}, "spec": spec})).unwrap();
        match (present, blocks) {
            (None, _) => drop(self.store.create(&object).await.unwrap()),
            (Some(present), None) => self.store.delete(present.as_ref()).await.unwrap(),
            (Some(present), Some(_)) => {
                let changed = EgressNode { spec: object.spec, ..present.as_ref().clone() };
                self.store.replace(&changed).await.unwrap();
            }
        }
    }

    fn written(&self) -> Vec<(i64, LeaseEvent)> {
        let records = super::super::read(&self.log(), |_| true).unwrap();
        records.into_iter().map(|record| (record.at / SECOND, record.event)).collect()
    }
}

fn ports(node: &str, first_port: u16, last_port: u16) -> PortLease {
    PortLease { egress_ip: "192.0.2.1".parse().unwrap(), first_port, last_port, node: node.into() }
}

#[tokio::test]
async fn a_gateway_writes_the_leases_of_all_nodes_and_others_write_nothing() {
    let mut world = LogFixture::new();
    world.lease("w1", Some(&[(0, 2)])).await;
    world.gateway("gw2").await;
    world.look(1);
    assert!(!Path::new(&world.log()).exists());

    world.store.delete(world.store.list::<EgressIP>()[0].as_ref()).await.unwrap();
    world.gateway("gw1").await;
    world.look(2);
    world.lease("w2", Some(&[(4, 1)])).await;
    world.look(3);
    world.look(4);
    world.lease("w1", None).await;
    world.look(5);
    world.look(15);
    let expected = [
        (2, LeaseEvent::Started),
        (2, LeaseEvent::Held(ports("w1", 1024, 1151))),
        (3, LeaseEvent::Granted(ports("w2", 1280, 1343))),
        (5, LeaseEvent::Returned(ports("w1", 1024, 1151))),
        (15, LeaseEvent::Alive),
    ];
    assert_eq!(world.written(), expected);
    assert_eq!(world.follower.counts.written.load(Ordering::Relaxed), 5);
}

#[tokio::test]
async fn switched_off_lease_log_still_removes_old_files() {
    let mut world = LogFixture::new();
    world.gateway("gw1").await;
    world.look(1);
    let config = FlowLog { mode: Mode::Off, ..FlowLog::default() };
    let run = || {
        let (store, exporters) = (world.store.clone(), Exporters::default());
        drop(LogWriter::start(&config, world.log(), "gw1", store, Arc::default(), exporters));
    };
    run();
    // The file was written just now.
    assert_eq!(world.written(), [(1, LeaseEvent::Started)]);
    let journal = world.log().join("00000000000001000000.journal");
    let journal = std::fs::OpenOptions::new().append(true).open(journal).unwrap();
    journal.set_modified(std::time::UNIX_EPOCH).unwrap();
    run();
    assert!(world.written().is_empty(), "{:?}", world.written());
}

#[tokio::test]
async fn records_lost_to_a_full_disk_are_counted_and_logged() {
    let mut world = LogFixture::new();
    world.gateway("gw1").await;
    world.look(1);
    world.follower.keeper.fill(true).unwrap();
    for (second, count) in [(2, 1), (3, 2)] {
        world.lease("w1", Some(&[(0, count)])).await;
        world.look(second);
    }
    world.follower.keeper.fill(false).unwrap();
    world.look(4);
    let expected = [
        (1, LeaseEvent::Started),
        (4, LeaseEvent::Lost(2)),
        (4, LeaseEvent::Continued),
        (4, LeaseEvent::Held(ports("w1", 1024, 1151))),
    ];
    assert_eq!(world.written(), expected);
    assert_eq!(world.follower.counts.lost.load(Ordering::Relaxed), 2);
    world.look(14);
    assert_eq!(world.written().last(), Some(&(14, LeaseEvent::Alive)));
}

#[tokio::test]
async fn long_journal_becomes_a_self_contained_segment() {
    let mut world = LogFixture::new();
    world.lease("w1", Some(&[(0, 1)])).await;
    world.gateway("gw1").await;
    world.look(1);
    world.look(1 + LONGEST.age / SECOND);
    let held = LeaseEvent::Held(ports("w1", 1024, 1087));
    let events: Vec<LeaseEvent> = world.written().into_iter().map(|(_, event)| event).collect();
    assert_eq!(events, [LeaseEvent::Started, held.clone(), LeaseEvent::Alive, LeaseEvent::Continued, held]);
    let files = std::fs::read_dir(world.log()).unwrap();
    let mut kinds: Vec<_> = files.map(|file| file.unwrap().path().extension().unwrap().to_owned()).collect();
    kinds.sort();
    assert_eq!(kinds, ["journal", "parquet"]);
}

#[tokio::test]
async fn leases_at_the_start_of_a_journal_do_not_count_towards_its_length() {
    let mut world = LogFixture::new();
    let blocks: Vec<(u16, u16)> = (0..200).map(|block| (2 * block, 1)).collect();
    world.lease("w1", Some(&blocks)).await;
    world.gateway("gw1").await;
    world.follower.keeper = Keeper::new(
        Limits { directory: world.log(), retention: Duration::from_secs(3600), bytes: MAX_BYTES },
        "leases",
        Longest { records: 3, ..LONGEST },
    );
    let files = |world: &LogFixture| std::fs::read_dir(world.log()).unwrap().count();
    for (second, blocks) in [(1, &blocks[..]), (2, &blocks[1..]), (3, &blocks[2..])] {
        world.lease("w1", Some(blocks)).await;
        world.look(second);
    }
    assert_eq!((files(&world), world.written().len()), (1, 203));
    world.lease("w1", Some(&blocks[3..])).await;
    world.look(4);
    assert_eq!((files(&world), world.written().len()), (2, 204 + 198));
}

#[tokio::test]
async fn disconnected_gateway_logs_nothing_and_records_the_gap_afterwards() {
    let mut world = LogFixture::new();
    world.gateway("gw1").await;
    world.look_when(1, 1, false);
    assert!(!world.log().exists());
    world.look(2);
    world.lease("w1", Some(&[(0, 1)])).await;
    (3..30).for_each(|second| world.look_when(second, second, false));
    world.look(30);
    // Then its clock is set back by ten seconds.
    world.look_when(21, 31, true);
    let expected = [
        (2, LeaseEvent::Started),
        (30, LeaseEvent::Lost(0)),
        (30, LeaseEvent::Granted(ports("w1", 1024, 1087))),
        (31, LeaseEvent::Alive),
        (21, LeaseEvent::Alive),
    ];
    assert_eq!(world.written(), expected);
    // The log ends while it is not connected, so no record covers that time.
    world.look_when(22, 32, false);
    let LogFixture { directory: _kept, store: _, follower } = world;
    let log = follower.keeper.directory().to_owned();
    follower.stop(23 * SECOND);
    let records = super::super::read(&log, |_| true).unwrap();
    assert_eq!(records.last().map(|record| &record.event), Some(&LeaseEvent::Alive));
}
