//! UDP flow state in the datapath: whether the flow is one question and its answer.

/// Bits of [`Flow::state`](crate::flow::Flow::state) and [`Reverse::state`](crate::flow::Reverse::state) of a UDP flow.
pub mod seen {
    /// The pod's first packet has not been sent yet.
    pub const NEW: u16 = 1;
    /// The pod has sent more than one packet.
    pub const MORE: u16 = 2;
    /// Of the reverse half: there was an answer.
    pub const ANSWER: u16 = 4;
}

/// Returns the state of the forward half after a packet of the pod.
#[inline(always)]
pub const fn sent(state: u16) -> u16 {
    if state & seen::NEW != 0 { state & !seen::NEW } else { state | seen::MORE }
}

/// Returns whether the pod has sent one question, and nothing since.
#[inline(always)]
pub const fn is_question(state: u16) -> bool {
    state & seen::MORE == 0
}
