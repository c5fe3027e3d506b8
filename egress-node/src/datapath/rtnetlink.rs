//! One request to the kernel's rtnetlink and its reply, without a runtime.

use rtnetlink::{
    packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::RouteNetlinkMessage,
    sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE},
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
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&bytes, 0)?;
    let mut found = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest).map_err(io::Error::other)?;
            match answer.payload {
                NetlinkPayload::Done(_) => return Ok(found),
                // An acknowledgement is an error without a code.
                NetlinkPayload::Error(error) if error.code.is_none() => return Ok(found),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                NetlinkPayload::InnerMessage(message) => found.push(message),
                _ => {}
            }
            let length = (answer.header.length as usize).next_multiple_of(4);
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}
