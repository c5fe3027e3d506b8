//! The server of a question. Pure.

use crate::ctl::explain::{Destination, Protocol};
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// A server, as for `egressctl explain --to`: `203.0.113.7:443/tcp`, `203.0.113.7/icmp`; or without a protocol: `203.0.113.7:443`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Server {
    address: IpAddr,
    /// 0 for a protocol without ports.
    port: u16,
    protocol: Option<Protocol>,
}

impl Server {
    /// Returns the address and the port, as flows have them.
    pub(super) fn address(self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }

    /// Returns whether a flow with this protocol may be meant.
    pub(super) fn is_of(self, protocol: u32) -> bool {
        self.protocol.is_none_or(|meant| meant.number(self.address.is_ipv6()) == protocol)
    }

    /// Returns whether the question names the protocol. A TCP flow and a UDP flow to the same server may have the same port.
    pub(super) fn has_protocol(self) -> bool {
        self.protocol.is_some()
    }
}

impl FromStr for Server {
    type Err = <Destination as FromStr>::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (address, port, protocol) = match text.parse::<SocketAddr>() {
            Ok(bare) => (bare.ip(), bare.port(), None),
            Err(_) => {
                let Destination { address, port, protocol } = text.parse()?;
                (address, port, Some(protocol))
            }
        };
        Ok(Self { address: address.to_canonical(), port, protocol })
    }
}
