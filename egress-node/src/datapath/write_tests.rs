//! What the writer resets besides the entries: meters of limits.

use super::*;
use crate::datapath::testing::rig::{Rig, scene};
use egress_core::model::Bandwidth;

#[test]
fn bytes_that_an_earlier_shaper_lost_do_not_count_against_a_new_limit() {
    let mut view = scene();
    let test = "bytes_that_an_earlier_shaper_lost_do_not_count_against_a_new_limit";
    let Some(mut rig) = Rig::new(test, &view) else { return };
    let mut maps = Maps::open(rig.pins()).unwrap();
    let index = *rig.writer.present().egress_ips.keys().next().unwrap();
    let lost = Meter { sent: 9000, passed: 2000, last: 1 };
    // Writes a limit and a shaper. Returns whether bytes that were lost before still count as waiting.
    let mut count_after = |limit: Option<u64>, shaper: u32| {
        let meters = [2 * index, 2 * index + 1];
        for meter in &meters {
            maps.meters.set(meter, &lost).unwrap();
        }
        for egress in view.egress_ips.values_mut() {
            egress.limit = limit.map(|rate_bps| Bandwidth { rate_bps, burst_bytes: 100_000 });
        }
        view.config.as_mut().unwrap().shaper_ifindex = shaper;
        rig.write(&view);
        meters.map(|meter| maps.meters.get(meter).unwrap() == lost)
    };
    assert_eq!(count_after(None, 20), [true; 2]);
    assert_eq!(count_after(Some(80_000_000), 20), [false; 2], "a new limit");
    assert_eq!(count_after(Some(8_000_000_000), 20), [true; 2], "another rate of the same shaper");
    assert_eq!(count_after(Some(8_000_000_000), 30), [false; 2], "another shaper");
}
