//! Connections that the server aborts.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Result, bail};
use nix::libc;

use super::ping::set_int;
use super::wire::{bind, reset_on_close};
use crate::netns::NetNs;

/// The time that either end waits for the other.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a connection from `client` to `target` in `server`. The server sends a byte and then immediately a reset,
/// before the client acknowledges the byte. Returns the client's address and port.
pub fn reset_after_data(client: &NetNs, server: &NetNs, target: SocketAddr) -> Result<SocketAddr> {
    let listener = server.run(|| bind(target, std::net::TcpListener::bind))?;
    let mut near = client.run(|| Ok(TcpStream::connect_timeout(&target, TIMEOUT)?))?;
    // Delay acknowledgements until there is data to send.
    set_int(&near, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 0)?;
    near.set_read_timeout(Some(TIMEOUT))?;
    let (mut far, _) = listener.accept()?;
    reset_on_close(&far)?;
    far.write_all(b"x")?;
    drop(far);
    let own = near.local_addr()?;
    let mut all = Vec::new();
    match near.read_to_end(&mut all) {
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(own),
        other => bail!("the connection of {own} was not reset: {other:?}, {all:?}"),
    }
}
