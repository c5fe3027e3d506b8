//! Segments and journals return the records that were written, and the directory survives crashes and stays small.

use super::*;
use egress_core::leaselog::{LeaseEvent, LeaseRecord, PortLease};
use egress_node::datapath::Pins;
use proptest::prelude::*;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

fn lease() -> impl Strategy<Value = PortLease> {
    let address = prop_oneof![
        any::<[u8; 4]>().prop_map(std::net::IpAddr::from),
        any::<[u8; 16]>().prop_map(std::net::IpAddr::from)
    ];
    (address, any::<u16>(), any::<u16>(), "[a-z0-9.-]{1,20}").prop_map(|(egress_ip, first_port, last_port, node)| {
        PortLease { egress_ip, first_port, last_port, node: node.as_str().into() }
    })
}

fn record() -> impl Strategy<Value = LeaseRecord> {
    let event = prop_oneof![
        Just(LeaseEvent::Started),
        Just(LeaseEvent::Continued),
        Just(LeaseEvent::Alive),
        Just(LeaseEvent::Stopped),
        any::<u32>().prop_map(|count| LeaseEvent::Lost(count.into())),
        lease().prop_map(LeaseEvent::Held),
        lease().prop_map(LeaseEvent::Granted),
        lease().prop_map(LeaseEvent::Returned),
    ];
    (0..i64::MAX / 2, event).prop_map(|(at, event)| LeaseRecord { at, event })
}

proptest! {
    #[test]
    fn segment_and_journal_return_the_written_records(records in prop::collection::vec(record(), 0..60)) {
        let file = tempfile::tempfile().unwrap();
        segment::write(&records, &file).unwrap();
        prop_assert_eq!(segment::read(file).unwrap(), records.clone());
        prop_assert_eq!(journal::decode(&journal::encode(&records)), records);
    }

    #[test]
    fn truncated_journal_keeps_all_complete_lines(records in prop::collection::vec(record(), 1..20), cut in any::<prop::sample::Index>()) {
        let text = journal::encode(&records);
        let cut = cut.index(text.len());
        let whole = text[..cut].iter().filter(|byte| **byte == b'\n').count();
        let read = journal::decode(&text[..cut]);
        prop_assert_eq!(&read[..whole], &records[..whole]);
        prop_assert!(read.len() <= whole + 1, "{:?}", read);
    }
}

fn limits(directory: &Path) -> Limits {
    Limits { directory: directory.join("log"), retention: Duration::from_secs(100), bytes: MAX_BYTES }
}

fn alive(second: i64) -> LeaseRecord {
    LeaseRecord { at: second * 1_000_000, event: LeaseEvent::Alive }
}

fn all(limits: &Limits) -> Vec<LeaseRecord> {
    read(&limits.directory, |_| true).unwrap()
}

fn names(limits: &Limits) -> Vec<String> {
    let entries = fs::read_dir(&limits.directory).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn open(limits: &Limits, second: i64) -> Log<LeaseRecord> {
    Log::open(limits.clone(), second * 1_000_000).unwrap()
}

/// Ends a log's journal and begins another one with a record.
fn rotate(log: &mut Log<LeaseRecord>, second: i64) {
    log.rotate(second * 1_000_000).unwrap();
    log.append(&[alive(second)]).unwrap();
    log.tidy(second * 1_000_000).unwrap();
}

#[test]
fn a_log_goes_on_after_rotations_and_crashes() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    let mut log = open(&limits, 1);
    log.append(&[alive(1), alive(2)]).unwrap();
    rotate(&mut log, 3);
    assert_eq!(all(&limits), [alive(1), alive(2), alive(3)]);
    // The process dies in the middle of a line, and in the middle of a segment.
    drop(log);
    let journal = limits.directory.join("00000000000003000000.journal");
    fs::write(&journal, [&fs::read(&journal).unwrap()[..], b"{\"at\":4"].concat()).unwrap();
    fs::write(limits.directory.join("00000000000002000000.part"), "PAR1").unwrap();
    let mut log = open(&limits, 5);
    log.append(&[alive(5)]).unwrap();
    log.tidy(5_000_000).unwrap();
    assert_eq!(all(&limits), [alive(1), alive(2), alive(3), alive(5)]);
    let expected = ["00000000000001000000.parquet", "00000000000003000000.parquet", "00000000000005000000.journal"];
    assert_eq!(names(&limits), expected);
}

#[test]
fn files_keep_their_order_when_the_clock_is_set_back() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    open(&limits, 5).append(&[alive(5)]).unwrap();
    open(&limits, 2).append(&[alive(2)]).unwrap();
    assert_eq!(all(&limits), [alive(5), alive(2)]);
}

#[test]
fn journal_with_an_existing_segment_counts_once() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    let mut log = open(&limits, 1);
    log.append(&[alive(1)]).unwrap();
    let journal = limits.directory.join("00000000000001000000.journal");
    let text = fs::read(&journal).unwrap();
    rotate(&mut log, 2);
    fs::write(&journal, text).unwrap();
    assert_eq!(all(&limits), [alive(1), alive(2)]);
    rotate(&mut log, 3);
    assert_eq!(all(&limits), [alive(1), alive(2), alive(3)]);
    assert!(!journal.exists());
}

#[test]
fn segments_are_removed_by_age_and_oldest_first_by_size() {
    let directory = tempfile::tempdir().unwrap();
    let mut limits = limits(directory.path());
    let mut log = open(&limits, 1);
    log.append(&[alive(1)]).unwrap();
    rotate(&mut log, 11);
    rotate(&mut log, 50);
    // The first segment ended at second 11.
    log.tidy(112_000_000).unwrap();
    assert_eq!(all(&limits), [alive(11), alive(50)]);
    limits.bytes = 1;
    drop(log);
    open(&limits, 120).tidy(121_000_000).unwrap();
    assert_eq!(all(&limits), []);
    assert_eq!(names(&limits), ["00000000000120000000.journal"]);
}

/// Returns a log with a file from second 1, and an open file from second 10.
fn rotated(limits: &Limits) -> Log<LeaseRecord> {
    let mut log = open(limits, 1);
    log.append(&[alive(1)]).unwrap();
    rotate(&mut log, 10);
    log
}

/// Sets the time of the last write to the journal that began at second `began`.
fn date(limits: &Limits, began: i64, written: u64) {
    let path = limits.directory.join(format!("{:020}.journal", began * 1_000_000));
    let journal = fs::OpenOptions::new().append(true).open(path).unwrap();
    journal.set_modified(UNIX_EPOCH + Duration::from_secs(written)).unwrap();
}

/// Returns a keeper of journals with at most two records after the first.
fn keeper(limits: &Limits) -> keeper::Keeper<LeaseRecord> {
    keeper::Keeper::new(limits.clone(), "tests", keeper::Longest { records: 2, age: i64::MAX })
}

#[test]
fn log_that_cannot_be_written_still_removes_old_files() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    let _log = rotated(&limits);
    let mut keeper = keeper(&limits);
    assert!(keeper.open(20_000_000) && keeper.append(&[alive(20)]));
    keeper.tend(20_000_000);
    keeper.fill(true).unwrap();
    for second in [21, 100, 170] {
        assert!(!keeper.append(&[alive(second)]));
        keeper.tend(second * 1_000_000);
    }
    assert_eq!(names(&limits), ["00000000000020000000.journal"]);
    keeper.fill(false).unwrap();
    assert!(keeper.append(&[alive(171)]));
    assert_eq!(all(&limits), [alive(20), alive(171)]);
}

#[test]
fn log_that_cannot_be_begun_still_removes_old_files() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    let mut log = rotated(&limits);
    rotate(&mut log, 50);
    drop(log);
    date(&limits, 50, 75);
    // The directory cannot be removed as a file, so no log begins.
    let obstacle = limits.directory.join("00000000000000000001.part");
    fs::create_dir(&obstacle).unwrap();
    let mut keeper = keeper(&limits);
    assert!(!keeper.open(112_000_000));
    assert_eq!(all(&limits), [alive(10), alive(50)]);
    // Old files are removed even without an attempt to open the log.
    keeper.tend(172_000_000);
    assert_eq!(all(&limits), [alive(50)]);
    keeper.tend(232_000_000);
    assert_eq!(all(&limits), []);
    fs::remove_dir(obstacle).unwrap();
    assert!(keeper.open(232_000_000));
}

#[test]
fn last_file_is_removed_by_age_unless_it_is_being_written() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    let log = rotated(&limits);
    date(&limits, 10, 20);
    log.tidy(1_000_000_000).unwrap();
    assert_eq!(names(&limits), ["00000000000010000000.journal"]);
    drop(log);
    // The process was killed in the middle of a segment, and no other process opens the log.
    fs::write(limits.directory.join("00000000000010000000.part"), "PAR1").unwrap();
    let mut keeper = keeper(&limits);
    keeper.tend(120_000_000);
    assert_eq!(names(&limits), ["00000000000010000000.journal"]);
    keeper.tend(180_000_000);
    assert!(names(&limits).is_empty(), "{:?}", names(&limits));
}

#[test]
fn switched_off_flow_log_still_removes_old_files() {
    for mode in [Mode::Leases, Mode::Off] {
        let directory = tempfile::tempdir().unwrap();
        let limits = limits(directory.path());
        drop(rotated(&limits));
        let settings = flows::Settings {
            config: FlowLog { mode, retention: limits.retention, ..FlowLog::default() },
            directory: limits.directory.clone(),
            node: "w1".into(),
            pins: Pins::new(directory.path()),
            kept: true,
            exporters: export::Exporters::default(),
        };
        let run = || drop(flows::Follower::start(settings.clone(), Arc::default()).unwrap());
        run();
        // The last file was written just now.
        assert_eq!(names(&limits), ["00000000000010000000.journal"], "{mode:?}");
        date(&limits, 10, 20);
        run();
        assert!(names(&limits).is_empty(), "{mode:?}: {:?}", names(&limits));
    }
}

#[test]
fn failed_write_is_truncated_without_losing_earlier_records() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    let mut log = open(&limits, 1);
    log.append(&[alive(1)]).unwrap();
    let path = limits.directory.join("00000000000001000000.journal");
    for second in 2..4 {
        // The write fails, and so does the removal of its first half.
        log.fill(true).unwrap();
        log.append(&[alive(0)]).unwrap_err();
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"at\":").unwrap();
        log.append(&[alive(0)]).unwrap_err();
        log.fill(false).unwrap();
        log.append(&[alive(second)]).unwrap();
    }
    assert_eq!(fs::read(&path).unwrap(), journal::encode(&[alive(1), alive(2), alive(3)]));
}

/// Simulates a full disk for the segment of the journal that begins at this second.
fn fill(limits: &Limits, second: i64) {
    let part = limits.directory.join(format!("{:020}.part", second * 1_000_000));
    std::os::unix::fs::symlink("/dev/full", part).unwrap();
}

#[test]
fn failed_journal_conversion_is_retried_before_newer_journals() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    let mut keeper = keeper(&limits);
    assert!(keeper.open(1_000_000));
    let mut write = |second: i64| {
        assert!(keeper.append(&[alive(second)]));
        if keeper.rotate(second * 1_000_000) {
            assert!(keeper.append(&[alive(second)]));
        }
        keeper.tend(second * 1_000_000);
    };
    write(1);
    fill(&limits, 1);
    (2..=3).for_each(&mut write);
    let names = || names(&limits);
    // Nothing is left of the segment, and no newer journal is converted.
    assert_eq!(names(), ["00000000000001000000.journal", "00000000000003000000.journal"]);
    (4..=5).for_each(&mut write);
    let finished = ["00000000000001000000.parquet", "00000000000003000000.parquet", "00000000000005000000.journal"];
    assert_eq!(names(), finished);
    // Without a new journal, the conversion is retried after a minute.
    fill(&limits, 5);
    (6..=7).for_each(&mut write);
    assert_eq!(names()[2..], ["00000000000005000000.journal", "00000000000007000000.journal"]);
    write(67);
    assert!(!limits.directory.join("00000000000005000000.journal").exists(), "{:?}", names());
    assert_eq!(all(&limits).len(), 11);
}

#[test]
fn only_a_full_disk_error_has_a_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    let mut log = open(&limits, 1);
    log.append(&[alive(1)]).unwrap();
    log.rotate(2_000_000).unwrap();
    log.append(&[alive(2)]).unwrap();
    fill(&limits, 1);
    let full = log.tidy(3_000_000).unwrap_err().to_string();
    assert!(full.contains("make room, or set flowLog.mode to Off"), "{full}");
    let missing = read(&limits.directory.join("none"), |_| true).unwrap_err().to_string();
    assert!(missing.contains("none: ") && !missing.contains("room"), "{missing}");
}
