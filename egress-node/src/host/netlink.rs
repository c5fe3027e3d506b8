//! A connection for changes to the network, and the meaning of its errors.

use std::io;

use rtnetlink::{Error, Handle};
use tokio::task::JoinSet;

/// A route netlink connection of this network namespace. It closes when dropped.
#[derive(Debug)]
pub struct Netlink {
    /// Sends requests.
    pub handle: Handle,
    _connection: JoinSet<()>,
}

impl Netlink {
    /// Opens a connection, which belongs to the network namespace of the calling thread.
    pub fn open() -> io::Result<Netlink> {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        let mut task = JoinSet::new();
        task.spawn(connection);
        Ok(Netlink { handle, _connection: task })
    }
}

/// Returns the kernel's error number; zero for a failure of the connection itself.
pub(super) fn errno(error: &Error) -> i32 {
    match error {
        Error::NetlinkError(message) => -message.raw_code(),
        _ => 0,
    }
}
