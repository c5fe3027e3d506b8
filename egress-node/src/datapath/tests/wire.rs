//! A gateway whose interfaces are TAP devices: the programs at TC receive frames as from a wire, and the frames that they send appear as on
//! a wire. A test run neither accepts nor shows a VLAN tag, because the kernel keeps the tag outside the frame.

use super::{
    frames::HOST_MAC,
    native::next_hops,
    rig::{Rig, SIZES},
};
use crate::{
    datapath::{
        attach::{Attacher, mode},
        load::Programs,
    },
    host::testing::Net,
};
use nix::poll::{PollFd, PollFlags, poll};
use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{ErrorKind, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::OpenOptionsExt as _,
    },
};

/// `TUNSETIFF`, and the flags of a TAP device that delivers bare frames (linux/if_tun.h).
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TAP: libc::c_short = 0x0002 | 0x1000;
/// Longer than any frame of a test.
const LONGEST: usize = 4096;
/// The longest time that a frame may take, in milliseconds.
const PATIENCE: u16 = 10_000;

/// The host's end of a wire.
struct Tap(File);

impl Tap {
    fn new(name: &str) -> Self {
        let mut options = OpenOptions::new();
        let file =
            options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun").expect("/dev/net/tun");
        // SAFETY: all zero bytes are a valid ifreq.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_name.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from.cast_signed());
        request.ifr_ifru.ifru_flags = TAP;
        // SAFETY: the request is an ifreq that outlives the call.
        let made = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) };
        assert_eq!(made, 0, "{name}: {}", std::io::Error::last_os_error());
        Self(file)
    }

    /// Returns the next frame that has been sent to one host.
    fn next(&self) -> Option<Vec<u8>> {
        let mut frame = vec![0; LONGEST];
        loop {
            match (&self.0).read(&mut frame) {
                // Multicast: the kernel's own search for routers and neighbours.
                Ok(_) if frame[0] & 1 != 0 => {}
                Ok(length) => return Some(frame[..length].to_vec()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// The interfaces, with programs at those where frames arrive.
pub struct Wire {
    /// The interface at which each program's frames arrive, with its MAC address.
    inlets: BTreeMap<&'static str, (Tap, [u8; 6])>,
    outlets: [Tap; 2],
    /// The index of the uplink.
    pub uplink: u32,
    /// The index of the underlay's interface, through which replies leave.
    pub underlay: u32,
    _attached: Attacher,
}

impl Wire {
    /// Creates the interfaces of a gateway, with known next hops.
    pub async fn new(rig: &Rig) -> Self {
        let net = Net::here();
        let (mut inlets, mut wanted, mut live) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for (program, name) in [("underlay_ingress", "nodes"), ("uplink_ingress", "outside")] {
            let tap = Tap::new(name);
            net.up(name).await;
            let index = net.index(name).await;
            inlets.insert(program, (tap, net.mac(name).await.0));
            wanted.insert((program, index), name.to_owned());
            live.insert(index, name.to_owned());
        }
        let outlets = ["out", "under"].map(Tap::new);
        let (uplink, underlay) = next_hops(&net).await;
        let programs = Programs::load_lazily(rig.pins(), SIZES).unwrap();
        let mut attacher = Attacher::new(programs, rig.pins().clone(), mode());
        let errors = attacher.sync(&wanted, &live, true);
        assert!(errors.is_empty(), "{errors:?}");
        Self { inlets, outlets, uplink, underlay, _attached: attacher }
    }

    /// Lets a frame arrive at a program at TC. Returns the frame that has left immediately.
    pub fn carry(&self, program: &str, frame: &[u8]) -> Option<Vec<u8>> {
        while self.outlets.iter().any(|tap| tap.next().is_some()) {}
        let (tap, mac) = &self.inlets[program];
        let mut frame = frame.to_vec();
        if frame[..6] == HOST_MAC {
            frame[..6].copy_from_slice(mac);
        }
        (&tap.0).write_all(&frame).unwrap();
        self.left()
    }

    /// Waits for the frame that leaves. The kernel also sends through these interfaces, and a frame that meets it there waits in a queue.
    pub fn sent(&self, program: &str, frame: &[u8]) -> Option<Vec<u8>> {
        let mut left = self.carry(program, frame);
        while left.is_none() {
            let mut outlets = self.outlets.each_ref().map(|tap| PollFd::new(tap.0.as_fd(), PollFlags::POLLIN));
            if poll(&mut outlets, PATIENCE).unwrap() == 0 {
                return None;
            }
            left = self.left();
        }
        left
    }

    fn left(&self) -> Option<Vec<u8>> {
        self.outlets.iter().find_map(Tap::next)
    }
}
