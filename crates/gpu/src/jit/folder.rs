//! Cache folder, opened once and checked: only this user or root can have written the entries.
//!
//! Entries are opened relative to the descriptor, so a folder that is renamed or replaced meanwhile has no effect.

use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, open, openat, renameat, unlinkat};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

/// Open folder to which only this user or root can write.
pub(super) struct Folder {
    path: PathBuf,
    descriptor: OwnedFd,
}

impl Folder {
    /// Opens an existing folder.
    ///
    /// # Errors
    /// The system's; `PermissionDenied` for a folder that another user can write.
    pub(super) fn open(path: &Path) -> io::Result<Folder> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptor = open(path, flags, Mode::empty())?;
        if let Some(problem) = foreign(&fstat(&descriptor)?) {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
        }
        Ok(Folder { path: path.to_owned(), descriptor })
    }

    /// Opens a folder, which is created if necessary, with access for this user only.
    ///
    /// # Errors
    /// As [`Folder::open`].
    pub(super) fn create(path: &Path) -> io::Result<Folder> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Folder::open(path)
    }

    /// Path by which it was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens an entry for reading: a regular file that no other user can have written.
    ///
    /// # Errors
    /// System errors; `InvalidData` for another entry type, such as a symbolic link.
    pub(super) fn read(&self, name: &str) -> io::Result<File> {
        let invalid = |problem: String| io::Error::new(io::ErrorKind::InvalidData, problem);
        // Opening a FIFO does not block; a symbolic link is not followed.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&self.descriptor, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(rustix::io::Errno::LOOP) => return Err(invalid("a symbolic link".into())),
            Err(error) => return Err(error.into()),
        };
        let found = fstat(&file)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(invalid("not a file".into()));
        }
        match foreign(&found) {
            Some(problem) => Err(invalid(problem)),
            None => Ok(file.into()),
        }
    }

    /// Opens a file for writing, with further flags.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn write(&self, name: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(openat(&self.descriptor, name, flags | OFlags::RDWR, Mode::RUSR | Mode::WUSR)?)
    }

    /// Renames an entry, in place of another.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.descriptor, from, &self.descriptor, to)?)
    }

    /// Removes a file, best effort.
    pub(super) fn remove(&self, name: &str) {
        let _ = unlinkat(&self.descriptor, name, AtFlags::empty());
    }
}

/// Reason for which another user can have written a file or folder.
fn foreign(found: &Stat) -> Option<String> {
    let own = rustix::process::geteuid().as_raw();
    if found.st_uid != own && found.st_uid != 0 {
        return Some(format!("it belongs to user {}, this process to user {own}", found.st_uid));
    }
    if found.st_mode & 0o022 != 0 {
        let mode = found.st_mode & 0o7777;
        return Some(format!("other users can write it (mode {mode:04o}): chmod go-w"));
    }
    None
}
