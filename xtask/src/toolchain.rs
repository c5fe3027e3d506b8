//! Finds the tools that compile the eBPF programs: a Rust toolchain with the standard library's sources, and bpf-linker.
//!
//! `egress-node/build.rs` and `cargo xtask setup` both include this file, so that setup installs exactly the tools that the
//! build looks for. It uses only std, installs nothing, and decides by the files on the disk.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version of bpf-linker that setup installs, and the oldest that the build accepts.
pub const BPF_LINKER_VERSION: &str = "0.13.0";
/// The LLVM version with which setup builds bpf-linker. It reads the bitcode of compilers with this LLVM or an older one.
pub const LLVM_MAJOR: u32 = 22;
/// The eBPF target of little-endian machines.
pub const BPF_TARGET: &str = "bpfel-unknown-none";

/// The oldest supported compiler, as in the workspace's `rust-version`.
const MIN_RUST: Version = Version(1, 95, 0);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32, u32);

impl Version {
    /// Parses the first `X.Y.Z` of a `--version` line. Ignores a suffix such as `-nightly`.
    fn parse(line: &str) -> Option<Self> {
        line.split_whitespace().find_map(|word| {
            let mut parts = word.split('-').next()?.split('.').map(|part| part.parse().ok());
            Some(Self(parts.next()??, parts.next()??, parts.next()??))
        })
    }
}

/// The tools that a build of the eBPF programs runs.
#[derive(Debug)]
pub struct Toolchain {
    /// cargo and rustc of one toolchain.
    pub rust: Rust,
    /// The path of bpf-linker.
    pub linker: PathBuf,
}

/// A Rust toolchain that can build `core` from source.
#[derive(Debug)]
pub struct Rust {
    /// The path of cargo, next to `rustc`.
    pub cargo: PathBuf,
    /// The path of the compiler.
    pub rustc: PathBuf,
}

/// A part of a toolchain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// cargo and rustc.
    Rust,
    /// bpf-linker.
    Linker,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Version(major, minor, _) = MIN_RUST;
        match self {
            Part::Rust => write!(f, "a Rust toolchain {major}.{minor} or newer with the standard library's sources"),
            Part::Linker => {
                write!(f, "bpf-linker {BPF_LINKER_VERSION} or newer, linked with LLVM {LLVM_MAJOR} or newer")
            }
        }
    }
}

impl Part {
    /// Returns how to install the part where setup does not.
    pub fn remedy(self) -> String {
        match self {
            Part::Rust => "rustup component add rust-src".to_owned(),
            Part::Linker => format!(
                "install LLVM {LLVM_MAJOR} with its development files, then LLVM_PREFIX=$(llvm-config-{LLVM_MAJOR} --prefix) \
                 cargo install bpf-linker --version {BPF_LINKER_VERSION} --no-default-features --features llvm-{LLVM_MAJOR}"
            ),
        }
    }
}

/// The missing parts. The error's text says how to install them.
#[derive(Debug)]
pub struct Missing(Vec<Part>);

impl std::error::Error for Missing {}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the eBPF programs cannot be built, because this is missing:")?;
        self.0.iter().try_for_each(|part| writeln!(f, "- {part}"))?;
        writeln!(f, "On Debian 12, as root, install it with:\n    cargo xtask setup\nElsewhere:")?;
        self.0.iter().try_for_each(|part| writeln!(f, "    {}", part.remedy()))
    }
}

impl Toolchain {
    /// Finds both parts, or returns which of them are missing.
    pub fn find() -> Result<Self, Missing> {
        match (Rust::find(), find_linker()) {
            (Some(rust), Some(linker)) => Ok(Self { rust, linker }),
            (rust, linker) => {
                let parts = [(rust.is_none(), Part::Rust), (linker.is_none(), Part::Linker)];
                Err(Missing(parts.into_iter().filter_map(|(missing, part)| missing.then_some(part)).collect()))
            }
        }
    }

    /// Returns `cargo SUBCOMMAND` for the eBPF target, in an environment without the variables of an outer cargo or rustup.
    pub fn cargo(&self, subcommand: &str) -> Command {
        let mut command = Command::new(&self.rust.cargo);
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(belongs_to_outer_build) {
                command.env_remove(&name);
            }
        }
        // Subcommands such as clippy come from the same toolchain, not from rustup's proxies.
        let mut path = vec![self.rust.bin_dir()];
        path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
        if let Ok(path) = std::env::join_paths(path) {
            command.env("PATH", path);
        }
        let flags =
            ["-Cdebuginfo=2".to_owned(), format!("-Clinker={}", self.linker.display()), "-Clink-arg=--btf".to_owned()];
        command
            .arg(subcommand)
            .args(["-Z", "build-std=core", "--target", BPF_TARGET])
            .env("RUSTC", &self.rust.rustc)
            // `build-std` is a nightly feature, but it also works with a stable compiler that has the sources.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
        command
    }
}

/// Returns whether an environment variable describes the build that runs this code, so that a nested build must not see it.
fn belongs_to_outer_build(name: &str) -> bool {
    // The sources of crates and the number of jobs are the same for both builds.
    const KEPT: [&str; 3] = ["CARGO_HOME", "CARGO_MAKEFLAGS", "RUSTUP_HOME"];
    const KEPT_PREFIXES: [&str; 4] = ["CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTRIES_", "CARGO_REGISTRY_"];
    // cargo and rustup prepend the outer toolchain's libraries to LD_LIBRARY_PATH; its LLVM is not bpf-linker's.
    const DROPPED: [&str; 8] =
        ["CARGO", "DEBUG", "HOST", "LD_LIBRARY_PATH", "NUM_JOBS", "OPT_LEVEL", "PROFILE", "TARGET"];
    if KEPT.contains(&name) || KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
        return false;
    }
    DROPPED.contains(&name) || name.starts_with("CARGO_") || name.starts_with("RUST") || name.starts_with("CLIPPY_")
}

impl Rust {
    /// Finds the first toolchain with the sources: Debian's (setup links bpf-linker with its LLVM), the active one, then any of rustup's.
    pub fn find() -> Option<Self> {
        let mut candidates = vec![PathBuf::from("/usr/bin/rustc")];
        candidates.extend(search_path("rustc"));
        if let Some(home) = env_dir("RUSTUP_HOME").or_else(|| Some(env_dir("HOME")?.join(".rustup"))) {
            let toolchains = std::fs::read_dir(home.join("toolchains")).into_iter().flatten().flatten();
            candidates.extend(toolchains.map(|entry| entry.path().join("bin/rustc")).collect::<BTreeSet<_>>());
        }
        candidates.into_iter().find_map(|rustc| Self::at(&rustc))
    }

    /// Returns the folder of this toolchain's programs.
    pub fn bin_dir(&self) -> PathBuf {
        self.rustc.parent().map(Path::to_path_buf).unwrap_or_default()
    }

    fn at(rustc: &Path) -> Option<Self> {
        let sysroot = PathBuf::from(first_line(Command::new(rustc).args(["--print", "sysroot"]))?);
        if !sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs").exists() {
            return None;
        }
        // Do not use the given `rustc`: it may be rustup's proxy and choose another toolchain in the nested build.
        let (cargo, rustc) = (sysroot.join("bin/cargo"), sysroot.join("bin/rustc"));
        let version = Version::parse(&first_line(Command::new(&rustc).arg("--version"))?)?;
        (version >= MIN_RUST && cargo.exists()).then_some(Self { cargo, rustc })
    }
}

/// Finds bpf-linker in Spillway's cache, the PATH or cargo's bin folder, if it runs and is new enough.
pub fn find_linker() -> Option<PathBuf> {
    let minimum = Version::parse(BPF_LINKER_VERSION)?;
    let cached = linker_root().map(|root| root.join("bin/bpf-linker"));
    let cargo_bin = env_dir("CARGO_HOME").or_else(|| Some(env_dir("HOME")?.join(".cargo")));
    cached
        .into_iter()
        .chain(search_path("bpf-linker"))
        .chain(cargo_bin.map(|home| home.join("bin/bpf-linker")))
        .filter(|path| path.exists())
        // Running it also checks that its LLVM library is installed.
        .find(|path| {
            let line = first_line(Command::new(path).arg("--version").env_remove("LD_LIBRARY_PATH"));
            line.and_then(|line| Version::parse(&line)).is_some_and(|version| version >= minimum)
        })
}

/// Returns the folder below which setup installs bpf-linker (`cargo install --root`). Its name contains the versions, so that
/// a newer Spillway does not use an older build. It outlives `cargo clean` and the clone.
pub fn linker_root() -> Option<PathBuf> {
    Some(cache_dir()?.join(format!("bpf-linker-{BPF_LINKER_VERSION}-llvm{LLVM_MAJOR}")))
}

/// Returns `$XDG_CACHE_HOME/spillway`, or `~/.cache/spillway`.
pub fn cache_dir() -> Option<PathBuf> {
    Some(env_dir("XDG_CACHE_HOME").or_else(|| Some(env_dir("HOME")?.join(".cache")))?.join("spillway"))
}

fn env_dir(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn search_path(program: &str) -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join(program)).filter(|file| file.exists()).collect()
}

fn first_line(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.lines().next()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let parse = |line: &str| Version::parse(line);
        assert_eq!(parse("rustc 1.97.0-nightly (e50aa6fba 2026-05-19)"), Some(Version(1, 97, 0)));
        assert!(parse("bpf-linker 0.13.0") > parse("bpf-linker 0.9.15"));
        assert_eq!(parse("bpf-linker"), None);
    }

    #[test]
    fn the_oldest_compiler_is_the_workspaces() {
        let Version(major, minor, _) = MIN_RUST;
        let manifest = include_str!("../../Cargo.toml");
        assert!(manifest.contains(&format!("rust-version = \"{major}.{minor}\"")));
    }

    #[test]
    fn nested_build_keeps_only_the_settings_for_crate_sources() {
        for name in ["CARGO_HOME", "CARGO_NET_OFFLINE", "CARGO_HTTP_CAINFO", "RUSTUP_HOME", "PATH", "HOME"] {
            assert!(!belongs_to_outer_build(name), "{name}");
        }
        let outer =
            ["CARGO_PKG_NAME", "CARGO_ENCODED_RUSTFLAGS", "RUSTC_WORKSPACE_WRAPPER", "RUSTUP_TOOLCHAIN", "TARGET"];
        for name in outer {
            assert!(belongs_to_outer_build(name), "{name}");
        }
    }

    #[test]
    fn a_missing_tool_is_named_with_its_remedy() {
        let text = Missing(vec![Part::Rust]).to_string();
        assert!(text.contains("cargo xtask setup") && text.contains("rustup component add rust-src"), "{text}");
        assert!(!text.contains("cargo install bpf-linker"), "{text}");
    }
}
