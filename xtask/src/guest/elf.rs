//! Extracts the kernel's ELF image from a bzImage. QEMU boots it with PVH, two to three times faster than the compressed image.

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Offsets in the setup header (Documentation/arch/x86/boot.rst).
const SETUP_SECTORS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
const SECTOR: usize = 512;
/// The number of setup sectors if the header says 0.
const OLD_SETUP_SECTORS: u8 = 4;

/// The first bytes of a compressed payload, and the program that decompresses it to stdout.
const PROGRAMS: [(&[u8], &str, &[&str]); 3] = [
    (&[0x02, 0x21, 0x4c, 0x18], "lz4", &["-d", "-c"]),
    (&[0xfd, b'7', b'z', b'X', b'Z'], "xz", &["-d", "-c", "--single-stream"]),
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd", &["-d", "-c"]),
];

/// Returns the uncompressed kernel in `image`.
pub fn from_bzimage(image: &[u8]) -> Result<Vec<u8>> {
    let payload = payload(image).context("the kernel image has no payload: it is not a bzImage")?;
    let Some((_, program, args)) = PROGRAMS.into_iter().find(|(magic, ..)| payload.starts_with(magic)) else {
        bail!("the kernel image is compressed with something other than LZ4, XZ or zstd");
    };
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    let mut stdin = child.stdin.take().context("no pipe to the program")?;
    let payload = payload.to_vec();
    // The kernel's size follows the stream. The programs report it as an error if they read it at all, so errors are ignored.
    let feeder = std::thread::spawn(move || drop(stdin.write_all(&payload)));
    let kernel = child.wait_with_output().with_context(|| format!("cannot read from {program}"))?.stdout;
    let _ = feeder.join();
    if !kernel.starts_with(b"\x7fELF") {
        bail!("{program} did not produce an ELF image of the kernel");
    }
    Ok(kernel)
}

fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| image.get(at..at + 4)?.try_into().ok().map(|bytes| u32::from_le_bytes(bytes) as usize);
    let sectors = match *image.get(SETUP_SECTORS)? {
        0 => OLD_SETUP_SECTORS,
        sectors => sectors,
    };
    let start = (usize::from(sectors) + 1) * SECTOR + word(PAYLOAD_OFFSET)?;
    image.get(start..start.checked_add(word(PAYLOAD_LENGTH)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_found_by_the_setup_header() {
        let mut image = vec![0; 4096];
        image[SETUP_SECTORS] = 1;
        image[PAYLOAD_OFFSET] = 16;
        image[PAYLOAD_LENGTH] = 3;
        image[1040..1043].copy_from_slice(b"abc");
        assert_eq!(payload(&image), Some(&b"abc"[..]));
        image[PAYLOAD_LENGTH + 2] = 1;
        assert_eq!(payload(&image), None);
        assert_eq!(payload(b"short"), None);
        assert!(from_bzimage(&image).is_err());
    }
}
