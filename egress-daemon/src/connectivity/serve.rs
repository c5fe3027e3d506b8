//! The server outside the cluster.

use super::QUESTION;
use std::{
    io::{self, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

/// The timeout for sending an answer to a client. An answer fits into every send buffer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why the server cannot run.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {0}: {1}: name another address and port with --listen")]
pub struct ServerError(SocketAddr, #[source] io::Error);

/// A server that tells each client the source address that it sees, over TCP and UDP.
#[derive(Debug)]
pub struct Server {
    tcp: TcpListener,
    udp: UdpSocket,
}

impl Server {
    /// Listens on an address, with TCP and UDP.
    pub fn bind(address: SocketAddr) -> Result<Server, ServerError> {
        let failed = |error| ServerError(address, error);
        let tcp = TcpListener::bind(address).map_err(failed)?;
        let udp = UdpSocket::bind(tcp.local_addr().map_err(failed)?).map_err(failed)?;
        Ok(Server { tcp, udp })
    }

    /// Returns the address on which the server listens.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Answers clients until a socket fails.
    pub fn run(self) -> io::Result<()> {
        let Server { tcp, udp } = self;
        let datagrams = thread::spawn(move || answer_datagrams(&udp));
        for stream in tcp.incoming() {
            // A client that leaves before its answer must not affect others.
            let _gone = stream.and_then(|stream| answer(&stream));
            if datagrams.is_finished() {
                break;
            }
        }
        datagrams.join().map_err(|_| io::Error::other("the thread for UDP has panicked"))?
    }
}

fn answer(mut stream: &TcpStream) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let seen = stream.peer_addr()?;
    stream.write_all(format!("{}\n", unmapped(seen)).as_bytes())
}

fn answer_datagrams(socket: &UdpSocket) -> io::Result<()> {
    let mut question = [0; QUESTION.len() + 1];
    loop {
        match socket.recv_from(&mut question) {
            Ok((length, seen)) if question.get(..length) == Some(QUESTION) => {
                // If the answer cannot be sent, the client counts it as lost.
                let _lost = socket.send_to(format!("{}\n", unmapped(seen)).as_bytes(), seen);
            }
            Ok(_) => {}
            // This is an ICMP error about an earlier answer.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns the client's own form of its address. An IPv6 socket sees IPv4 clients with mapped addresses.
fn unmapped(seen: SocketAddr) -> SocketAddr {
    SocketAddr::new(seen.ip().to_canonical(), seen.port())
}
