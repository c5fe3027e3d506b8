//! Queries the server from inside a pod.

use super::QUESTION;
use crate::ctl::print::Printable;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    io::{self, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

/// The timeout of one query. It allows for two retransmissions of a SYN, and for the agent's selection of a new pod.
const PATIENCE: Duration = Duration::from_secs(5);
/// The number of TCP connections for each UDP query.
const DATAGRAMS: u32 = 8;
/// The number of failures after which no more queries are sent.
const FAILURES: usize = 3;
/// The maximum length of an answer: an IPv6 address with port and line feed.
const ANSWER: u64 = 64;

/// The answers of one server to a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Asked {
    /// The server.
    pub server: SocketAddr,
    /// The number of TCP connections that the server saw from each source address.
    pub tcp: BTreeMap<IpAddr, u32>,
    /// The number of UDP flows that the server saw from each source address.
    pub udp: BTreeMap<IpAddr, u32>,
    /// The failures: `TCP: connection refused`.
    pub errors: Vec<String>,
}

impl Asked {
    fn lines(&self) -> String {
        let mut text = String::new();
        for (protocol, sources) in [("TCP", &self.tcp), ("UDP", &self.udp)] {
            for (source, count) in sources {
                text += &format!("{protocol} {}: seen as {source} ({count})\n", self.server);
            }
        }
        for error in &self.errors {
            text += &format!("{}: {error}\n", self.server);
        }
        text
    }
}

impl Printable for Vec<Asked> {
    fn text(&self) -> String {
        self.iter().map(Asked::lines).collect()
    }
}

/// Queries a server sequentially: with this many connections, then an eighth as many datagrams. Each query has its own source port.
pub fn ask(server: SocketAddr, connections: u32) -> Asked {
    let mut asked = Asked { server, tcp: BTreeMap::new(), udp: BTreeMap::new(), errors: Vec::new() };
    let Asked { tcp, udp, errors, .. } = &mut asked;
    let mut repeat = |protocol: &str,
                      times: u32,
                      seen: &mut BTreeMap<IpAddr, u32>,
                      question: fn(SocketAddr) -> io::Result<IpAddr>| {
        let mut failures = 0;
        for _ in 0..times {
            match question(server) {
                Ok(source) => *seen.entry(source).or_default() += 1,
                Err(error) => {
                    errors.push(format!("{protocol}: {error}"));
                    failures += 1;
                }
            }
            if failures == FAILURES {
                break;
            }
        }
    };
    repeat("TCP", connections, tcp, by_connection);
    repeat("UDP", connections.div_ceil(DATAGRAMS), udp, by_datagram);
    asked
}

fn by_connection(server: SocketAddr) -> io::Result<IpAddr> {
    let stream = TcpStream::connect_timeout(&server, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut answer = String::new();
    stream.take(ANSWER).read_to_string(&mut answer)?;
    source(&answer)
}

fn by_datagram(server: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send(QUESTION)?;
    let mut answer = [0; ANSWER as usize];
    let length = socket.recv(&mut answer)?;
    source(&String::from_utf8_lossy(&answer[..length]))
}

fn source(answer: &str) -> io::Result<IpAddr> {
    let address: Result<SocketAddr, _> = answer.trim_end().parse();
    address.map(|address| address.ip()).map_err(|_| io::Error::other(format!("not egressctl's answer: {answer:?}")))
}

#[cfg(test)]
mod tests {
    use super::super::Server;
    use super::*;
    use std::{net::TcpListener, thread};

    #[test]
    fn a_server_tells_its_clients_their_addresses_by_tcp_and_udp() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let server = Server::bind(address.parse().unwrap()).unwrap();
            let at = server.address().unwrap();
            thread::spawn(|| server.run());
            let asked = ask(at, 16);
            assert_eq!(asked.tcp, BTreeMap::from([(at.ip(), 16)]), "{asked:?}");
            assert_eq!(asked.udp, BTreeMap::from([(at.ip(), 2)]), "{asked:?}");
            assert_eq!(asked.errors, Vec::<String>::new());
        }
    }

    #[test]
    fn ipv4_mapped_address_is_reported_as_ipv4() {
        let server = Server::bind("[::]:0".parse().unwrap()).unwrap();
        let at = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), server.address().unwrap().port());
        thread::spawn(|| server.run());
        let asked = ask(at, 1);
        assert_eq!(asked.tcp, BTreeMap::from([(at.ip(), 1)]), "{asked:?}");
    }

    #[test]
    fn failures_are_reported_and_end_the_queries() {
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let asked = ask(nobody, 100);
        assert!(asked.tcp.is_empty() && asked.udp.is_empty(), "{asked:?}");
        assert_eq!(asked.errors.len(), 2 * FAILURES, "{asked:?}");
        assert!(asked.errors[0].starts_with("TCP: Connection refused"), "{asked:?}");
    }

    #[test]
    fn another_servers_answer_is_an_error() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = other.local_addr().unwrap();
        thread::spawn(move || {
            other.incoming().flatten().for_each(|mut stream| {
                let _ = io::Write::write_all(&mut stream, b"SSH-2.0-OpenSSH_9.2\r\n");
            })
        });
        let error = by_connection(at).unwrap_err().to_string();
        assert!(error.contains("not egressctl's answer"), "{error}");
    }
}
