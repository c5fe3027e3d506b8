//! Bulk transfers over single TCP connections, in either direction, with their speed and retransmissions.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::wire::{listen, wait_readable};
use crate::background::{Background, Stop};
use crate::netns::NetNs;

/// The number of bytes per system call.
const CHUNK: usize = 128 << 10;
/// The time without progress after which a transfer has failed.
const STALLED: Duration = Duration::from_secs(10);
/// The speed in bytes per second below which a transfer has failed after that time: it retransmits every segment.
const CRAWL: f64 = 100_000.0;

/// The direction of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    Upload,
    /// From the server to the client.
    Download,
}

/// A finished transfer.
#[derive(Clone, Copy, Debug)]
pub struct BulkReport {
    /// Bytes of payload, all of which arrived.
    pub bytes: u64,
    /// The time from the first byte sent until the receiver had the last byte.
    pub elapsed: Duration,
    /// The number of segments that the sender retransmitted.
    pub retransmitted: u32,
    /// The size of the largest segment that the sender used.
    pub segment: u32,
}

impl BulkReport {
    /// Returns bits per second.
    pub fn bits_per_second(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// A server for [`bulk`].
#[derive(Debug)]
pub struct BulkServer {
    _thread: Background,
}

impl BulkServer {
    /// Listens on all `addresses`.
    pub fn start(ns: &NetNs, addresses: &[SocketAddr]) -> Result<BulkServer> {
        let listeners = listen(ns, addresses)?;
        let _thread = Background::start(ns, "bulk-server", move |stop| serve(&listeners, stop))?;
        Ok(BulkServer { _thread })
    }
}

/// Transfers `bytes` between `ns` and a [`BulkServer`], and waits until all have arrived.
pub fn bulk(ns: &NetNs, target: SocketAddr, direction: Direction, bytes: u64) -> Result<BulkReport> {
    ns.run(|| {
        let mut stream =
            TcpStream::connect_timeout(&target, STALLED).with_context(|| format!("connecting to {target}"))?;
        set_timeouts(&stream)?;
        let wanted = if direction == Direction::Download { bytes } else { 0 };
        stream.write_all(&wanted.to_be_bytes())?;
        let start = Instant::now();
        let sender = match direction {
            Direction::Upload => {
                send(&mut stream, bytes).context("uploading")?;
                tcp_info(&stream)?
            }
            Direction::Download => {
                let received = drain(&mut stream, bytes).context("downloading")?;
                ensure!(received == bytes, "the download ended after {received} of {bytes} bytes");
                (0, 0)
            }
        };
        stream.shutdown(Shutdown::Write)?;
        // The server answers with its figures: bytes, retransmissions, segment size.
        let mut answer = [0; 16];
        stream.read_exact(&mut answer).context("the server's answer")?;
        let elapsed = start.elapsed();
        let word = |at: usize| u32::from_be_bytes([answer[at], answer[at + 1], answer[at + 2], answer[at + 3]]);
        let received = u64::from(word(0)) << 32 | u64::from(word(4));
        match direction {
            Direction::Upload if received != bytes => bail!("{received} of {bytes} bytes arrived"),
            Direction::Upload => Ok(BulkReport { bytes, elapsed, retransmitted: sender.0, segment: sender.1 }),
            Direction::Download => Ok(BulkReport { bytes, elapsed, retransmitted: word(8), segment: word(12) }),
        }
    })
}

fn serve(listeners: &[TcpListener], stop: &Stop) -> Result<()> {
    thread::scope(|scope| {
        while !stop.requested() {
            wait_readable(listeners)?;
            for listener in listeners {
                match listener.accept() {
                    // The client reports a transfer that fails.
                    Ok((stream, _)) => drop(scope.spawn(move || transfer(stream).ok())),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error).context("accept"),
                }
            }
        }
        Ok(())
    })
}

fn transfer(mut stream: TcpStream) -> Result<()> {
    stream.set_nonblocking(false)?;
    set_timeouts(&stream)?;
    let mut wanted = [0; 8];
    stream.read_exact(&mut wanted)?;
    let wanted = u64::from_be_bytes(wanted);
    send(&mut stream, wanted)?;
    let received = drain(&mut stream, u64::MAX)?;
    let (retransmitted, segment) = tcp_info(&stream)?;
    stream.write_all(&[&received.to_be_bytes()[..], &retransmitted.to_be_bytes(), &segment.to_be_bytes()].concat())?;
    Ok(())
}

fn set_timeouts(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(STALLED))?;
    stream.set_write_timeout(Some(STALLED))
}

fn send(stream: &mut TcpStream, bytes: u64) -> std::io::Result<()> {
    let chunk = vec![0x5a; CHUNK];
    let (mut left, start) = (bytes, Instant::now());
    while left > 0 {
        check_pace(start, bytes - left)?;
        let size = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
        stream.write_all(&chunk[..size])?;
        left -= size as u64;
    }
    Ok(())
}

/// Reads up to `limit` bytes or to the end, and returns the number of bytes read.
fn drain(stream: &mut TcpStream, limit: u64) -> std::io::Result<u64> {
    let mut chunk = vec![0; CHUNK];
    let (mut total, start) = (0, Instant::now());
    while total < limit {
        check_pace(start, total)?;
        let room = usize::try_from(limit - total).unwrap_or(CHUNK).min(CHUNK);
        match stream.read(&mut chunk[..room])? {
            0 => break,
            count => total += count as u64,
        }
    }
    Ok(total)
}

fn check_pace(start: Instant, done: u64) -> std::io::Result<()> {
    let elapsed = start.elapsed();
    if elapsed > STALLED && (done as f64) < CRAWL * elapsed.as_secs_f64() {
        return Err(std::io::Error::new(ErrorKind::TimedOut, format!("{done} bytes in {elapsed:?}")));
    }
    Ok(())
}

/// Returns the number of retransmitted segments and the size of the largest segment.
fn tcp_info(stream: &TcpStream) -> Result<(u32, u32)> {
    // SAFETY: all zero bytes are a valid tcp_info.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut size = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the pointers point to live variables, and `size` is the size of `info`.
    let result = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut size)
    };
    if result < 0 {
        return Err(std::io::Error::last_os_error()).context("TCP_INFO");
    }
    Ok((info.tcpi_total_retrans, info.tcpi_snd_mss))
}
