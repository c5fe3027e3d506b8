//! A guest's file system: a cpio archive in the "newc" format, which the kernel unpacks into memory.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_777;

/// An archive being made.
pub struct Initramfs {
    bytes: Vec<u8>,
    inodes: u32,
    /// What is there already, without a leading slash.
    names: BTreeSet<PathBuf>,
}

impl Initramfs {
    /// An archive with these empty directories.
    pub fn new(directories: &[&str]) -> Self {
        let mut archive = Self { bytes: Vec::new(), inodes: 0, names: BTreeSet::new() };
        directories.iter().for_each(|dir| archive.directory(Path::new(dir)));
        archive
    }

    /// A file with these contents, and the directories that it lies in.
    pub fn file(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.parents(Path::new(name));
        self.entry(Path::new(name), FILE | mode, contents);
    }

    /// A symbolic link.
    pub fn link(&mut self, name: &str, target: &str) {
        self.parents(Path::new(name));
        self.entry(Path::new(name), LINK, target.as_bytes());
    }

    /// A copy of a file of this machine, at another place.
    pub fn copy(&mut self, from: &Path, name: &str) -> Result<()> {
        let contents = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        let mode = fs::metadata(from).with_context(|| format!("cannot read {}", from.display()))?.permissions().mode();
        self.file(name, mode & 0o777, &contents);
        Ok(())
    }

    /// A program of this machine as `name`, with the libraries that it is linked with at their own places.
    pub fn program(&mut self, from: &Path, name: &str) -> Result<()> {
        self.copy(from, name)?;
        let output = Command::new("ldd").arg(from).output().context("cannot run ldd")?;
        for library in libraries(&String::from_utf8_lossy(&output.stdout)) {
            self.copy(Path::new(library), library)?;
        }
        Ok(())
    }

    /// The archive's bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(Path::new("TRAILER!!!"), 0, &[]);
        self.bytes
    }

    fn directory(&mut self, name: &Path) {
        self.parents(name);
        self.entry(name, DIRECTORY, &[]);
    }

    fn parents(&mut self, name: &Path) {
        let name = name.strip_prefix("/").unwrap_or(name);
        let parents: Vec<&Path> = name.ancestors().skip(1).filter(|dir| !dir.as_os_str().is_empty()).collect();
        parents.into_iter().rev().for_each(|dir| self.entry(dir, DIRECTORY, &[]));
    }

    /// One entry; what is there already stays as it is.
    fn entry(&mut self, name: &Path, mode: u32, contents: &[u8]) {
        let name = name.strip_prefix("/").unwrap_or(name);
        if !self.names.insert(name.to_owned()) {
            return;
        }
        self.inodes += 1;
        let name = name.to_string_lossy();
        // Inode, mode, owner, group, links, time, size, four device numbers, length of the name, checksum.
        let fields = [self.inodes, mode, 0, 0, 1, 0, contents.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        self.bytes.extend(b"070701");
        fields.iter().for_each(|field| self.bytes.extend(format!("{field:08x}").bytes()));
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(contents);
        self.pad();
    }

    fn pad(&mut self) {
        while !self.bytes.len().is_multiple_of(4) {
            self.bytes.push(0);
        }
    }
}

/// The paths in what ldd prints: `NAME => PATH (ADDRESS)`, or the loader's path alone.
fn libraries(ldd: &str) -> impl Iterator<Item = &str> {
    ldd.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
}

/// A copy of a program without its symbols, which are most of it.
pub fn stripped(program: &Path, to: &Path) -> Result<PathBuf> {
    let name = program.file_name().context("a program has a name")?;
    let path = to.join(name);
    let status = Command::new("strip").arg("-o").arg(&path).arg(program).status().context("cannot run strip")?;
    if !status.success() {
        bail!("strip failed for {}", program.display());
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_the_paths_that_ldd_names() {
        let text = "\tlinux-vdso.so.1 (0x0)\n\tlibm.so.6 => /lib/libm.so.6 (0x1)\n\t/lib64/ld.so.2 (0x2)\n";
        assert_eq!(libraries(text).collect::<Vec<_>>(), ["/lib/libm.so.6", "/lib64/ld.so.2"]);
    }

    #[test]
    fn an_archive_holds_every_directory_once_and_before_its_files() {
        let mut archive = Initramfs::new(&["proc"]);
        archive.file("/a/b/c", 0o755, b"12345");
        archive.link("a/b/d", "c");
        archive.file("a/b/c", 0o600, b"not again");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        let names: Vec<&str> = text.split("070701").skip(1).map(|e| e[104..].split('\0').next().unwrap()).collect();
        assert_eq!(names, ["proc", "a", "a/b", "a/b/c", "a/b/d", "TRAILER!!!"]);
        assert!(text.contains("12345\0\0\0") && !text.contains("again"));
        assert!(text.contains("000081ed"), "mode of a program: {text:?}");
    }
}
