//! The users' files on disk.

use super::Files;
use super::own;
use super::user::{Stamp, Texts};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The maximum depth of the directory that is followed.
const MAX_DEPTH: usize = 16;

/// Returns all users' files, relative to the directory, except hidden files. Calls `meet` for each directory before its contents are read.
pub(super) fn listing(directory: &Path, meet: &mut dyn FnMut(&Path)) -> io::Result<BTreeMap<PathBuf, Stamp>> {
    fn walk(
        root: &Path,
        directory: &Path,
        depth: usize,
        meet: &mut dyn FnMut(&Path),
        found: &mut BTreeMap<PathBuf, Stamp>,
    ) -> io::Result<()> {
        meet(directory);
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_name().to_string_lossy().starts_with('.') {
                continue;
            }
            // A file that vanishes meanwhile counts as absent.
            let Ok(metadata) = fs::metadata(&path) else { continue };
            if metadata.is_dir() && depth < MAX_DEPTH {
                match walk(root, &path, depth + 1, meet, found) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    walked => walked?,
                }
            } else if metadata.is_file()
                && path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
                && let Ok(stamp) = own::stamp(&path)
            {
                found.insert(path.strip_prefix(root).unwrap_or(&path).to_owned(), stamp);
            }
        }
        Ok(())
    }
    let mut found = BTreeMap::new();
    walk(directory, directory, 0, meet, &mut found)?;
    Ok(found)
}

/// The files on disk.
pub(super) struct Disk<'a>(pub(super) &'a Files);

impl Texts for Disk<'_> {
    fn read(&self, file: &Path) -> io::Result<(Vec<u8>, Stamp)> {
        let path = self.0.directory.join(file);
        let text = fs::read(&path)?;
        Ok((text, own::stamp(&path)?))
    }

    fn last_good(&self, file: &Path) -> Option<Vec<u8>> {
        fs::read(self.0.own.good_path(file)).ok()
    }

    fn keep_good(&self, file: &Path, text: Option<&[u8]>) {
        let path = self.0.own.good_path(file);
        let kept = match text {
            Some(text) if fs::read(&path).is_ok_and(|kept| kept == text) => Ok(()),
            Some(text) => self.0.own.replace(&path, text),
            None => fs::remove_file(&path),
        };
        if let Err(error) = kept.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) }) {
            tracing::warn!(file = %file.display(), %error, "cannot keep the last good version across restarts");
        }
    }
}
