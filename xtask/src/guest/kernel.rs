//! Fetches Debian's kernels once with apt, unpacks them, and keeps them in the cache.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use super::elf;
use crate::{progress, toolchain};

/// A kernel to run tests under. Kernels older than 6.6 have no TCX, so the programs are filters of a clsact qdisc there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kernel {
    /// Debian 12's kernel.
    #[value(name = "6.1")]
    V6_1,
    /// Debian 12's newer kernel.
    #[value(name = "6.12")]
    V6_12,
    /// Debian unstable's kernel; an error once unstable has a newer version.
    #[value(name = "7.2")]
    V7_2,
}

/// A kernel on the disk.
pub struct Unpacked {
    /// The uncompressed kernel image.
    pub vmlinux: PathBuf,
    /// The folder that contains `lib/modules/RELEASE`, with uncompressed modules and their index.
    pub root: PathBuf,
    /// The release (`uname -r`).
    pub release: String,
}

/// The apt source of unstable, whose package lists are kept separate from the system's.
const UNSTABLE: &str = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] \
    http://deb.debian.org/debian unstable main\n";

/// The prefixes of the packages that make up a kernel. Those after the first exist only if the image is split into several packages.
const PARTS: [&str; 4] = ["linux-image-", "linux-binary-", "linux-modules-", "linux-base-"];

impl Kernel {
    /// The kernels that every run of all tests uses.
    pub const USUAL: [Self; 2] = [Self::V6_1, Self::V6_12];

    /// Returns the version as it is written on the command line.
    pub const fn version(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
            Self::V7_2 => "7.2",
        }
    }

    /// Returns the meta package that depends on the newest build.
    const fn package(self) -> &'static str {
        match self {
            Self::V6_1 | Self::V7_2 => "linux-image-cloud-amd64",
            Self::V6_12 => "linux-image-6.12-cloud-amd64",
        }
    }

    /// Returns the kernel from the cache. Fetches it from Debian if it is not there.
    pub fn unpacked(self) -> Result<Unpacked> {
        let cache = toolchain::cache_dir().context("HOME is not set: there is no place for kernels")?;
        let root = cache.join("kernels").join(self.version());
        if !root.join("vmlinux").exists() {
            progress::run_with(&format!("fetch Linux {}", self.version()), || self.fetch(&root))?;
        }
        let release = only_entry(&root.join("lib/modules"))?;
        Ok(Unpacked { vmlinux: root.join("vmlinux"), root, release })
    }

    /// Fetches the kernel and unpacks it into `root`, which is complete once it contains `vmlinux`.
    fn fetch(self, root: &Path) -> Result<()> {
        if root.exists() {
            fs::remove_dir_all(root).with_context(|| format!("cannot remove the incomplete {}", root.display()))?;
        }
        let tree = root.join("tree");
        fs::create_dir_all(&tree).with_context(|| format!("cannot create {}", tree.display()))?;
        for package in self.packages(root)? {
            lab::command::output(apt("apt-get", &self.sources(root)).arg("download").arg(&package).current_dir(root))?;
        }
        for file in entries(root)?.iter().filter(|name| name.ends_with(".deb")) {
            lab::command::output(Command::new("dpkg-deb").arg("-x").arg(root.join(file)).arg(&tree))?;
            fs::remove_file(root.join(file)).with_context(|| format!("cannot remove {file}"))?;
        }
        let modules = [tree.join("lib/modules"), tree.join("usr/lib/modules")];
        let modules = modules.iter().find(|dir| dir.is_dir()).context("the packages hold no modules")?;
        let release = only_entry(modules)?;
        if !release.starts_with(&format!("{}.", self.version())) {
            bail!("Debian has Linux {release} instead of {}", self.version());
        }
        fs::create_dir_all(root.join("lib")).context("cannot create the folder of modules")?;
        fs::rename(modules, root.join("lib/modules")).context("cannot move the modules")?;
        uncompress(&root.join("lib/modules").join(&release))?;
        lab::command::output(Command::new("depmod").arg("-b").arg(root).arg(&release))?;
        let images = [tree.join("boot"), root.join("lib/modules").join(&release)];
        let mut images = images.iter().flat_map(|dir| {
            let names = entries(dir).unwrap_or_default();
            names.into_iter().filter(|name| name.starts_with("vmlinuz")).map(|name| dir.join(name))
        });
        let image = images.next().context("the packages hold no kernel image")?;
        let vmlinux =
            elf::from_bzimage(&fs::read(&image).with_context(|| format!("cannot read {}", image.display()))?)?;
        fs::remove_dir_all(&tree).with_context(|| format!("cannot remove {}", tree.display()))?;
        fs::write(root.join("vmlinux"), vmlinux).context("cannot write the kernel")
    }

    /// Returns apt's options for the source of this kernel.
    fn sources(self, root: &Path) -> Vec<String> {
        if self != Self::V7_2 {
            return Vec::new();
        }
        let root = root.display();
        let options = [
            format!("Dir::Etc::sourcelist={root}/unstable.list"),
            "Dir::Etc::sourceparts=-".to_owned(),
            format!("Dir::State::lists={root}/lists"),
            "Dir::Cache::pkgcache=".to_owned(),
            "Dir::Cache::srcpkgcache=".to_owned(),
            "Acquire::Languages=none".to_owned(),
        ];
        options.into_iter().flat_map(|option| ["-o".to_owned(), option]).collect()
    }

    /// Returns the packages with the image and the modules, on which the meta package depends.
    fn packages(self, root: &Path) -> Result<BTreeSet<String>> {
        let sources = self.sources(root);
        if self == Self::V7_2 {
            fs::create_dir_all(root.join("lists/partial")).context("cannot create the folder of package lists")?;
            fs::write(root.join("unstable.list"), UNSTABLE).context("cannot write unstable.list")?;
            lab::command::output(apt("apt-get", &sources).arg("update"))?;
        }
        let mut found = BTreeSet::new();
        let mut todo = vec![self.package().to_owned()];
        while let Some(package) = todo.pop() {
            let output =
                apt("apt-cache", &sources).args(["depends", "--no-recommends", "--no-suggests", &package]).output();
            let text = String::from_utf8_lossy(&output.context("cannot run apt-cache")?.stdout).into_owned();
            let names = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
            let parts = names.filter(|name| PARTS.iter().any(|part| name.starts_with(part)));
            for name in parts.filter(|name| name.ends_with("cloud-amd64") && name.contains(self.version())) {
                if found.insert(name.to_owned()) {
                    todo.push(name.to_owned());
                }
            }
        }
        if found.is_empty() {
            bail!("Debian's package {} depends on no kernel {}", self.package(), self.version());
        }
        Ok(found)
    }
}

fn apt(program: &str, options: &[String]) -> Command {
    let mut command = Command::new(program);
    // apt's sandbox user has no access to the cache.
    command.args(["-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3"]).args(options);
    command
}

/// Decompresses all modules, because a guest's module loader may not support the compression.
fn uncompress(dir: &Path) -> Result<()> {
    for name in entries(dir)? {
        let path = dir.join(&name);
        if path.is_dir() && !path.is_symlink() {
            uncompress(&path)?;
        } else if let Some(stem) = name.strip_suffix(".ko.xz").or_else(|| name.strip_suffix(".ko.zst")) {
            let program = if name.ends_with(".xz") { "xz" } else { "zstd" };
            let output = Command::new(program).args(["-d", "-c", "-q"]).arg(&path).output();
            let module = output.with_context(|| format!("cannot run {program}"))?.stdout;
            fs::write(dir.join(format!("{stem}.ko")), module).with_context(|| format!("cannot write {stem}.ko"))?;
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

fn entries(dir: &Path) -> Result<Vec<String>> {
    let list = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    Ok(list.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

fn only_entry(dir: &Path) -> Result<String> {
    let mut names = entries(dir)?;
    match names.pop() {
        Some(name) if names.is_empty() => Ok(name),
        _ => bail!("{} does not hold exactly one entry", dir.display()),
    }
}
