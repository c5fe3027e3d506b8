//! Runs the datapath's tests under other kernels, in a guest in QEMU's software emulation, which needs no virtualization.
//!
//! The guest's file system is made for each run from this machine's programs and the test binaries. Its output is parsed
//! like that of a test binary.

mod elf;
mod initramfs;
mod kernel;
mod verified;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use self::initramfs::Initramfs;
pub use self::kernel::Kernel;
use self::kernel::Unpacked;
use crate::test::libtest::{self, Run};
use crate::test::tally::Tally;
use crate::{build, progress, setup, workspace};

/// A guest takes four minutes on an idle machine. In a whole run it gets only the processor time that other tests leave.
const TIMEOUT: Duration = Duration::from_secs(45 * 60);
const MEMORY: &str = "2G";
const PROCESSORS: &str = "2";

/// The programs that the guest's shell scripts and the lab run. The `nsenter` of busybox would run busybox's `ip`.
const PROGRAMS: [&str; 7] =
    ["/sbin/ip", "/sbin/ipvsadm", "/sbin/tc", "/usr/bin/nsenter", "/usr/sbin/nft", "/usr/sbin/bpftool", "/sbin/sysctl"];
/// The applets of busybox that are used.
const APPLETS: [&str; 22] = [
    "cat", "chmod", "cp", "date", "dmesg", "echo", "env", "false", "grep", "kill", "ln", "ls", "mkdir", "modprobe",
    "mount", "reboot", "rm", "sh", "sleep", "true", "umount", "uname",
];
/// The modules that the tests may need.
const MODULES: [&str; 24] = [
    "8021q",
    "af_packet",
    "bridge",
    "cls_bpf",
    "dummy",
    "geneve",
    "inet_diag",
    "ip_vs",
    "ip_vs_rr",
    "nf_conntrack",
    "nf_nat",
    "nf_tables",
    "nft_chain_nat",
    "nft_ct",
    "nft_masq",
    "nft_objref",
    "sch_ingress",
    "sch_netem",
    "sctp",
    "tcp_diag",
    "tun",
    "udp_diag",
    "veth",
    "vxlan",
];

/// The datapath's tests that depend on the kernel.
const UNIT: &[&str] = &[
    "datapath::tests::clsact",
    "datapath::tests::collector",
    "datapath::tests::fuzz",
    "datapath::tests::gateway",
    "datapath::tests::halves",
    "datapath::tests::load",
    "datapath::tests::native",
    "datapath::tests::packets",
    "real_maps",
];
/// The tests that show whether a kernel accepts the programs, maps and hooks.
const LOADING: &[&str] = &["datapath::tests::clsact", "datapath::tests::load", "real_maps"];
/// The options of the unit tests. They skip measurements for which an emulated machine is too slow.
const OPTIONS: &[&str] = &[
    "--skip",
    "collector_expires_a_million_flows",
    "--skip",
    "forwards_only_what_the_tc_program",
    "--skip",
    "native_model",
    "--test-threads",
    PROCESSORS,
];
/// The end-to-end tests: a pod's TCP, UDP and echo in both families; IPVS and VLAN devices, which the build machine may lack.
const END_TO_END: &[&str] = &[
    "protocols::tcp_udp_and_echo_of_point_to_point_pods",
    "untouched::ipvs_",
    "xdp::gateways_whose_interfaces_are_vlan",
    "--test-threads",
    "1",
];

/// The extent of the tests in a guest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Only the tests that show that a kernel accepts the programs: for kernels between the oldest and this machine's, which run more.
    Loading,
    /// The datapath's tests.
    Datapath,
    /// Also some end-to-end tests, which take minutes.
    EndToEnd,
}

/// The programs that a guest runs.
pub struct Binaries<'a> {
    /// The unit tests of `egress-node`.
    pub unit: &'a Path,
    /// The end-to-end tests.
    pub end_to_end: &'a Path,
    /// The folder of the daemon's own binaries.
    pub bin_dir: &'a Path,
}

/// Returns the title of a guest in a run's output.
pub fn title(kernel: Kernel) -> String {
    format!("guest with Linux {}", kernel.version())
}

/// Runs tests under `kernel`. With `bless`, the counts of its verifier become the baseline.
pub fn run(kernel: Kernel, binaries: &Binaries, extent: Extent, bless: bool, tally: &mut Tally) -> Result<()> {
    let name = title(kernel);
    let prepared = setup::ensure(setup::Scope::Guests).and_then(|()| kernel.unpacked());
    let kernel_files = match prepared {
        Ok(files) => files,
        Err(error) => {
            tally.skip(&name, &format!("{error:#}"));
            return Ok(());
        }
    };
    let dir = workspace::scratch_dir()?.join(format!("guest-{}", kernel.version()));
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let initrd = dir.join("initrd");
    file_system(&kernel_files, binaries, extent, &dir)?.pack(&initrd)?;

    let how = Run { filters: &[], timeout: TIMEOUT, second_try: false };
    libtest::run(&name, qemu(&kernel_files.vmlinux, &initrd), &how, tally)?;
    fs::remove_file(&initrd).with_context(|| format!("cannot remove {}", initrd.display()))?;
    let log = progress::log_file(&name)?;
    let text = fs::read_to_string(&log).with_context(|| format!("cannot read {}", log.display()))?;
    // QEMU ends in the same way after a panic of the guest, so look for the guest's last line.
    if !text.lines().any(|line| line == "GUEST END") {
        tally.fail(&name, &format!("it did not finish: see {}", log.display()));
        return Ok(());
    }
    verified::compare(kernel, &text, bless, tally)
}

fn file_system(kernel: &Unpacked, binaries: &Binaries, extent: Extent, scratch: &Path) -> Result<Initramfs> {
    let directories = ["dev", "etc", "proc", "root", "run", "sys", "tmp", "var"];
    let archive = Initramfs::new(&scratch.join("root"), &directories)?;
    archive.copy(&setup::find_program("busybox").context("busybox is gone")?, "bin/busybox")?;
    APPLETS.iter().try_for_each(|applet| archive.link(&format!("bin/{applet}"), "busybox"))?;
    archive.link("sbin/modprobe", "../bin/busybox")?;
    for program in PROGRAMS {
        archive.program(&fs::canonicalize(program).with_context(|| format!("{program} is gone"))?, program)?;
    }
    let daemon = ["egress-daemon", "egressctl"].map(|name| (binaries.bin_dir.join(name), format!("spillway/{name}")));
    let unit = (binaries.unit.to_owned(), "unit".to_owned());
    let end_to_end = (extent == Extent::EndToEnd).then(|| (binaries.end_to_end.to_owned(), "e2e".to_owned()));
    for (from, name) in daemon.into_iter().chain([unit]).chain(end_to_end) {
        let small = build::stripped(&from, scratch)?;
        archive.program(&small, &name)?;
        fs::remove_file(&small).with_context(|| format!("cannot remove {}", small.display()))?;
    }
    add_modules(&archive, kernel)?;
    archive.script("init", &init(extent))?;
    Ok(archive)
}

/// Adds the modules with their dependencies, and the index through which the kernel's requests find them.
fn add_modules(archive: &Initramfs, kernel: &Unpacked) -> Result<()> {
    for module in MODULES {
        let mut command = Command::new("modprobe");
        command.arg("-d").arg(&kernel.root).args(["-S", &kernel.release, "--show-depends", module]);
        let output = command.output().context("cannot run modprobe")?;
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            // `insmod PATH OPTIONS`, or `builtin NAME`.
            if let Some(path) = line.strip_prefix("insmod ").and_then(|rest| rest.split_whitespace().next()) {
                let path = PathBuf::from(path);
                let name = path.strip_prefix(&kernel.root).context("a module outside of the kernel's folder")?;
                archive.copy(&path, &name.to_string_lossy())?;
            }
        }
    }
    let index = format!("lib/modules/{}", kernel.release);
    for file in ["modules.dep", "modules.alias", "modules.softdep", "modules.symbols", "modules.builtin"] {
        archive.copy(&kernel.root.join(&index).join(file), &format!("{index}/{file}"))?;
    }
    Ok(())
}

/// Returns the script of the guest's first process, whose output goes to the host. It starts the second processor, since a booting kernel
/// patches its own code, and in QEMU another processor that runs this code may panic (`Oops: int3`). It loads the modules before the tests:
/// busybox's `modprobe` does not wait for a module that the kernel is still loading, and calls that need the module then fail.
fn init(extent: Extent) -> String {
    let unit = if extent == Extent::Loading { LOADING } else { UNIT };
    format!(
        "#!/bin/sh\n\
         export PATH=/sbin:/usr/sbin:/usr/bin:/bin HOME=/root RUST_BACKTRACE=1\n\
         export SPILLWAY_BIN=/spillway SPILLWAY_SKIPS=/tmp/skips SPILLWAY_VERIFIED=/tmp/verified\n\
         export SPILLWAY_SLOWNESS=6 SPILLWAY_FUZZ_CASES=1000\n\
         mount -t proc proc /proc\nmount -t sysfs sys /sys\nmount -t devtmpfs dev /dev\n\
         mount -t tmpfs tmp /tmp\nmount -t tmpfs run /run\nmount -t bpf bpf /sys/fs/bpf\nln -s /run /var/run\n\
         mkdir -p /run/netns /root\n\
         echo 1 > /sys/devices/system/cpu/cpu1/online\n\
         for module in {}; do modprobe -q $module; done\n\
         /sbin/ip link set lo up\n\
         cd /tmp\n\
         /unit {} {}\nif [ -x /e2e ]; then /e2e {}; fi\n\
         cat /tmp/skips /tmp/verified\n\
         echo GUEST END\n\
         reboot -f\n",
        MODULES.join(" "),
        unit.join(" "),
        OPTIONS.join(" "),
        END_TO_END.join(" ")
    )
}

fn qemu(vmlinux: &Path, initrd: &Path) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-M", "pc", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", PROCESSORS, "-m", MEMORY]);
    command.args(["-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"]);
    command.arg("-kernel").arg(vmlinux).arg("-initrd").arg(initrd);
    command.args(["-append", "console=ttyS0 quiet panic=-1 no_timer_check maxcpus=1 rdinit=/init"]);
    command
}
