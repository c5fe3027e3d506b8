//! Builds the eBPF programs from source and names the objects for the library to embed:
//! `aya::include_bytes_aligned!(env!("SPILLWAY_EBPF_OBJECT"))`, and `SPILLWAY_TRACE_OBJECT` for the programs of a trace.
//! `SPILLWAY_EBPF_TARGET` names the folder with their compiled dependencies, for a test that builds changed programs.

use object::build::elf::{Builder, SectionData};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs, io};

#[allow(dead_code, reason = "shared with xtask, which uses the rest")]
#[path = "../xtask/src/toolchain.rs"]
mod toolchain;

use toolchain::{BPF_TARGET, Toolchain};

const PACKAGE: &str = "egress-ebpf";
const BINARY: &str = "spillway";

fn main() -> ExitCode {
    match build() {
        Ok([usual, trace]) => {
            println!("cargo::rustc-env=SPILLWAY_EBPF_OBJECT={}", usual.display());
            println!("cargo::rustc-env=SPILLWAY_TRACE_OBJECT={}", trace.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("cargo::error={}", error.lines().next().unwrap_or_default());
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<[PathBuf; 2], String> {
    let manifest_dir = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let workspace = manifest_dir.parent().ok_or("egress-node is not in a workspace")?;
    for input in ["egress-ebpf", "egress-common", "Cargo.toml", "xtask/src/toolchain.rs"] {
        println!("cargo::rerun-if-changed={}", workspace.join(input).display());
    }
    let toolchain = Toolchain::find().map_err(|missing| missing.to_string())?;
    println!("cargo::rerun-if-changed={}", toolchain.linker.display());

    let out_dir = PathBuf::from(variable("OUT_DIR")?);
    let target_dir = target_dir(&out_dir);
    println!("cargo::rustc-env=SPILLWAY_EBPF_TARGET={}", target_dir.display());
    let object = |features: &[&str], name| object(&toolchain, workspace, features, &target_dir, &out_dir.join(name));
    Ok([object(&[], "spillway.bpf.o")?, object(&["--features", "trace"], "trace.bpf.o")?])
}

/// Builds one object in `target_dir` and copies it to `to`, because cargo gives both objects the same name.
fn object(
    toolchain: &Toolchain,
    workspace: &Path,
    features: &[&str],
    target_dir: &Path,
    to: &Path,
) -> Result<PathBuf, String> {
    let output = toolchain
        .cargo("build")
        .args(["--quiet", "--release", "--package", PACKAGE, "--bin", BINARY])
        .args(features)
        .arg("--manifest-path")
        .arg(workspace.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(target_dir)
        .output()
        .map_err(|error| format!("{} cannot be run: {error}", toolchain.rust.cargo.display()))?;
    let messages = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!(
            "{PACKAGE} does not build with {} and {}:\n{messages}",
            toolchain.rust.rustc.display(),
            toolchain.linker.display()
        ));
    }
    for line in messages.lines().skip_while(|line| !line.starts_with("warning")) {
        println!("cargo::warning={line}");
    }
    let built = target_dir.join(BPF_TARGET).join("release").join(BINARY);
    copy_if_changed(&built, to).map_err(|error| format!("the object {} cannot be copied: {error}", built.display()))
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("{name}: {error}; build.rs runs under cargo only"))
}

/// Returns the build folder of the programs, which all profiles share: `ebpf` in cargo's target folder, the ancestor of OUT_DIR that cargo
/// tags as a cache.
fn target_dir(out_dir: &Path) -> PathBuf {
    let target = out_dir.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists());
    target.unwrap_or(out_dir).join("ebpf")
}

/// Strips debug information, which is most of an object and would otherwise stay in the memory of every process.
fn without_debug_info(object: &[u8]) -> io::Result<Vec<u8>> {
    let error = |error: object::build::Error| io::Error::other(error.to_string());
    let mut builder = Builder::read(object).map_err(error)?;
    for section in builder.sections.iter_mut() {
        section.delete = [&b".debug_"[..], b".rel.debug_"].iter().any(|name| section.name.starts_with(name));
    }
    builder.delete_orphans();
    // LLVM keeps the names of sections and symbols in one table.
    let names = builder.sections.add();
    names.name = b".shstrtab"[..].into();
    (names.sh_type, names.data) = (object::elf::SHT_STRTAB, SectionData::SectionString);
    let mut stripped = Vec::new();
    builder.write(&mut stripped).map_err(error)?;
    Ok(stripped)
}

/// Copies an object without its debug information. An unchanged object keeps its timestamp, so the library is not recompiled needlessly.
fn copy_if_changed(from: &Path, to: &Path) -> io::Result<PathBuf> {
    let object = without_debug_info(&fs::read(from)?)?;
    if fs::read(to).ok().as_ref() != Some(&object) {
        fs::write(to, object)?;
    }
    Ok(to.to_owned())
}
