//! Named network namespaces: creates and removes them, enters them on a thread, runs programs in them.
//!
//! Namespaces are bound to files in /run/netns, so `ip -n NAME` and `nsenter --net=` work on them. Only the network is
//! separate: a program in a namespace sees the same files, including /sys/fs/bpf (which `ip netns exec` would hide).
//! This module does not depend on labs: [`crate::scope`] decides who owns a namespace and when it is removed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::ifaddrs::getifaddrs;
use nix::mount::{MntFlags, MsFlags};
use nix::net::if_::InterfaceFlags;
use nix::sched::{CloneFlags, setns, unshare};

use crate::command;
use crate::wait::wait_until;

/// The directory where namespaces are bound, as in iproute2.
pub const NETNS_DIR: &str = "/run/netns";

/// Links come up within milliseconds, or the kernel delays them by a second.
const LINK_TIMEOUT: Duration = Duration::from_secs(10);

/// The flag of tentative addresses and the scope of link-local ones in /proc/net/if_inet6.
const IFA_F_TENTATIVE: u32 = 0x40;
const LINK_LOCAL: &str = "20";

/// A handle of a network namespace. Clones refer to the same namespace; dropping a handle does not remove it.
#[derive(Clone, Debug)]
pub struct NetNs {
    name: Arc<str>,
    /// The file that represents it.
    path: Arc<Path>,
    file: Arc<File>,
}

impl NetNs {
    /// Creates the namespace `name`, with its loopback up and duplicate address detection off, so that IPv6 addresses
    /// are usable immediately. First removes a namespace of that name that a dead process left behind.
    pub fn create(name: &str) -> Result<NetNs> {
        let path = path_of(name);
        fs::create_dir_all(NETNS_DIR).with_context(|| format!("cannot make {NETNS_DIR}"))?;
        if path.exists() {
            remove(name)?;
        }
        File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let bound = on_thread(name, || {
            unshare(CloneFlags::CLONE_NEWNET).context("cannot create a network namespace (requires root)")?;
            nix::mount::mount(Some("/proc/thread-self/ns/net"), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                .with_context(|| format!("cannot bind a namespace to {}", path.display()))
        });
        if let Err(error) = bound {
            fs::remove_file(&path).ok();
            return Err(error);
        }
        let ns = NetNs::open(name)?;
        ns.sysctls(&[
            ("net.ipv6.conf.all.accept_dad", "0"),
            ("net.ipv6.conf.default.accept_dad", "0"),
            ("net.ipv6.conf.default.accept_ra", "0"),
        ])?;
        ns.ip(&["link set lo up".to_owned()])?;
        Ok(ns)
    }

    /// Opens an existing namespace.
    pub fn open(name: &str) -> Result<NetNs> {
        Self::open_file(name, &path_of(name))
    }

    /// Opens a namespace by the file that represents it, such as `/proc/1/ns/net`. The name is for messages.
    pub fn open_file(name: &str, path: &Path) -> Result<NetNs> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        Ok(NetNs { name: name.into(), path: path.into(), file: Arc::new(file) })
    }

    /// Returns the name in /run/netns.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Moves the calling thread into this namespace permanently. Meant for threads created for it.
    pub fn enter_thread(&self) -> Result<()> {
        setns(self.file.as_fd(), CloneFlags::CLONE_NEWNET)
            .with_context(|| format!("cannot enter namespace {}", self.name))
    }

    /// Runs `work` on a new thread in this namespace and waits for it. A panic of `work` is an error.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        on_thread(&self.name, || {
            self.enter_thread()?;
            work()
        })
    }

    /// Starts a thread in this namespace. `work` runs only once the thread is inside.
    pub fn spawn<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<JoinHandle<Result<T>>> {
        let ns = self.clone();
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                ns.enter_thread()?;
                work()
            })
            .with_context(|| format!("cannot start thread {name} in {}", self.name))
    }

    /// Returns a command that runs in this namespace, with the caller's file system. `nsenter` moves it there: a closure between
    /// fork and exec would make the standard library copy the page tables of the whole test process for every short program.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(command::ENTER);
        command.arg(format!("-n{}", self.path.display())).arg(program.as_ref());
        command
    }

    /// Runs lines of `ip -batch` here, for IPv4 and IPv6 (a batch line does not accept `-6`, so the address must imply
    /// the family). Stops at the first line that fails, with an error that names the line.
    pub fn ip(&self, lines: &[String]) -> Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        command::feed(self.command("ip").args(["-batch", "-"]), &(lines.join("\n") + "\n"))
            .with_context(|| format!("ip -batch in {}", self.name))
            .with_context(|| numbered(lines))
    }

    /// Loads an nftables script here.
    pub fn nft(&self, script: &str) -> Result<()> {
        command::feed(self.command("nft").args(["-f", "-"]), script)
            .with_context(|| format!("nft in {}: {script}", self.name))
    }

    /// Runs a shell script here and returns its output.
    pub fn sh(&self, script: &str) -> Result<String> {
        command::output(self.command("/bin/sh").args(["-euc", script]))
            .with_context(|| format!("in {}: {script}", self.name))
    }

    /// Writes settings, in sysctl's dotted form with `/` for a dot inside an interface's name.
    pub fn sysctls(&self, settings: &[(&str, &str)]) -> Result<()> {
        self.run(|| {
            for (key, value) in settings {
                let path = format!("/proc/sys/{}", key.replace('.', "/"));
                fs::write(&path, value).with_context(|| format!("sysctl {key}={value} in {}", self.name))?;
            }
            Ok(())
        })
    }

    /// Returns the index of an interface of this namespace.
    pub fn ifindex(&self, interface: &str) -> Result<u32> {
        self.run(|| {
            nix::net::if_::if_nametoindex(interface)
                .with_context(|| format!("no interface {interface} in {}", self.name))
        })
    }

    /// Returns the MAC address of an interface of this namespace.
    pub fn mac(&self, interface: &str) -> Result<[u8; 6]> {
        self.run(|| {
            let mut all = getifaddrs()?.filter(|one| one.interface_name == interface);
            let mac = all.find_map(|one| one.address?.as_link_addr()?.addr());
            mac.with_context(|| format!("no interface {interface} with a MAC address in {}", self.name))
        })
    }

    /// Waits until `interfaces` can send and receive. The kernel learns of a carrier with a delay, and silently drops
    /// packets sent before, including neighbour solicitations, which are repeated after a second.
    pub fn wait_running<N: AsRef<str> + Sync>(&self, interfaces: &[N]) -> Result<()> {
        let running = || {
            let running = getifaddrs()?.filter(|one| one.flags.contains(InterfaceFlags::IFF_RUNNING));
            Ok(running.map(|one| one.interface_name).collect())
        };
        self.wait_each(interfaces, "is running", running)
    }

    /// Waits until `interfaces` run and answer for all their IPv6 addresses, including the link-local address: the
    /// kernel starts to do so shortly after `ip` has returned.
    pub fn wait_addressed<N: AsRef<str> + Sync>(&self, interfaces: &[N]) -> Result<()> {
        self.wait_running(interfaces)?;
        let addressed = || {
            let addresses = fs::read_to_string("/proc/thread-self/net/if_inet6")?;
            let (mut local, mut tentative) = (BTreeSet::new(), BTreeSet::new());
            for line in addresses.lines() {
                // Address, index, prefix length, scope, flags, name.
                let words: Vec<&str> = line.split_whitespace().collect();
                let [_, _, _, scope, flags, name] = words[..] else { continue };
                if u32::from_str_radix(flags, 16)? & IFA_F_TENTATIVE != 0 {
                    tentative.insert(name.to_owned());
                } else if scope == LINK_LOCAL {
                    local.insert(name.to_owned());
                }
            }
            Ok(&local - &tentative)
        };
        self.wait_each(interfaces, "has its IPv6 addresses", addressed)
    }

    fn wait_each<N: AsRef<str> + Sync>(
        &self,
        interfaces: &[N],
        what: &str,
        ready: impl Fn() -> Result<BTreeSet<String>> + Send + Sync,
    ) -> Result<()> {
        let missing = || {
            let ready = ready()?;
            Ok(interfaces.iter().map(AsRef::as_ref).filter(|name| !ready.contains(*name)).collect::<Vec<_>>())
        };
        self.run(|| {
            let what = format!("every interface {what} in {}", self.name);
            wait_until(&what, LINK_TIMEOUT, missing, |missing| missing.is_empty()).map(drop)
        })
    }
}

/// Removes the namespace `name`. The kernel frees it when the last thread, process and socket in it has ended.
pub fn remove(name: &str) -> Result<()> {
    let path = path_of(name);
    // After an interrupted creation, nothing is bound to the file, and this fails with EINVAL.
    nix::mount::umount2(&path, MntFlags::MNT_DETACH).ok();
    fs::remove_file(&path).with_context(|| format!("cannot remove namespace {name}"))
}

fn path_of(name: &str) -> PathBuf {
    Path::new(NETNS_DIR).join(name)
}

fn numbered(lines: &[String]) -> String {
    let list: Vec<String> = lines.iter().enumerate().map(|(i, line)| format!("{:3} {line}", i + 1)).collect();
    format!("ip -batch of\n{}", list.join("\n"))
}

fn on_thread<T: Send>(name: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, work)?;
        thread.join().map_err(|_| anyhow!("the thread in {name} panicked"))?
    })
}
