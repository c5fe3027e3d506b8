//! Sequential round trips over one TCP connection, and a server for connections that are reset immediately.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::wire::{listen, wait_readable};
use crate::background::{Background, Stop};
use crate::netns::NetNs;
use crate::stats::Percentiles;

/// The size of a request and of its answer in bytes.
const REQUEST: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(5);
/// The number of accepted connections that stay open: before the server closes one, its client has long reset it.
const HELD: usize = 1024;

/// The behaviour of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerAnswer {
    /// Sends back the received bytes, for [`round_trips`].
    Echo,
    /// Does nothing, for [`super::ConnectRate`], which resets the connections that it opens.
    Hold,
    /// Closes immediately: its end of a connection costs nothing while the client holds its own end open.
    Close,
}

/// A server for measurements: it does as little as possible.
#[derive(Debug)]
pub struct LoadServer {
    _thread: Background,
}

impl LoadServer {
    /// Listens on all `addresses`.
    pub fn start(ns: &NetNs, addresses: &[SocketAddr], answer: ServerAnswer) -> Result<LoadServer> {
        let listeners = listen(ns, addresses)?;
        for listener in &listeners {
            // std's queue holds 128 connections.
            nix::sys::socket::listen(listener, nix::sys::socket::Backlog::MAXALLOWABLE)?;
        }
        let _thread = Background::start(ns, "load-server", move |stop| serve(&listeners, answer, stop))?;
        Ok(LoadServer { _thread })
    }
}

fn serve(listeners: &[TcpListener], answer: ServerAnswer, stop: &Stop) -> Result<()> {
    let mut held = VecDeque::with_capacity(HELD);
    thread::scope(|scope| {
        while !stop.requested() {
            wait_readable(listeners)?;
            for listener in listeners {
                loop {
                    match listener.accept() {
                        Ok((stream, _)) if answer == ServerAnswer::Echo => drop(scope.spawn(move || echo(stream).ok())),
                        Ok(_) if answer == ServerAnswer::Close => {}
                        Ok((stream, _)) => {
                            if held.len() == HELD {
                                held.pop_front();
                            }
                            held.push_back(stream);
                        }
                        // A reset before accepting is an error of that connection only.
                        Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                        Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                        Err(error) => return Err(error).context("accept"),
                    }
                }
            }
        }
        Ok(())
    })
}

fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut bytes = [0; REQUEST];
    loop {
        stream.read_exact(&mut bytes)?;
        stream.write_all(&bytes)?;
    }
}

/// Sends requests to a [`LoadServer`] for `window`, each after the answer to the previous one. Returns the round-trip times in seconds.
pub fn round_trips(ns: &NetNs, target: SocketAddr, warm_up: Duration, window: Duration) -> Result<Percentiles> {
    ns.run(|| {
        let mut stream =
            TcpStream::connect_timeout(&target, TIMEOUT).with_context(|| format!("connecting to {target}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut bytes = [0; REQUEST];
        let mut times = Vec::new();
        let start = Instant::now();
        while start.elapsed() < warm_up + window {
            let sent = Instant::now();
            stream.write_all(&bytes).context("a request")?;
            stream.read_exact(&mut bytes).context("an answer")?;
            if sent - start >= warm_up {
                times.push(sent.elapsed().as_secs_f64());
            }
        }
        Ok(Percentiles::of(times))
    })
}
