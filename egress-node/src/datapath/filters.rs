//! The filters of a clsact qdisc, in the order in which packets meet them.

use super::rtnetlink::{Extent, ask};
use aya::programs::TcAttachType;
use rtnetlink::packet_route::{
    RouteNetlinkMessage,
    tc::{
        TcAction, TcActionAttribute, TcAttribute, TcFilterBpfOption, TcFilterFlowerOption, TcFilterMatchAllOption,
        TcFilterU32Option, TcHandle, TcMessage, TcOption,
    },
};
use std::io;

/// A filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Packets meet filters with a lower priority first.
    pub priority: u16,
    /// The filter's number within its priority.
    pub handle: u32,
    /// Its kind: `bpf`, `flower`...
    pub kind: String,
    /// The id of its program, if it has one.
    pub program: Option<u32>,
    /// The name of its program, as given when it was attached.
    pub name: Option<String>,
    /// Whether one of its actions is a program.
    pub acts_by_program: bool,
}

/// Returns the filters of one direction of an interface in order. Without a clsact qdisc there are none. Fails if the interface does not
/// exist.
pub fn filters(interface: &str, direction: TcAttachType) -> io::Result<Vec<Filter>> {
    let minor = match direction {
        TcAttachType::Egress => 0xfff3,
        _ => 0xfff2,
    };
    let mut message = TcMessage::default();
    message.header.index = nix::net::if_::if_nametoindex(interface)?.cast_signed();
    message.header.parent = TcHandle { major: 0xffff, minor };
    let answers = ask(RouteNetlinkMessage::GetTrafficFilter(message), Extent::All)?;
    let filters = answers.iter().filter_map(|answer| match answer {
        RouteNetlinkMessage::NewTrafficFilter(message) => filter(message),
        _ => None,
    });
    Ok(filters.collect())
}

/// Returns the filter that a message describes; `None` for the head of a priority's list.
fn filter(message: &TcMessage) -> Option<Filter> {
    let handle = u32::from(message.header.handle);
    let mut filter = Filter {
        priority: (message.header.info >> 16) as u16,
        handle,
        kind: String::new(),
        program: None,
        name: None,
        acts_by_program: false,
    };
    for attribute in &message.attributes {
        match attribute {
            TcAttribute::Kind(kind) => filter.kind.clone_from(kind),
            TcAttribute::Options(options) => options.iter().for_each(|option| note(&mut filter, option)),
            _ => {}
        }
    }
    (handle != 0).then_some(filter)
}

fn note(filter: &mut Filter, option: &TcOption) {
    let is_program = |action: &TcAction| {
        action.attributes.iter().any(|a| matches!(a, TcActionAttribute::Kind(kind) if kind == "bpf"))
    };
    match option {
        TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => filter.program = Some(*id),
        TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => filter.name = Some(name.clone()),
        TcOption::U32(TcFilterU32Option::Action(actions))
        | TcOption::Flower(TcFilterFlowerOption::Actions(actions))
        | TcOption::MatchAll(TcFilterMatchAllOption::Action(actions)) => {
            filter.acts_by_program |= actions.iter().any(is_program);
        }
        _ => {}
    }
}
