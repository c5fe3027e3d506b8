//! TCP connection state in the datapath: flags seen in each direction, and the idle time that they imply.

/// TCP flags as they lie in byte 13 of the header.
pub mod flag {
    /// No more data from the sender.
    pub const FIN: u8 = 1;
    /// Synchronise sequence numbers.
    pub const SYN: u8 = 2;
    /// Reset the connection.
    pub const RST: u8 = 4;
    /// The acknowledgment field is significant.
    pub const ACK: u8 = 16;
}

/// Bits of a flow's state, one set for each direction.
pub mod seen {
    /// A SYN or, from the remote side, a SYN+ACK.
    pub const SYN: u16 = 1;
    /// A segment with ACK after the SYN.
    pub const ACK: u16 = 2;
    /// A FIN.
    pub const FIN: u16 = 4;
    /// A RST.
    pub const RST: u16 = 8;
    /// Not a TCP flag: the host's firewall has let a packet of the flow pass, or is not consulted.
    /// Only in the reverse half, which delivers nothing without it.
    pub const CONFIRMED: u16 = 32;
    /// Not a TCP flag: the tables that classify flows have changed since the flow's slot was chosen. Only in the forward half.
    pub const CHANGED: u16 = 16;
}

/// Returns the state after a segment with these flags in that direction.
#[inline(always)]
pub const fn advance(state: u16, flags: u8) -> u16 {
    let mut s = state;
    if flags & flag::SYN != 0 {
        s |= seen::SYN;
    } else if flags & flag::ACK != 0 {
        s |= seen::ACK;
    }
    if flags & flag::FIN != 0 {
        s |= seen::FIN;
    }
    if flags & flag::RST != 0 {
        s |= seen::RST;
    }
    s
}

/// How the remote side has ended the connection, as bits ([`Flow::back`](crate::flow::Flow::back)). Any outside host can forge a FIN
/// or a RST. Only the pod's TCP can tell whether one is genuine: it acknowledges a genuine FIN, and a genuine RST has exactly the
/// sequence number that it expects next (RFC 5961, section 3.2). So a connection ends only at a FIN or RST that the pod has reached.
pub mod end {
    /// A FIN.
    pub const FIN: u8 = 1;
    /// A RST.
    pub const RST: u8 = 2;
    /// The pod has acknowledged everything before it.
    pub const ACCEPTED: u8 = 4;
}

/// Returns the `end` bits after a segment of the remote side with FIN or RST among these flags.
/// `accepted`: the pod has acknowledged everything before it.
#[inline(always)]
pub const fn ends(back: u8, flags: u8, accepted: bool) -> u8 {
    let what = if flags & flag::RST != 0 { end::RST } else { end::FIN };
    match (back & end::ACCEPTED != 0, accepted) {
        (_, true) => what | end::ACCEPTED,
        (true, false) => back,
        (false, false) => what,
    }
}

/// Returns the `end` bits after a segment of the pod that acknowledges `ack`. An end before that number is void.
#[inline(always)]
pub const fn acknowledges(back: u8, end: u32, ack: u32) -> u8 {
    match ack.wrapping_sub(end) as i32 {
        0 => back | end::ACCEPTED,
        beyond if beyond > 0 => 0,
        _ => back,
    }
}

/// Returns whether both sides are done with the connection, so that the rest of its idle time need not pass.
#[inline(always)]
pub const fn closed(out: u16, back: u8) -> bool {
    out & seen::RST != 0 || back & end::ACCEPTED != 0 && (back & end::RST != 0 || out & seen::FIN != 0)
}

/// Returns whether the handshake is complete and the pod has not begun to close. The long idle time then applies (RFC 5382,
/// REQ-5), even after a FIN of the remote side (RFC 6146, section 3.5.2.2). `back` holds the flags seen from the remote side.
#[inline(always)]
pub const fn established(out: u16, back: u16) -> bool {
    out & seen::ACK != 0 && back & (seen::SYN | seen::ACK) != 0 && out & (seen::FIN | seen::RST) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_from_syn_to_fin() {
        let out = advance(0, flag::SYN);
        assert!(!established(out, 0) && !closed(out, 0));
        let back = advance(0, flag::SYN | flag::ACK);
        assert!(!established(out, back), "our ACK is missing");
        let out = advance(out, flag::ACK);
        assert!(established(out, back));
        let out = advance(out, flag::FIN | flag::ACK);
        assert!(!established(out, back) && !closed(out, 0));
        let end = ends(0, flag::FIN | flag::ACK, false);
        assert!(!closed(out, end), "nobody has acknowledged that");
        assert!(closed(out, acknowledges(end, 1_001, 1_001)));
    }

    #[test]
    fn a_connection_that_the_remote_side_closes_first_ends_with_the_pods_fin() {
        let out = advance(advance(0, flag::SYN), flag::ACK);
        let end = acknowledges(ends(0, flag::FIN, false), 7, 7);
        assert!(!closed(out, end) && established(out, seen::SYN));
        assert!(closed(advance(out, flag::FIN | flag::ACK), end));
    }

    #[test]
    fn reset_counts_if_sent_by_the_pod_or_at_its_acknowledged_position() {
        assert!(closed(seen::SYN | seen::RST, 0));
        assert!(closed(seen::SYN, ends(0, flag::RST, true)));
        let early = ends(0, flag::RST | flag::ACK, false);
        assert!(!closed(seen::SYN, early));
        // An acknowledgment that was in flight, one of all data before the reset, and one of data beyond it.
        assert_eq!(acknowledges(early, 0, u32::MAX), early);
        assert!(closed(seen::SYN, acknowledges(early, 0, 0)));
        assert_eq!(acknowledges(early | end::ACCEPTED, u32::MAX, 1), 0);
        // An unaccepted end does not replace an accepted one.
        assert_eq!(ends(end::FIN | end::ACCEPTED, flag::RST, false), end::FIN | end::ACCEPTED);
        assert_eq!(ends(end::FIN | end::ACCEPTED, flag::RST, true), end::RST | end::ACCEPTED);
    }
}
