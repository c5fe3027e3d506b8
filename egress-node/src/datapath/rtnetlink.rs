//! One request to the kernel's rtnetlink and its reply, without a runtime.

use crate::netlink::{DONE, ERROR, exchange};
use rtnetlink::{
    packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable as _, NetlinkHeader, NetlinkMessage},
    packet_route::RouteNetlinkMessage,
    sys::protocols::NETLINK_ROUTE,
};
use std::io;

/// The extent of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// The single object that the request names.
    One,
    /// All objects that the request matches.
    All,
}

/// Sends a request. Returns the reply, or the kernel's error.
pub(super) fn ask(question: RouteNetlinkMessage, extent: Extent) -> io::Result<Vec<RouteNetlinkMessage>> {
    let mut request = NetlinkMessage::from(question);
    request.header.flags = NLM_F_REQUEST | if extent == Extent::All { NLM_F_DUMP } else { NLM_F_ACK };
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    let mut found = Vec::new();
    exchange(NETLINK_ROUTE, &bytes, |kind, body| {
        // An acknowledgement is an error without a code.
        let last = matches!(kind, DONE | ERROR);
        if !last {
            let mut header = NetlinkHeader::default();
            header.message_type = kind;
            found.push(RouteNetlinkMessage::deserialize(&header, body).map_err(io::Error::other));
        }
        last
    })?;
    found.into_iter().collect()
}
