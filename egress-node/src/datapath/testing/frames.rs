//! Frames as bytes, and an oracle that recomputes their checksums.

use egress_common::abi::TUNNEL_PORT;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The MAC address of `lo`, the interface at which frames of a test run arrive.
pub const HOST_MAC: [u8; 6] = [0; 6];
pub const POD_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xbb];

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ICMP: u8 = 1;
pub const ICMPV6: u8 = 58;

/// Returns the folded sum of the Internet checksum (RFC 1071) over some bytes; an odd last byte counts as if a zero followed.
fn sum(parts: &[&[u8]]) -> u16 {
    let all: Vec<u8> = parts.concat();
    let words = all.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0)));
    let mut sum = words.fold(0u64, |s, w| s + u64::from(w));
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Returns an IP packet in a frame from the pod's interface. `extra` are the options or extension headers between header and payload.
pub fn ip(src: IpAddr, dst: IpAddr, proto: u8, extra: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut f = [HOST_MAC, POD_MAC].concat();
    let len = (extra.len() + payload.len()) as u16;
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            f.extend([8, 0, 0x45 + (extra.len() / 4) as u8, 0]);
            f.extend((len + 20).to_be_bytes());
            f.extend([0x12, 0x34, 0, 0, 64, proto, 0, 0]);
            f.extend(src.octets());
            f.extend(dst.octets());
            f.extend(extra);
            let check = !sum(&[&f[14..]]);
            f[24..26].copy_from_slice(&check.to_be_bytes());
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            f.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            f.extend(len.to_be_bytes());
            f.extend([proto, 64]);
            f.extend(src.octets());
            f.extend(dst.octets());
            f.extend(extra);
        }
        _ => panic!("one family"),
    }
    f.extend(payload);
    f
}

/// Adds a tag (IEEE 802.1Q) to the frame: priority and VLAN.
pub fn tagged(mut frame: Vec<u8>, tag: u16) -> Vec<u8> {
    let [a, b] = tag.to_be_bytes();
    frame.splice(12..12, [0x81, 0, a, b]);
    frame
}

pub fn tcp(sport: u16, dport: u16, flags: u8, options: &[u8]) -> Vec<u8> {
    let mut t = [sport.to_be_bytes(), dport.to_be_bytes()].concat();
    t.extend([0, 0, 0, 1, 0, 0, 0, 2, (5 + options.len() as u8 / 4) << 4, flags, 0x10, 0, 0, 0, 0, 0]);
    t.extend(options);
    t.extend(b"odd length");
    t.push(b'!');
    t
}

pub fn udp(sport: u16, dport: u16, body: &[u8]) -> Vec<u8> {
    let mut u = [sport.to_be_bytes(), dport.to_be_bytes(), (8 + body.len() as u16).to_be_bytes(), [0, 0]].concat();
    u.extend(body);
    u
}

pub fn icmp(kind: u8, id: u16, body: &[u8]) -> Vec<u8> {
    let mut e = vec![kind, 0, 0, 0];
    e.extend(id.to_be_bytes());
    e.extend([0, 1]);
    e.extend(body);
    e
}

/// The fields that the oracle reads from a frame.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub proto: u8,
    pub l4: usize,
    pub later_fragment: bool,
    pub hops: u8,
}

/// Reads a frame; `None` if it holds no IP packet that could be translated.
pub fn read(f: &[u8]) -> Option<Read> {
    match f.get(12..14)? {
        [8, 0] => {
            let h = f.get(14..34)?;
            let l4 = 14 + usize::from(h[0] & 15) * 4;
            let ip = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&h[at..at + 4]).unwrap()).into();
            let later_fragment = (u16::from(h[6]) << 8 | u16::from(h[7])) & 0x1fff != 0;
            Some(Read { src: ip(12), dst: ip(16), proto: h[9], l4, later_fragment, hops: h[8] })
        }
        [0x86, 0xdd] => {
            let h = f.get(14..54)?;
            let ip = |at: usize| Ipv6Addr::from(<[u8; 16]>::try_from(&h[at..at + 16]).unwrap()).into();
            let (mut proto, mut l4, mut later_fragment) = (h[6], 54, false);
            while let (0 | 43 | 44 | 60, false) = (proto, later_fragment) {
                let e = f.get(l4..l4 + 8)?;
                later_fragment = proto == 44 && (e[2], e[3] & 0xf8) != (0, 0);
                l4 += if proto == 44 { 8 } else { (usize::from(e[1]) + 1) * 8 };
                proto = e[0];
            }
            Some(Read { src: ip(8), dst: ip(24), proto, l4, later_fragment, hops: h[7] })
        }
        _ => None,
    }
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(a) => a.octets().into(),
        IpAddr::V6(a) => a.octets().into(),
    }
}

/// Returns the sums over the bytes that the IP header's and the transport's checksums cover, modulo 0xffff. A correct sum is 0, and a
/// translation keeps any sum. `None` for a checksum that is not there.
pub fn sums(f: &[u8]) -> Option<[Option<u16>; 2]> {
    let r = read(f)?;
    let header = r.src.is_ipv4().then(|| f.get(14..r.l4).map(|h| sum(&[h]) % 0xffff)).flatten();
    let body = f.get(r.l4..).filter(|_| !r.later_fragment);
    let none = |b: &[u8]| r.proto == UDP && b.get(6..8) == Some(&[0, 0]);
    let transport = body.filter(|b| !none(b)).and_then(|b| {
        let pseudo = [octets(r.src), octets(r.dst), vec![0, r.proto], (b.len() as u16).to_be_bytes().into()].concat();
        match r.proto {
            TCP | UDP | ICMPV6 => Some(sum(&[&pseudo, b]) % 0xffff),
            ICMP => Some(sum(&[b]) % 0xffff),
            _ => None,
        }
    });
    Some([header, transport])
}

/// Returns the offset of the transport's checksum.
fn checksum_at(r: &Read) -> usize {
    r.l4 + match r.proto {
        TCP => 16,
        UDP => 6,
        _ => 2,
    }
}

/// Fills in the transport's checksum.
pub fn seal(mut f: Vec<u8>) -> Vec<u8> {
    let r = read(&f).unwrap();
    let at = checksum_at(&r);
    f[at..at + 2].copy_from_slice(&[0xff, 0xff]);
    let with_ones = sums(&f).unwrap()[1].unwrap();
    let check = match !with_ones {
        0 => 0xffff,
        c => c,
    };
    f[at..at + 2].copy_from_slice(&check.to_be_bytes());
    assert_right(&f);
    f
}

/// Asserts that every checksum of the frame is correct.
#[track_caller]
pub fn assert_right(f: &[u8]) {
    let sums = sums(f).unwrap();
    assert!(sums.iter().flatten().all(|s| *s == 0), "{sums:?} in {f:02x?}");
}

/// Turns an IPv4 frame into a fragment: `bits` are the flags and the offset in its header.
pub fn fragment(mut frame: Vec<u8>, bits: [u8; 2]) -> Vec<u8> {
    frame[20..22].copy_from_slice(&bits);
    let sum = sums(&frame).unwrap()[0].unwrap();
    // Correct the header's checksum for the fragment bits.
    let check = u16::from_be_bytes([frame[24], frame[25]]);
    let right = (u32::from(check) + 0xffff - u32::from(sum)) % 0xffff;
    frame[24..26].copy_from_slice(&(right as u16).to_be_bytes());
    frame
}

pub fn ports(f: &[u8]) -> (u16, u16) {
    let l4 = read(f).unwrap().l4;
    let word = |at: usize| u16::from_be_bytes([f[at], f[at + 1]]);
    (word(l4), word(l4 + 2))
}

/// Returns the frame without the fields that translation may change: MAC addresses, hop limit, IPv4 checksum, addresses, and in the
/// transport header the ports, the checksum and an ICMP query's identifier.
pub fn untranslated(f: &[u8]) -> Vec<u8> {
    let r = read(f).unwrap();
    let mut f = f.to_vec();
    f[..12].fill(0);
    if r.src.is_ipv4() {
        f[22] = 0;
        f[24..34].fill(0);
    } else {
        f[21] = 0;
        f[22..54].fill(0);
    }
    let check = checksum_at(&r);
    f[check..check + 2].fill(0);
    match r.proto {
        TCP | UDP => f[r.l4..r.l4 + 4].fill(0),
        _ => f[r.l4 + 4..r.l4 + 6].fill(0),
    }
    f
}

/// Recomputes the checksum of the frame's first IPv4 header.
pub fn with_header_checksum(mut frame: Vec<u8>) -> Vec<u8> {
    frame[24..26].fill(0);
    let sum = sum(&[&frame[14..34]]);
    frame[24..26].copy_from_slice(&(!sum).to_be_bytes());
    frame
}

/// Wraps a frame in outer headers as a tunnel device writes them.
pub fn wrapped(from: &str, to: &str, vni: u32, inner: &[u8]) -> Vec<u8> {
    let vxlan = [&[8, 0, 0, 0][..], &(vni << 8).to_be_bytes(), inner].concat();
    ip(from.parse().unwrap(), to.parse().unwrap(), UDP, &[], &udp(0xc123, TUNNEL_PORT, &vxlan))
}
