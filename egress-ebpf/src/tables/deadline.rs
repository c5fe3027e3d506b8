//! The time until which this node may act for egress IPs.

use crate::{headers::packet::now_ns, tables::maps::DEADLINE};
/// Returns whether one of this node's [`deadline`](egress_common::egress::deadline)s has not passed yet.
#[inline(always)]
pub fn is_before(entry: u32) -> bool {
    matches!(DEADLINE.get(entry), Some(&deadline) if now_ns() < deadline)
}
