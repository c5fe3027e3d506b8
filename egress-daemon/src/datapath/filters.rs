//! The filters of a clsact qdisc, in the order in which packets meet them.

use std::io;

use aya::programs::TcAttachType;
use rtnetlink::packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::tc::{TcAttribute, TcFilterBpfOption, TcHandle, TcMessage, TcOption};
use rtnetlink::sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// A filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Packets meet those with lower ones first.
    pub priority: u16,
    /// Its number among those of its priority.
    pub handle: u32,
    /// Its kind: `bpf`, `flower`...
    pub kind: String,
    /// The id of its program, if it has one.
    pub program: Option<u32>,
}

/// The filters at one side of an interface, the first one first. An error where there is no clsact qdisc, or no interface.
pub fn filters(interface: &str, direction: TcAttachType) -> io::Result<Vec<Filter>> {
    let minor = match direction {
        TcAttachType::Egress => 0xfff3,
        _ => 0xfff2,
    };
    let mut message = TcMessage::default();
    message.header.index = nix::net::if_::if_nametoindex(interface)?.cast_signed();
    message.header.parent = TcHandle { major: 0xffff, minor };
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::GetTrafficFilter(message));
    request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
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
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewTrafficFilter(message)) => {
                    found.extend(filter(&message));
                }
                _ => {}
            }
            let length = (answer.header.length as usize).next_multiple_of(4);
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}

/// The filter that a message describes; `None` for the head of a priority's list.
fn filter(message: &TcMessage) -> Option<Filter> {
    let handle = u32::from(message.header.handle);
    let mut filter =
        Filter { priority: (message.header.info >> 16) as u16, handle, kind: String::new(), program: None };
    for attribute in &message.attributes {
        match attribute {
            TcAttribute::Kind(kind) => filter.kind.clone_from(kind),
            TcAttribute::Options(options) => {
                let id = options.iter().find_map(|option| match option {
                    TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(*id),
                    _ => None,
                });
                filter.program = filter.program.or(id);
            }
            _ => {}
        }
    }
    (handle != 0).then_some(filter)
}
