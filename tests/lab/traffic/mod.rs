//! Traffic between pods and the outside, generated in threads inside the namespaces, with results as structs.
//!
//! Most traffic consists of records of 16 bytes (a flow's id, a sequence number, both big endian), so that both ends detect missing and
//! foreign data, and a server knows which flow has which source address. Ids are unique in the process.

pub mod abort;
pub mod blast;
pub mod bulk;
pub mod claim;
pub mod cpu;
pub mod forge;
pub mod fragment;
pub mod mixed;
pub mod ping;
pub mod query;
pub mod rate;
pub mod tcp;
mod tcp_engine;
pub mod turns;
pub mod udp;
mod wire;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

pub use self::abort::reset_after_data;
pub use self::blast::{BlastReport, Blaster, UdpSink};
pub use self::bulk::{BulkReport, BulkServer, Direction, bulk};
pub use self::claim::{Asker, send_claim};
pub use self::cpu::{on_cpu, with_nice};
pub use self::forge::{Protocol, send_error, send_packet, send_tagged, send_vxlan, send_vxlan_from, spray};
pub use self::fragment::{FragmentOrder, send_fragments};
pub use self::mixed::{Mixed, Pauses};
pub(crate) use self::ping::set_int;
pub use self::ping::{Ping, PingReport, ping};
pub use self::query::{AnswerServer, Queries, QueryReport};
pub use self::rate::{ConnectRate, RateReport, RunningRate, syns_retransmitted};
pub use self::tcp::{
    ConnectionReport, ConnectionState, ServerMode, TcpClients, TcpOptions, TcpServer, source_at, undelivered,
};
pub use self::turns::{LoadServer, ServerAnswer, round_trips};
pub use self::udp::{UdpClients, UdpFlowReport, UdpOptions, UdpSeen, UdpServer};

static IDS: AtomicU64 = AtomicU64::new(1);

fn next_id() -> u64 {
    IDS.fetch_add(1, Ordering::Relaxed)
}

/// Counts how often each address occurs.
pub fn tally(addresses: impl IntoIterator<Item = IpAddr>) -> BTreeMap<IpAddr, usize> {
    let mut counts = BTreeMap::new();
    for address in addresses {
        *counts.entry(address).or_default() += 1;
    }
    counts
}
