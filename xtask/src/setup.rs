//! `cargo xtask setup`: installs the prerequisites of the build and the tests, or says exactly what to install.
//!
//! It first surveys the machine, which takes a fraction of a second, and installs only missing parts. So `demo` and `test`
//! can run it every time. Compiled tools go into Spillway's cache, not into the clone or `~/.cargo`.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::toolchain::{self, BPF_LINKER_VERSION, LLVM_MAJOR, Part, Rust};
use crate::{progress, workspace};

const BPFFS: &str = "/sys/fs/bpf";

/// A tool that cargo compiles into Spillway's cache.
#[derive(Clone, Copy)]
pub struct CargoTool {
    name: &'static str,
    version: &'static str,
    /// The message if it is missing.
    pub remedy: &'static str,
}

/// Checks licences and the sources of dependencies.
pub const CARGO_DENY: CargoTool = CargoTool {
    name: "cargo-deny",
    version: "0.20.2",
    remedy: "cargo-deny is not installed: cargo install cargo-deny --locked (some minutes)",
};
/// Finds unused dependencies.
pub const CARGO_MACHETE: CargoTool = CargoTool {
    name: "cargo-machete",
    version: "0.9.2",
    remedy: "cargo-machete is not installed: cargo install cargo-machete --locked (a minute)",
};

impl CargoTool {
    /// Finds the program in the PATH or in the cache.
    pub fn find(&self) -> Option<PathBuf> {
        find_program(self.name).or(self.cached().filter(|path| path.exists()))
    }

    /// Compiles the program into the cache.
    pub fn install(&self) -> Result<PathBuf> {
        let Self { name, version, .. } = self;
        let program = self.cached().with_context(|| format!("HOME is not set: there is no place for {name}"))?;
        let root = program.parent().and_then(Path::parent).unwrap_or(&program);
        let mut command = cargo_install(name, version, root);
        // Optimizing the tool would take longer than all its runs.
        command.arg("--debug");
        progress::run(&format!("compile {name} {version} (a minute, once)"), &mut command)?;
        Ok(program)
    }

    fn cached(&self) -> Option<PathBuf> {
        let Self { name, version, .. } = self;
        Some(toolchain::cache_dir()?.join(format!("{name}-{version}/bin/{name}")))
    }
}

/// Install the prerequisites of building and testing on this machine, or say what to install
#[derive(clap::Args)]
pub struct Args {
    /// Install nothing; list what is missing, and fail if anything is
    #[arg(long)]
    check: bool,
}

/// The activity of a command, which determines the programs that it needs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Compiling the workspace.
    Build,
    /// Running labs of network namespaces.
    Lab,
    /// Running the demo, which also shows alerts.
    Demo,
    /// Running all end-to-end tests in the labs.
    Tests,
    /// Opening the page in a browser.
    Page,
    /// Comparing a gateway's failure with the usual pair of keepalived and conntrackd.
    Failover,
    /// Making and running guests with other kernels.
    Guests,
    /// Running a Kubernetes cluster.
    Cluster,
}

/// The scopes for which `cargo xtask setup` installs: those of `demo` and `test`, including Kubernetes and other kernels.
const USUAL: [Scope; 4] = [Scope::Demo, Scope::Tests, Scope::Guests, Scope::Cluster];

/// The programs, the Debian packages that contain them, and the scopes that need them. Without a scope, every lab needs the program.
const PROGRAMS: [(&str, &str, &[Scope]); 25] = [
    ("ip", "iproute2", &[]),
    ("nft", "nftables", &[]),
    ("bpftool", "bpftool", &[]),
    ("nsenter", "util-linux", &[]),
    ("prometheus", "prometheus", &[Scope::Demo, Scope::Tests]),
    ("curl", "curl", &[Scope::Demo, Scope::Tests, Scope::Page]),
    ("vtysh", "frr", &[Scope::Tests]),
    ("bird", "bird2", &[Scope::Tests]),
    ("nfcapd", "nfdump", &[Scope::Tests]),
    ("chromium", "chromium", &[Scope::Page]),
    ("chromedriver", "chromium-driver", &[Scope::Page]),
    ("keepalived", "keepalived", &[Scope::Failover]),
    ("conntrackd", "conntrackd", &[Scope::Failover]),
    ("qemu-system-x86_64", "qemu-system-x86", &[Scope::Guests]),
    ("busybox", "busybox-static", &[Scope::Guests]),
    ("modprobe", "kmod", &[Scope::Guests]),
    ("ipvsadm", "ipvsadm", &[Scope::Guests]),
    ("lz4", "lz4", &[Scope::Guests]),
    ("xz", "xz-utils", &[Scope::Guests]),
    ("zstd", "zstd", &[Scope::Guests]),
    ("strip", "binutils", &[Scope::Guests]),
    ("sysctl", "procps", &[Scope::Guests]),
    ("runc", "runc", &[Scope::Cluster]),
    ("iptables", "iptables", &[Scope::Cluster]),
    ("openssl", "openssl", &[Scope::Cluster]),
];

/// Something that the machine lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gap {
    Part(Part),
    Program { name: &'static str, package: &'static str },
    BpfFs,
}

/// Runs `cargo xtask setup`.
pub fn run(args: &Args) -> Result<()> {
    let gaps = survey(&USUAL);
    if gaps.is_empty() {
        println!("Nothing to do: this machine has everything that `cargo xtask demo` and `cargo xtask test` need.");
        return Ok(());
    }
    if args.check {
        let list: Vec<String> = gaps.iter().map(|gap| format!("\n- {gap}")).collect();
        bail!("missing:{}", list.concat());
    }
    install(&USUAL)
}

/// Installs the missing prerequisites of `scope`. Prints nothing if there are none.
pub fn ensure(scope: Scope) -> Result<()> {
    if survey(&[scope]).is_empty() { Ok(()) } else { install(&[scope]) }
}

fn survey(scopes: &[Scope]) -> Vec<Gap> {
    let mut gaps = Vec::new();
    let mut missing = |is_missing: bool, gap: Gap| gaps.extend(is_missing.then_some(gap));
    missing(Rust::find().is_none(), Gap::Part(Part::Rust));
    missing(toolchain::find_linker().is_none(), Gap::Part(Part::Linker));
    if scopes != [Scope::Build] {
        let of_labs = PROGRAMS.iter().filter(|(.., by)| by.is_empty() || by.iter().any(|one| scopes.contains(one)));
        of_labs.for_each(|(name, package, _)| missing(find_program(name).is_none(), Gap::Program { name, package }));
        missing(!bpffs_is_mounted(), Gap::BpfFs);
    }
    gaps
}

fn install(scopes: &[Scope]) -> Result<()> {
    // Two commands may run concurrently. The second one then finds everything installed.
    let cache = toolchain::cache_dir().context("HOME is not set: there is no place for the cache of tools")?;
    fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let lock = File::create(cache.join("setup.lock")).context("cannot create setup's lock")?;
    lock.lock().context("cannot take setup's lock")?;

    let gaps = survey(scopes);
    if !gaps.is_empty() && !can_install(&gaps) {
        let steps: Vec<String> = gaps.iter().map(|gap| format!("\n- {gap}: {}", gap.by_hand())).collect();
        bail!(
            "this machine lacks prerequisites, which setup installs only on Debian and as root. Either run \
             `cargo xtask setup` as root on Debian 12, or:{}",
            steps.concat()
        );
    }
    let packages: BTreeSet<&str> = gaps.iter().flat_map(|gap| gap.packages()).copied().collect();
    if !packages.is_empty() {
        install_packages(&packages)?;
    }
    // Survey again, because the packages may have fixed other gaps, such as a cached linker without its LLVM library.
    for gap in survey(scopes) {
        match gap {
            Gap::Part(Part::Linker) => install_linker()?,
            Gap::BpfFs => mount_bpffs()?,
            Gap::Part(Part::Rust) | Gap::Program { .. } => {}
        }
    }
    let left: Vec<String> = survey(scopes).iter().map(|gap| format!("\n- {gap}: {}", gap.by_hand())).collect();
    if !left.is_empty() {
        bail!("still missing after setup:{}", left.concat());
    }
    Ok(())
}

impl Gap {
    fn packages(&self) -> &[&str] {
        match self {
            Self::Part(Part::Rust) => &["rustc-web", "cargo-web", "rust-web-src", "rust-web-clippy"],
            Self::Part(Part::Linker) => &["llvm-22-dev", "libpolly-22-dev", "zlib1g-dev", "libzstd-dev"],
            Self::Program { package, .. } => std::slice::from_ref(package),
            Self::BpfFs => &[],
        }
    }

    fn by_hand(&self) -> String {
        match self {
            Self::Part(part) => {
                format!("{} (packages of Debian: {})", part.remedy(), self.packages().join(" "))
            }
            Self::Program { package, .. } => format!("install the package {package}"),
            Self::BpfFs => format!("as root: mount -t bpf bpf {BPFFS}"),
        }
    }
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Part(part) => part.fmt(f),
            Self::Program { name, .. } => write!(f, "the program {name}"),
            Self::BpfFs => write!(f, "a BPF file system at {BPFFS}"),
        }
    }
}

fn can_install(gaps: &[Gap]) -> bool {
    nix::unistd::geteuid().is_root() && gaps.iter().all(|gap| is_debian() || gap.packages().is_empty())
}

fn is_debian() -> bool {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    release.lines().any(|line| line == "ID=debian")
}

fn install_packages(packages: &BTreeSet<&str>) -> Result<()> {
    let apt = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").args(["-o", "Acquire::Retries=3"]);
        command.args(["-o", "DPkg::Lock::Timeout=300"]);
        command
    };
    progress::run("read Debian's package lists", apt().arg("update"))?;
    let title = format!("install {}", packages.iter().copied().collect::<Vec<_>>().join(" "));
    progress::run(&title, apt().args(["install", "-y", "--no-install-recommends"]).args(packages))
}

fn install_linker() -> Result<()> {
    let llvm = format!("/usr/lib/llvm-{LLVM_MAJOR}");
    let root = toolchain::linker_root().context("HOME is not set: there is no place for bpf-linker")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(Path::new(&llvm).join("bin")).chain(std::env::split_paths(&path)))?;
    let mut command = cargo_install("bpf-linker", BPF_LINKER_VERSION, &root);
    command.args(["--no-default-features", "--features", &format!("llvm-{LLVM_MAJOR}")]);
    // Without LLVM_PREFIX, the build may find another LLVM than the one that it links.
    command.env("LLVM_PREFIX", &llvm).env("PATH", path);
    progress::run(&format!("compile bpf-linker {BPF_LINKER_VERSION} (about 2 minutes, once)"), &mut command)
}

fn cargo_install(package: &str, version: &str, root: &Path) -> Command {
    let mut command = workspace::cargo("install");
    // Run outside the clone, so that the clone's cargo configuration and target folder do not apply to the tool.
    command.current_dir("/").env_remove("CARGO_TARGET_DIR");
    command.args([package, "--version", version, "--locked", "--root"]).arg(root);
    command
}

fn mount_bpffs() -> Result<()> {
    progress::run(&format!("mount {BPFFS}"), Command::new("mount").args(["-t", "bpf", "bpf", BPFFS]))
}

fn bpffs_is_mounted() -> bool {
    nix::sys::statfs::statfs(BPFFS).is_ok_and(|fs| fs.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC)
}

/// Finds a program in the PATH, or in the sbin folders that a user's PATH may lack.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_missing_tool_names_a_remedy() {
        let mut gaps = vec![Gap::Part(Part::Rust), Gap::Part(Part::Linker), Gap::BpfFs];
        gaps.extend(PROGRAMS.map(|(name, package, _)| Gap::Program { name, package }));
        for gap in gaps {
            assert!(!gap.to_string().is_empty());
            let remedy = gap.by_hand();
            assert!(["install", "mount", "rustup"].iter().any(|verb| remedy.contains(verb)), "{gap}: {remedy}");
        }
    }

    #[test]
    fn the_linker_is_built_with_the_llvm_that_is_installed() {
        assert!(Gap::Part(Part::Linker).packages().contains(&format!("llvm-{LLVM_MAJOR}-dev").as_str()));
    }

    #[test]
    fn the_linker_is_cached_by_version() {
        let root = toolchain::linker_root().unwrap();
        assert!(root.ends_with(format!("spillway/bpf-linker-{BPF_LINKER_VERSION}-llvm{LLVM_MAJOR}")));
    }
}
