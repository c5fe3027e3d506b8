//! Loads the programs, with their maps pinned so that they outlive the agent.

use super::{Pins, grown};
use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    maps::MapInfo,
    programs::{Program, ProgramError, SchedClassifier, TestRun as _, TestRunOptions, Xdp},
    util::KernelVersion,
};
use egress_common::{abi::LAYOUT_VERSION, config::flags, limits, trace::TraceFilter};
use nix::{
    errno::Errno,
    time::{ClockId, clock_getres},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};
use thiserror::Error;

/// The objects that `build.rs` has built: the usual programs, and the programs of a trace, which report their decisions.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("SPILLWAY_EBPF_OBJECT"));
static TRACE_OBJECT: &[u8] = aya::include_bytes_aligned!(env!("SPILLWAY_TRACE_OBJECT"));

/// The programs that are attached to interfaces.
pub const PROGRAMS: [&str; 7] = [
    "pod_egress",
    "pod_ingress",
    "tunnel_ingress",
    "exit_egress",
    "uplink_ingress",
    "underlay_ingress",
    "shaper_ingress",
];
/// The programs at the drivers of a gateway's underlay and uplinks, which run before those at TC.
pub const NATIVE: [&str; 2] = ["underlay_xdp", "uplink_xdp"];
/// The program of [`PROGRAMS`] that most nodes never need. Like [`NATIVE`], it is loaded when it is first attached.
const ON_DEMAND: &str = "shaper_ingress";
/// The number of attempts to load a program: the verifier gives up (`EAGAIN`) when a signal arrives. libbpf makes as many.
const LOAD_ATTEMPTS: usize = 5;
/// The program that is run once to arm the collector's timer.
const COLLECTOR: &str = "start_collector";
/// The number of attempts to start the collector, and the pause between them: the kernel allocates the timer's memory without waiting
/// (`kmalloc_nolock`, since Linux 6.18), and may find none at that moment.
const COLLECTOR_ATTEMPTS: usize = 100;
const COLLECTOR_PAUSE: Duration = Duration::from_millis(10);
/// The ring buffer that reports beginnings and ends of flows.
pub const EVENTS: &str = "FLOW_EVENTS";
/// The ring buffer of the lines that a trace's programs report. Maps that only these programs have are not pinned.
const TRACE_LINES: &str = "AYA_LOGS";
/// The count of packets that were to be reported.
pub const TRACE_SEEN: &str = "TRACE_SEEN";
const TRACE_NOTES: &str = "TRACE_NOTES";
/// The program that is run once to learn whether merged packets can be stripped of their outer header.
const DECAPSULATION: &str = "try_decapsulation";

/// Sizes of the maps that the user may choose.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Flows per address family.
    pub max_flows: u32,
    /// Size in bytes of the buffer that reports beginnings and ends of flows (`flowLog.mode: Flows`); 0: nothing is reported.
    pub flow_events: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { max_flows: limits::MAX_FLOWS as u32, flow_events: 0 }
    }
}

impl Sizes {
    /// Returns the size in bytes of the buffer to create.
    fn events_room(self) -> u32 {
        self.flow_events.max(limits::FLOW_EVENTS_UNUSED as u32)
    }
}

/// Returns how to get rid of pinned maps that this version cannot use. `cleanup` needs `--release`, because it may be unable to tell from
/// them which pods are selected.
pub fn remedy(root: &Path) -> String {
    let root = root.display();
    format!(
        "drain the node, run `egress-daemon cleanup --release --bpffs {root}` and start the agent again. Established connections through \
         Spillway on this node end, and packets of selected pods still on it leave with the node's address meanwhile"
    )
}

/// Why the datapath cannot be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// No BPF file system.
    #[error(
        "{path} is not on a BPF file system: mount one (`mount -t bpf bpf /sys/fs/bpf`) or name another directory with --bpffs"
    )]
    NotBpffs {
        /// The directory.
        path: PathBuf,
    },
    /// A directory cannot be made or read.
    #[error("{path}: {source}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Maps of another version of the layout.
    #[error(
        "{path} holds maps with a layout other than this agent's v{LAYOUT_VERSION}: stop the agent that created them, {}",
        remedy(root)
    )]
    OtherVersion {
        /// The directory of the other version.
        path: PathBuf,
        /// The directory of all versions.
        root: PathBuf,
    },
    /// A pinned map has another shape than the programs expect.
    #[error("{path} is a map with {found}, but the programs expect {wanted}: {}", remedy(root))]
    OtherShape {
        /// The pin.
        path: PathBuf,
        /// The directory of all versions.
        root: PathBuf,
        /// The actual shape.
        found: String,
        /// The expected shape.
        wanted: String,
    },
    /// The entries of an older version's map cannot be copied.
    #[error(
        "the entries of {path}, which an older version made, cannot be carried over: {source}. Start the agent again; if that fails too, {}",
        remedy(root)
    )]
    NotCarriedOver {
        /// The older map's pin.
        path: PathBuf,
        /// The directory of all versions.
        root: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The object cannot be parsed.
    #[error("the built-in eBPF object: {0}")]
    Object(String),
    /// The kernel refuses the maps or a program.
    #[error("the kernel refuses the eBPF object: {0} (run `egress-daemon check` to see what is missing)")]
    Ebpf(#[from] aya::EbpfError),
    /// The kernel refuses a program.
    #[error("the kernel refuses program {program}: {source}")]
    Program {
        /// Its name.
        program: &'static str,
        /// The kernel's error, with the verifier's log.
        source: ProgramError,
    },
    /// The kernel does not report the length of its ticks.
    #[error("the kernel does not report the resolution of CLOCK_MONOTONIC_COARSE: {0}")]
    Clock(Errno),
    /// The collector's timer was not armed.
    #[error("the garbage collector cannot be started: {0}")]
    Collector(Errno),
}

/// The magic number of a BPF file system (`BPF_FS_MAGIC`).
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// Creates the pins' directories, and checks what exists already.
fn prepare(pins: &Pins) -> Result<(), LoadError> {
    for dir in [pins.root().to_path_buf(), pins.version(), pins.maps(), pins.links()] {
        // Before anything is created, so that nothing of ours stays on another file system. `sysfs` would only return errors.
        if !is_on_bpffs(&dir) {
            return Err(LoadError::NotBpffs { path: dir });
        }
        fs::create_dir_all(&dir).map_err(|source| LoadError::Directory { path: dir.clone(), source })?;
    }
    let root = pins.root().to_path_buf();
    let entries = fs::read_dir(&root).map_err(|source| LoadError::Directory { path: root.clone(), source })?;
    let mut others: Vec<_> = entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| *p != pins.version()).collect();
    others.sort();
    match others.into_iter().find(|p| is_version(p)) {
        Some(path) => Err(LoadError::OtherVersion { path, root }),
        None => Ok(()),
    }
}

/// Returns whether a directory is on a BPF file system, or would be if it were created.
fn is_on_bpffs(dir: &std::path::Path) -> bool {
    let present = dir.ancestors().find(|ancestor| ancestor.exists());
    let magic = present.map(|ancestor| nix::sys::statfs::statfs(ancestor).map(|s| s.filesystem_type().0));
    magic == Some(Ok(BPF_FS_MAGIC))
}

/// Returns whether a directory has the name of a layout version: `v` and a number.
fn is_version(path: &std::path::Path) -> bool {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    name.strip_prefix('v').is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Returns whether a buffer of this size for beginnings and ends of flows is pinned. Removes a buffer of another size, which was created
/// under another mode of the log.
fn keep_events(pins: &Pins, room: u32) -> Result<bool, LoadError> {
    let path = pins.map(EVENTS);
    match MapInfo::from_pin(&path) {
        Ok(info) if info.max_entries() == room => Ok(true),
        Ok(_) => fs::remove_file(&path).map(|()| false).map_err(|source| LoadError::Directory { path, source }),
        Err(_) => Ok(false),
    }
}

/// Returns the flags of the settings ([`flags`]) that follow from this kernel's version.
pub fn config_flags() -> u32 {
    match KernelVersion::current() {
        Ok(version) if version >= KernelVersion::new(6, 16, 0) => flags::CSUM_IPV6,
        _ => 0,
    }
}

/// Returns the length of a jiffy in ns: the resolution of the coarse clocks.
fn jiffy_ns() -> Result<u64, LoadError> {
    let step = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).map_err(LoadError::Clock)?;
    Ok(Duration::from(step).as_nanos() as u64)
}

fn parse(object: &[u8]) -> Result<aya_obj::Object, LoadError> {
    aya_obj::Object::parse(object).map_err(|e| LoadError::Object(e.to_string()))
}

/// Creates an object's maps, or opens the pinned ones. `object` is `bytes` parsed; it is dropped before the loader parses them again.
fn open(
    bytes: &[u8],
    object: aya_obj::Object,
    pins: &Pins,
    sizes: Sizes,
    filter: Option<&TraceFilter>,
) -> Result<Ebpf, LoadError> {
    let own = [TRACE_LINES, TRACE_SEEN, TRACE_NOTES];
    let pinned = |name: &String| !name.starts_with('.') && !own.contains(&name.as_str());
    let names: Vec<String> = object.maps.into_keys().filter(pinned).collect();
    let mut loader = EbpfLoader::new();
    // The programs do not refer to the kernel's types, which take 26 MiB.
    loader.btf(None);
    loader.verifier_log_level(VerifierLogLevel::STATS);
    for name in &names {
        loader.map_pin_path(name, pins.map(name));
    }
    let older = grown::room(pins)?;
    for name in ["FLOWS_V4", "FLOWS_V6", "REVERSE_V4", "REVERSE_V6", "ENDED_V4", "ENDED_V6"] {
        loader.map_max_entries(name, sizes.max_flows.max(older.get(name).copied().unwrap_or(0)));
    }
    for name in ["TICKETS_V4", "TICKETS_V6"] {
        loader.map_max_entries(name, sizes.max_flows.saturating_mul(2));
    }
    loader.map_max_entries(EVENTS, sizes.events_room());
    let log_flows = u32::from(sizes.flow_events != 0);
    loader.override_global("LOG_FLOWS", &log_flows, true);
    let jiffy = jiffy_ns()?;
    loader.override_global("JIFFY_NS", &jiffy, true);
    if let Some(filter) = filter {
        loader.override_global("TRACE_FILTER", filter, true);
    }
    Ok(loader.load(bytes)?)
}

/// The loaded programs. Dropping them detaches nothing: links and maps are pinned.
pub struct Programs {
    ebpf: Ebpf,
    /// Whether the buffer of beginnings and ends of flows is one that earlier programs have written to.
    kept_events: bool,
}

/// Returns free memory to the kernel: the kernel's and the object's types, which are read to load the programs, take 20 MiB, and glibc
/// keeps freed memory that lies below memory in use.
fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it only touches the allocator's own lists, under its locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

impl Programs {
    /// Loads the programs that every node needs against the pinned maps, which are created if missing, and arms the collector.
    /// [`get`](Self::get) and [`native`](Self::native) load the others: verification is most of an agent's start.
    ///
    /// Attached programs keep running until [`attach`](super::attach) replaces them.
    pub fn load(pins: &Pins, sizes: Sizes) -> Result<Self, LoadError> {
        Self::load_from(OBJECT, pins, sizes)
    }

    /// Does the same from any object: tests use an object of another version.
    pub(super) fn load_from(bytes: &[u8], pins: &Pins, sizes: Sizes) -> Result<Self, LoadError> {
        let mut programs = Self::open(bytes, pins, sizes)?;
        programs.load_usual()?;
        programs.begin(pins)
    }

    fn load_usual(&mut self) -> Result<(), LoadError> {
        PROGRAMS.into_iter().filter(|name| *name != ON_DEMAND).try_for_each(|name| self.load_one(name))
    }

    /// Does the same, but loads each program only when it is requested.
    #[cfg(any(test, feature = "testing"))]
    pub fn load_lazily(pins: &Pins, sizes: Sizes) -> Result<Self, LoadError> {
        Self::open(OBJECT, pins, sizes)?.begin(pins)
    }

    /// Creates the maps, or opens the pinned ones.
    fn open(bytes: &[u8], pins: &Pins, sizes: Sizes) -> Result<Self, LoadError> {
        prepare(pins)?;
        let object = parse(bytes)?;
        grown::set_aside(pins, &object)?;
        let kept_events = keep_events(pins, sizes.events_room())?;
        Ok(Self { ebpf: open(bytes, object, pins, sizes, None)?, kept_events })
    }

    fn begin(mut self, pins: &Pins) -> Result<Self, LoadError> {
        grown::carry_over(pins)?;
        self.start_collector()?;
        give_back();
        Ok(self)
    }

    /// Loads the programs of a trace, except those for drivers, against the same maps as [`load`](Self::load) with the same sizes. They
    /// report the packets that match `filter`.
    pub fn load_trace(pins: &Pins, sizes: Sizes, filter: &TraceFilter) -> Result<Self, LoadError> {
        let object = parse(TRACE_OBJECT)?;
        let ebpf = open(TRACE_OBJECT, object, pins, sizes, Some(filter))?;
        let mut programs = Self { ebpf, kept_events: true };
        programs.load_usual()?;
        // In a trace's object this only sets the clock.
        programs.start_collector()?;
        give_back();
        Ok(programs)
    }

    /// Returns the object, to take maps that are not pinned.
    pub(super) fn ebpf(&mut self) -> &mut Ebpf {
        &mut self.ebpf
    }

    /// Returns a program by name, and loads it if necessary.
    pub fn get(&mut self, program: &'static str) -> Result<&mut SchedClassifier, LoadError> {
        self.of_kind(program)
    }

    /// Returns a program for drivers by name, and loads it if necessary.
    pub fn native(&mut self, program: &'static str) -> Result<&mut Xdp, LoadError> {
        self.of_kind(program)
    }

    fn of_kind<P>(&mut self, program: &'static str) -> Result<&mut P, LoadError>
    where
        for<'a> &'a mut P: TryFrom<&'a mut Program, Error = ProgramError>,
    {
        if self.find(program)?.fd().is_err() {
            self.load_one(program)?;
        }
        self.find(program)?.try_into().map_err(|error: ProgramError| LoadError::Object(error.to_string()))
    }

    fn load_one(&mut self, program: &'static str) -> Result<(), LoadError> {
        let found = self.find(program)?;
        let mut load = || match &mut *found {
            Program::SchedClassifier(found) => found.load(),
            Program::Xdp(found) => found.load(),
            _ => Err(ProgramError::UnexpectedProgramType),
        };
        let mut loaded = load();
        for _ in 1..LOAD_ATTEMPTS {
            match &loaded {
                Err(ProgramError::LoadError { io_error, .. }) if io_error.kind() == io::ErrorKind::WouldBlock => {
                    loaded = load();
                }
                _ => break,
            }
        }
        loaded.map_err(|source| LoadError::Program { program, source })
    }

    fn find(&mut self, program: &'static str) -> Result<&mut Program, LoadError> {
        let missing = || LoadError::Object(format!("it has no program {program}"));
        self.ebpf.program_mut(program).ok_or_else(missing)
    }

    /// Returns the kernel's id of a program, if the program is loaded.
    pub fn id(&self, program: &str) -> Option<u32> {
        Some(self.ebpf.program(program)?.info().ok()?.id())
    }

    /// Returns whether beginnings and ends of flows have been reported continuously since an earlier agent read them.
    pub fn kept_events(&self) -> bool {
        self.kept_events
    }

    /// Returns the flags of the settings ([`flags`]) that follow from this kernel's abilities.
    pub fn kernel_flags(&mut self) -> u32 {
        let decap = self.try_run(DECAPSULATION).is_ok_and(|result| result == 0);
        config_flags() | if decap { flags::DECAP_UDP } else { 0 }
    }

    /// Runs a program once, with the smallest frame that the kernel accepts for it. Returns the program's result.
    fn try_run(&mut self, program: &'static str) -> Result<i32, LoadError> {
        let mut frame = [0u8; 64];
        // An IPv4 frame, so that it has a header that other headers can follow.
        (frame[12], frame[14]) = (8, 0x45);
        let options = TestRunOptions { data_in: Some(&frame), ..Default::default() };
        let result = self.get(program)?.test_run(options).map_err(|source| LoadError::Program { program, source })?;
        Ok(result.return_value as i32)
    }

    /// Runs the program that arms the timer. An earlier agent's timer continues with this agent's collector.
    pub(super) fn start_collector(&mut self) -> Result<(), LoadError> {
        let mut failure = Errno::ENOMEM;
        for _ in 0..COLLECTOR_ATTEMPTS {
            match self.try_run(COLLECTOR)? {
                0 => return Ok(()),
                error => failure = Errno::from_raw(-error),
            }
            if failure != Errno::ENOMEM {
                break;
            }
            thread::sleep(COLLECTOR_PAUSE);
        }
        Err(LoadError::Collector(failure))
    }
}
