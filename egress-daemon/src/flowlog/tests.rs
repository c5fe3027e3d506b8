//! Segments and journals give back what was written, and the directory survives crashes and stays small.

use super::*;
use egress_core::leaselog::{LeaseEvent, LeaseRecord, PortLease};
use proptest::prelude::*;
use std::fs;
use std::path::Path;

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
    fn a_segment_and_a_journal_give_back_what_was_written(records in prop::collection::vec(record(), 0..60)) {
        let file = tempfile::tempfile().unwrap();
        segment::write(&records, &file).unwrap();
        prop_assert_eq!(segment::read(file).unwrap(), records.clone());
        prop_assert_eq!(journal::decode(&journal::encode(&records)), records);
    }

    #[test]
    fn a_journal_that_was_cut_off_has_all_whole_lines(records in prop::collection::vec(record(), 1..20), cut in any::<prop::sample::Index>()) {
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

#[test]
fn a_log_goes_on_after_rotations_and_crashes() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    let mut log = Log::open(limits.clone(), 1_000_000).unwrap();
    log.append(&[alive(1), alive(2)]).unwrap();
    log.rotate(3_000_000).unwrap();
    log.append(&[alive(3)]).unwrap();
    assert_eq!(all(&limits), [alive(1), alive(2), alive(3)]);
    // It dies in the middle of a line, and in the middle of a segment.
    drop(log);
    let journal = limits.directory.join("00000000000003000000.journal");
    fs::write(&journal, [&fs::read(&journal).unwrap()[..], b"{\"at\":4"].concat()).unwrap();
    fs::write(limits.directory.join("00000000000003000000.part"), "PAR1").unwrap();
    let mut log = Log::open(limits.clone(), 5_000_000).unwrap();
    log.append(&[alive(5)]).unwrap();
    assert_eq!(all(&limits), [alive(1), alive(2), alive(3), alive(5)]);
    let expected = ["00000000000001000000.parquet", "00000000000003000000.parquet", "00000000000005000000.journal"];
    assert_eq!(names(&limits), expected);
}

#[test]
fn files_keep_their_order_when_the_clock_is_set_back() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    Log::open(limits.clone(), 5_000_000).unwrap().append(&[alive(5)]).unwrap();
    Log::open(limits.clone(), 2_000_000).unwrap().append(&[alive(2)]).unwrap();
    assert_eq!(all(&limits), [alive(5), alive(2)]);
}

#[test]
fn a_journal_whose_segment_is_there_counts_once() {
    let directory = tempfile::tempdir().unwrap();
    let limits = limits(directory.path());
    let mut log = Log::open(limits.clone(), 1_000_000).unwrap();
    log.append(&[alive(1)]).unwrap();
    let journal = limits.directory.join("00000000000001000000.journal");
    let text = fs::read(&journal).unwrap();
    log.rotate(2_000_000).unwrap();
    fs::write(&journal, text).unwrap();
    assert_eq!(all(&limits), [alive(1)]);
    drop(Log::<LeaseRecord>::open(limits.clone(), 3_000_000).unwrap());
    assert_eq!(all(&limits), [alive(1)]);
    assert!(!journal.exists());
}

#[test]
fn old_segments_go_and_the_oldest_where_all_are_too_large() {
    let directory = tempfile::tempdir().unwrap();
    let mut limits = limits(directory.path());
    let mut log = Log::open(limits.clone(), 1_000_000).unwrap();
    for second in [1, 50, 100] {
        log.append(&[alive(second)]).unwrap();
        log.rotate((second + 10) * 1_000_000).unwrap();
    }
    // The first ended with the second 11.
    log.expire(112_000_000).unwrap();
    assert_eq!(all(&limits), [alive(50), alive(100)]);
    limits.bytes = 1;
    drop(log);
    Log::<LeaseRecord>::open(limits.clone(), 120_000_000).unwrap().expire(121_000_000).unwrap();
    assert_eq!(all(&limits), []);
    assert_eq!(names(&limits), ["00000000000120000000.journal"]);
}
