//! Attaches the programs: with pinned TCX links, or on kernels before 6.6 as filters of a clsact qdisc. Either way they stay attached when
//! the agent ends, and the next agent replaces them without a gap.

use super::{
    Pins,
    filters::{Filter, filters},
    load::{LoadError, NATIVE, PROGRAMS, Programs},
    native, tcx,
};
use aya::programs::{
    LinkOrder, ProgramError, SchedClassifier, TcAttachType,
    links::{FdLink, PinnedLink},
    tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs, io,
    path::{Path, PathBuf},
};
use thiserror::Error;

/// Priority of our filters at a clsact qdisc: before all others.
const FIRST: u16 = 1;
/// Priority of our filters if a foreign filter is the first and its priority cannot be shared.
const LATER: u16 = 0x53;
/// Handles of our filters. Within a priority the newest filter runs first: a filter is added with the free handle to become first again.
const HANDLES: [u32; 2] = [0x5350, 0x5351];

/// How programs are attached on this kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// TCX links (Linux 6.6).
    Tcx,
    /// Filters of a clsact qdisc.
    Clsact,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Tcx => "tcx",
            Mode::Clsact => "clsact",
        })
    }
}

/// A hook: program, and index of the interface.
pub type Hook = (&'static str, u32);

/// The direction that a program is attached for.
pub fn direction(program: &str) -> TcAttachType {
    if is_egress(program) { TcAttachType::Egress } else { TcAttachType::Ingress }
}

fn is_egress(program: &str) -> bool {
    matches!(program, "pod_ingress" | "exit_egress")
}

/// Why a program is not attached.
#[derive(Debug, Error)]
#[error("{program} is not attached to {interface}: {source}")]
pub struct AttachError {
    /// The program.
    pub program: &'static str,
    /// The interface.
    pub interface: String,
    /// What failed.
    pub source: Failure,
}

/// What failed while attaching.
#[derive(Debug, Error)]
pub enum Failure {
    /// The program cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The kernel refused.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The link cannot be pinned.
    #[error("its link cannot be pinned: {0}")]
    Pin(String),
    /// Another filter comes first.
    #[error(
        "a filter of kind {kind} with priority {priority} comes before it and may end the chain: give that filter a higher priority number (tc filter)"
    )]
    Behind {
        /// The kind of the other filter.
        kind: String,
        /// Its priority.
        priority: u16,
    },
    /// The qdisc cannot be made.
    #[error("no clsact qdisc: {0}")]
    Qdisc(#[from] tc::TcError),
    /// Another error of the system.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The programs and where they are attached.
pub struct Attacher {
    programs: Programs,
    pins: Pins,
    mode: Mode,
    attached: BTreeMap<Hook, String>,
    /// The programs of a trace, and the pod's interface (0: any).
    traced: Option<(Programs, u32)>,
    /// Whether this agent has looked for filters that an earlier agent left.
    swept: bool,
}

impl Attacher {
    /// Attaches nothing yet. Programs that an earlier agent attached keep running, and the first [`sync`](Self::sync) takes them over.
    pub fn new(programs: Programs, pins: Pins, mode: Mode) -> Self {
        Self { programs, pins, mode, attached: BTreeMap::new(), traced: None, swept: false }
    }

    /// How programs are attached.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the kernel's ids of our loaded programs.
    pub fn programs(&self) -> BTreeSet<u32> {
        let sets = std::iter::once(&self.programs).chain(self.traced.as_ref().map(|(programs, _)| programs));
        sets.flat_map(|set| PROGRAMS.into_iter().chain(NATIVE).filter_map(|name| set.id(name))).collect()
    }

    /// Replaces the usual programs with those of a trace at every hook that packets of the pod behind this interface pass (0: any
    /// interface). `None` restores the usual programs, and so does dropping this value.
    pub fn trace(&mut self, traced: Option<(Programs, u32)>) -> Vec<AttachError> {
        let before = std::mem::replace(&mut self.traced, traced);
        let pods: Vec<u32> = [&before, &self.traced].into_iter().flatten().map(|(_, pod)| *pod).collect();
        let concerned = |hook: &Hook| pods.iter().any(|pod| is_passed(*hook, *pod));
        let hooks: Vec<_> = self.attached.clone().into_iter().filter(|(hook, _)| concerned(hook)).collect();
        hooks.into_iter().filter_map(|(hook, interface)| self.attach_to(hook, interface)).collect()
    }

    /// Attaches to a hook. Returns the error on failure.
    fn attach_to(&mut self, hook: Hook, interface: String) -> Option<AttachError> {
        match self.attach(hook, &interface) {
            Ok(()) => {
                self.attached.insert(hook, interface);
                None
            }
            Err(source) => {
                self.attached.remove(&hook);
                Some(AttachError { program: hook.0, interface, source })
            }
        }
    }

    /// Returns the set of programs from which the hook gets its program.
    fn programs_for(&mut self, hook: Hook) -> &mut Programs {
        match &mut self.traced {
            Some((programs, pod)) if is_passed(hook, *pod) => programs,
            _ => &mut self.programs,
        }
    }

    /// Returns the directories of the pins.
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Returns the hooks that hold one of our programs, with the interface's name.
    pub fn attached(&self) -> &BTreeMap<Hook, String> {
        &self.attached
    }

    /// Attaches to every hook in `wanted` (with the interface's name), and detaches our programs from all others. `live` holds the names of
    /// the existing interfaces by index: programs at other interfaces are already gone. With `verify`, checks that attached programs are
    /// still attached.
    pub fn sync(
        &mut self,
        wanted: &BTreeMap<Hook, String>,
        live: &BTreeMap<u32, String>,
        verify: bool,
    ) -> Vec<AttachError> {
        let mut errors = Vec::new();
        for (hook, interface) in wanted {
            if self.attached.get(hook) == Some(interface) && (!verify || self.holds(*hook, interface)) {
                continue;
            }
            errors.extend(self.attach_to(*hook, interface.clone()));
        }
        let gone: Vec<Hook> = self.attached.keys().filter(|h| !wanted.contains_key(*h)).copied().collect();
        self.attached.retain(|hook, _| wanted.contains_key(hook));
        if self.mode == Mode::Clsact {
            self.drop_filters(wanted, live, gone);
        }
        self.drop_pins(wanted);
        errors
    }

    /// Removes the filters of unwanted hooks: those of `gone`, or on the first call, all that an earlier agent may have left on any
    /// interface.
    fn drop_filters(&mut self, wanted: &BTreeMap<Hook, String>, live: &BTreeMap<u32, String>, gone: Vec<Hook>) {
        // Our filters of one direction of an interface share their handles: if another program is wanted there, they are its filters.
        let sides: BTreeSet<(bool, u32)> = wanted.keys().map(|(program, i)| (is_egress(program), *i)).collect();
        let everywhere = live.keys().flat_map(|i| [("pod_egress", *i), ("pod_ingress", *i)]);
        let suspects = if std::mem::replace(&mut self.swept, true) { gone } else { everywhere.collect() };
        for (program, index) in suspects.into_iter().filter(|hook| !NATIVE.contains(&hook.0)) {
            if let Some(interface) = live.get(&index)
                && !sides.contains(&(is_egress(program), index))
            {
                detach_filter(program, interface);
            }
        }
    }

    /// Returns whether our program is still at the hook, before all others: anybody may delete a qdisc, detach a link or put another
    /// program first.
    fn holds(&mut self, (program, index): Hook, interface: &str) -> bool {
        let Some(id) = self.programs_for((program, index)).id(program) else { return false };
        if NATIVE.contains(&program) {
            return native::is_at(id, index);
        }
        match self.mode {
            // A program before ours may end the chain.
            Mode::Tcx => first_tcx(interface, direction(program)) == Some(id),
            Mode::Clsact => {
                let all = filters(interface, direction(program)).unwrap_or_default();
                all.first().is_some_and(|first| is_ours(first) && first.program == Some(id))
            }
        }
    }

    fn pin(&self, (program, interface): Hook) -> PathBuf {
        self.pins.links().join(format!("{program}-{interface}"))
    }

    /// Removes the pins of hooks that are not wanted, which detaches their programs.
    fn drop_pins(&self, wanted: &BTreeMap<Hook, String>) {
        let keep: BTreeSet<PathBuf> = wanted.keys().map(|h| self.pin(*h)).collect();
        let Ok(entries) = fs::read_dir(self.pins.links()) else { return };
        for path in entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| !keep.contains(p)) {
            if let Err(e) = fs::remove_file(&path) {
                tracing::warn!("{}: {e}", path.display());
            }
        }
    }

    fn attach(&mut self, hook: Hook, interface: &str) -> Result<(), Failure> {
        let pin = self.pin(hook);
        if NATIVE.contains(&hook.0) {
            return native::attach(self.programs.native(hook.0)?, &pin, hook.1);
        }
        let mode = self.mode;
        let program = self.programs_for(hook).get(hook.0)?;
        match mode {
            Mode::Tcx => attach_tcx(program, &pin, interface, direction(hook.0)),
            Mode::Clsact => attach_filter(program, interface, direction(hook.0)),
        }
    }
}

impl Drop for Attacher {
    fn drop(&mut self) {
        for error in self.trace(None) {
            tracing::warn!("{error}");
        }
    }
}

/// Returns whether packets of the pod behind this interface (0: any) pass the hook. Hooks at drivers do not count.
fn is_passed((program, index): Hook, pod: u32) -> bool {
    !NATIVE.contains(&program) && (pod == 0 || index == pod || !program.starts_with("pod_"))
}

/// Replaces the program of the pinned link, or makes and pins a link that runs before all others at the hook.
fn attach_tcx(
    program: &mut SchedClassifier,
    pin: &Path,
    interface: &str,
    direction: TcAttachType,
) -> Result<(), Failure> {
    if let Ok(pinned) = PinnedLink::from_pin(pin) {
        let replaced = SchedClassifierLink::try_from(FdLink::from(pinned))
            .map_err(|e| Failure::Pin(e.to_string()))
            .and_then(|link| Ok(program.attach_to_link(link)?));
        if let Ok(id) = replaced {
            // The pin keeps the link alive.
            drop(program.take_link(id)?);
            let own = program.info()?.id();
            match first_tcx(interface, direction) {
                Some(first) if first != own => {
                    tracing::warn!("program {first} was ahead of ours at {interface}: moving ours to the front");
                }
                _ => return Ok(()),
            }
        }
        // The link's interface is gone and another one has its index, somebody has detached the link, or it is not the first. A link cannot
        // be moved.
        fs::remove_file(pin)?;
    }
    let id = program.attach_with_options(interface, direction, TcAttachOptions::TcxOrder(LinkOrder::first()))?;
    let link = FdLink::try_from(program.take_link(id)?).map_err(|e| Failure::Pin(e.to_string()))?;
    link.pin(pin).map_err(|e| Failure::Pin(e.to_string()))?;
    Ok(())
}

/// Returns the id of the program that sees packets first, if TCX runs any program there.
fn first_tcx(interface: &str, direction: TcAttachType) -> Option<u32> {
    let index = nix::net::if_::if_nametoindex(interface).ok()?;
    tcx::programs(index, direction).ok()?.first().copied()
}

/// Returns whether a filter is one of ours.
fn is_ours(filter: &Filter) -> bool {
    filter.kind == "bpf" && HANDLES.contains(&filter.handle)
}

/// Makes our program the first one. Replaces our filter's program if the filter is first; otherwise adds a filter before all others and
/// removes the old one. If a foreign filter still comes first, ours is attached after it, and that is an error.
fn attach_filter(program: &mut SchedClassifier, interface: &str, direction: TcAttachType) -> Result<(), Failure> {
    match tc::qdisc_add_clsact(interface) {
        Ok(()) | Err(tc::TcError::AlreadyAttached) => {}
        Err(tc::TcError::NetlinkError(e)) if e.raw_os_error() == Some(libc::EEXIST) => {}
        Err(e) => return Err(e.into()),
    }
    let before = filters(interface, direction)?;
    if let Some(first) = before.first().filter(|first| is_ours(first)) {
        return replace(program, interface, direction, first);
    }
    let used = |handle: &&u32| before.iter().any(|f| (f.priority, f.handle) == (FIRST, **handle));
    let free = HANDLES.iter().find(|handle| !used(handle)).unwrap_or(&HANDLES[0]);
    match add(program, interface, direction, FIRST, *free) {
        Ok(()) => {}
        // The first filter is of another kind or protocol, so its priority cannot be shared.
        Err(_) => match before.iter().find(|filter| is_ours(filter)) {
            Some(filter) => replace(program, interface, direction, filter)?,
            None => add(program, interface, direction, LATER, HANDLES[0])?,
        },
    }
    let after = filters(interface, direction)?;
    for filter in after.iter().skip(1).filter(|_| after.first().is_some_and(is_ours)).filter(|filter| is_ours(filter)) {
        remove(interface, direction, filter);
    }
    match after.first() {
        Some(first) if !is_ours(first) => Err(Failure::Behind { kind: first.kind.clone(), priority: first.priority }),
        _ => Ok(()),
    }
}

fn add(
    program: &mut SchedClassifier,
    interface: &str,
    direction: TcAttachType,
    priority: u16,
    handle: u32,
) -> Result<(), Failure> {
    let options = NlOptions { priority, handle: TcHandle::from(handle), ..NlOptions::default() };
    let id = program.attach_with_options(interface, direction, TcAttachOptions::Netlink(options))?;
    // Dropping the link would remove the filter.
    std::mem::forget(program.take_link(id)?);
    Ok(())
}

fn replace(
    program: &mut SchedClassifier,
    interface: &str,
    direction: TcAttachType,
    filter: &Filter,
) -> Result<(), Failure> {
    let handle = TcHandle::from(filter.handle);
    let link = SchedClassifierLink::attached(interface, direction, filter.priority, handle, None)?;
    let id = program.attach_to_link(link)?;
    std::mem::forget(program.take_link(id)?);
    Ok(())
}

fn remove(interface: &str, direction: TcAttachType, filter: &Filter) {
    let handle = TcHandle::from(filter.handle);
    // Dropping a link detaches it; an error means that the filter was not there.
    drop(SchedClassifierLink::attached(interface, direction, filter.priority, handle, None));
}

/// Removes our filters from one direction of an interface, if there are any.
pub fn detach_filter(program: &str, interface: &str) {
    let direction = direction(program);
    // Without the qdisc there are no filters.
    for filter in filters(interface, direction).unwrap_or_default().iter().filter(|filter| is_ours(filter)) {
        remove(interface, direction, filter);
    }
}

/// Returns the mode that this kernel supports. Queries TCX at the loopback device, which always exists.
pub fn mode() -> Mode {
    match tcx::programs(1, TcAttachType::Ingress) {
        Ok(_) => Mode::Tcx,
        Err(_) => Mode::Clsact,
    }
}
