//! Makes a guest's file system: a folder, packed as a cpio archive that the kernel unpacks into memory.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// A file system in the making, as a folder.
pub struct Initramfs {
    root: PathBuf,
}

impl Initramfs {
    /// Creates a file system with these empty directories. Empties the folder first.
    pub fn new(root: &Path, directories: &[&str]) -> Result<Self> {
        if root.exists() {
            fs::remove_dir_all(root).with_context(|| format!("cannot empty {}", root.display()))?;
        }
        for name in directories {
            fs::create_dir_all(root.join(name)).with_context(|| format!("cannot make {name}"))?;
        }
        Ok(Self { root: root.to_owned() })
    }

    /// Returns the path of a file, and creates its directories.
    fn place(&self, name: &str) -> Result<PathBuf> {
        let path = self.root.join(name.trim_start_matches('/'));
        let folder = path.parent().unwrap_or(&self.root);
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(path)
    }

    /// Adds an executable script with this text.
    pub fn script(&self, name: &str, text: &str) -> Result<()> {
        let path = self.place(name)?;
        fs::write(&path, text).and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o755)))?;
        Ok(())
    }

    /// Adds a symbolic link.
    pub fn link(&self, name: &str, target: &str) -> Result<()> {
        symlink(target, self.place(name)?).with_context(|| format!("cannot link {name}"))
    }

    /// Copies a file of this machine to `name`.
    pub fn copy(&self, from: &Path, name: &str) -> Result<()> {
        fs::copy(from, self.place(name)?).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(())
    }

    /// Copies a program of this machine to `name`, and its shared libraries to their own paths.
    pub fn program(&self, from: &Path, name: &str) -> Result<()> {
        self.copy(from, name)?;
        let output = Command::new("ldd").arg(from).output().context("cannot run ldd")?;
        for library in libraries(&String::from_utf8_lossy(&output.stdout)) {
            self.copy(Path::new(library), library)?;
        }
        Ok(())
    }

    /// Writes the archive and removes the folder.
    pub fn pack(self, archive: &Path) -> Result<()> {
        let mut command = Command::new("sh");
        command.args(["-c", "find . | busybox cpio -o -H newc"]).current_dir(&self.root);
        let output = File::create(archive).with_context(|| format!("cannot write {}", archive.display()))?;
        if !command.stdout(output).status().context("cannot run sh")?.success() {
            bail!("cpio failed for {}", self.root.display());
        }
        fs::remove_dir_all(&self.root).with_context(|| format!("cannot remove {}", self.root.display()))
    }
}

/// Returns the paths in the output of ldd: `NAME => PATH (ADDRESS)`, or only the loader's path.
fn libraries(ldd: &str) -> impl Iterator<Item = &str> {
    ldd.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
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
    fn file_system_has_empty_directories_and_the_directories_of_its_files() {
        let root = std::env::temp_dir().join(format!("xtask-initramfs-{}", std::process::id()));
        let made = Initramfs::new(&root, &["proc"]).unwrap();
        made.link("bin/sh", "busybox").unwrap();
        made.script("/init", "#!/bin/sh\n").unwrap();
        assert!(root.join("proc").is_dir());
        assert_eq!(fs::read_link(root.join("bin/sh")).unwrap(), Path::new("busybox"));
        assert_eq!(fs::metadata(root.join("init")).unwrap().permissions().mode() & 0o777, 0o755);
        fs::remove_dir_all(&root).unwrap();
    }
}
