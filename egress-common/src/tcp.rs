//! What the datapath remembers of a TCP connection: flags seen in each direction, and the idle time that follows.

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
    /// No segment: the tables that flows are classified by have changed since the flow's slot was chosen. Only of the forward half.
    pub const CHANGED: u16 = 16;
}

/// The state after a segment with these flags in that direction.
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

/// Whether both ends are done with the connection, so that its port may be given to another one when no free one is left.
#[inline(always)]
pub const fn closed(out: u16, back: u16) -> bool {
    (out | back) & seen::RST != 0 || out & back & seen::FIN != 0
}

/// Whether the handshake is complete and nobody has begun to close: the long idle time applies (RFC 5382, REQ-5).
#[inline(always)]
pub const fn established(out: u16, back: u16) -> bool {
    out & seen::ACK != 0 && back & (seen::SYN | seen::ACK) != 0 && (out | back) & (seen::FIN | seen::RST) == 0
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
        assert!(!established(out, back) && !closed(out, back));
        let back = advance(back, flag::FIN | flag::ACK);
        assert!(closed(out, back));
    }

    #[test]
    fn a_reset_closes_from_either_side() {
        assert!(closed(seen::SYN, seen::RST) && closed(seen::RST, 0));
    }
}
