//! Compiled-kernel cache in a folder.
//!
//! An entry is `<key>.cubin`: the machine code, then an 80-byte trailer with the key, the code length, a SHA-256 over
//! key and code, and a magic number. It is written under a temporary name and renamed, so readers find it whole; the
//! trailer detects damage by a machine crash or a bad disk, and the entry is compiled again. `<key>.lock` is empty and
//! stays.
//!
//! The digest detects damage, not attacks: write access to the folder controls the code on the GPU. So the folder is
//! created with access for this user only, and an existing folder or entry that another user can have written is not
//! used. A folder that cannot be used is replaced by one among the temporary files, with a warning.

use super::folder::Folder;
use super::lock::{Lock, LockOutcome, lock};
use super::request::CacheKey;
use crate::error::{Error, Result};
use rustix::fs::OFlags;
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const MAGIC: &[u8; 8] = b"weftjit1";
const TRAILER: usize = 32 + 8 + 32 + MAGIC.len();
/// Entry size limit, far above any kernel.
const MAX_ENTRY: u64 = 1 << 28;
/// Time that a process waits for another that compiles the same.
const LOCK_TIMEOUT: Duration = Duration::from_secs(120);

/// Compiled-kernel cache. Threads, processes and caches may share a folder.
#[derive(Debug)]
pub struct Cache {
    directory: Option<PathBuf>,
    /// Folder in place of an unusable one.
    substitute: Option<PathBuf>,
    lock_timeout: Duration,
    warned: AtomicBool,
}

impl Cache {
    /// Cache in the environment's folder: `WEFT_CACHE_DIR`, else `weft` in `XDG_CACHE_HOME`, else `.cache/weft` in
    /// `HOME`. Without any of them, and in place of an unusable one, `weft-UID` among the temporary files.
    pub fn from_env() -> Cache {
        let cache = Cache::named_by(weft_environment::path);
        if cache.directory.is_none() {
            cache.warn(None, "none of WEFT_CACHE_DIR, XDG_CACHE_HOME and HOME is set");
        }
        let user = rustix::process::geteuid().as_raw();
        Cache { substitute: Some(std::env::temp_dir().join(format!("weft-{user}"))), ..cache }
    }

    fn named_by(variable: impl Fn(&str) -> Option<PathBuf>) -> Cache {
        let set = |name| variable(name).filter(|path| !path.as_os_str().is_empty());
        // The XDG specification ignores a relative XDG_CACHE_HOME.
        let absolute = |name| set(name).filter(|path| path.is_absolute());
        let directory = set("WEFT_CACHE_DIR")
            .or_else(|| absolute("XDG_CACHE_HOME").map(|path| path.join("weft")))
            .or_else(|| absolute("HOME").map(|path| path.join(".cache/weft")));
        Cache { directory, ..Cache::none() }
    }

    /// Cache in this folder, created at the first write.
    pub fn at(directory: impl Into<PathBuf>) -> Cache {
        Cache { directory: Some(directory.into()), ..Cache::none() }
    }

    /// Cache without a folder: caching is off.
    pub fn none() -> Cache {
        let warned = AtomicBool::new(false);
        Cache { directory: None, substitute: None, lock_timeout: LOCK_TIMEOUT, warned }
    }

    /// Sets the time to wait for another process that compiles the same, before compiling here too (default two
    /// minutes).
    #[must_use]
    pub fn with_lock_timeout(self, lock_timeout: Duration) -> Cache {
        Cache { lock_timeout, ..self }
    }

    /// The folder, unless caching is off.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// Folder paths, best first.
    fn paths(&self) -> impl Iterator<Item = &Path> {
        self.directory.iter().chain(&self.substitute).map(PathBuf::as_path)
    }

    /// Entry code, if present and undamaged.
    pub(super) fn find(&self, key: CacheKey) -> Option<Vec<u8>> {
        self.paths().find_map(|path| {
            // A folder that cannot be used is reported by `fill`.
            let folder = Folder::open(path).ok()?;
            match read(&folder, key) {
                Ok(cubin) => Some(cubin),
                Err(error) => {
                    if error.kind() == io::ErrorKind::InvalidData {
                        let path = path.join(entry(key));
                        log::warn!(
                            "compiled kernel {} is damaged ({error}): compiling it again",
                            path.display()
                        );
                    }
                    None
                }
            }
        })
    }

    /// Compiles and stores an entry, unless another process stores it first. Returns the code, and true if it is the
    /// other's.
    pub(super) fn fill(
        &self,
        key: CacheKey,
        compile: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<(Vec<u8>, bool)> {
        let mut folders = self.paths().filter_map(|path| {
            Folder::create(path).map_err(|error| self.warn(Some(path), error)).ok()
        });
        let Some(folder) = folders.next() else { return Ok((compile()?, false)) };
        // The caller's `find` has warned about a damaged entry; the attempts here do not.
        let name = format!("{key}.lock");
        let held = match lock(&folder, &name, self.lock_timeout, || read(&folder, key).ok()) {
            LockOutcome::Done(cubin) => return Ok((cubin, true)),
            LockOutcome::Held(lock) => Some(lock),
            LockOutcome::Unavailable(error) => {
                self.warn(Some(folder.path()), error);
                None
            }
        };
        let cubin = compile()?;
        for folder in std::iter::once(folder).chain(folders) {
            match keep(&folder, key, &cubin, held.as_ref()) {
                Ok(()) => break,
                Err(error) => self.warn(Some(folder.path()), error),
            }
        }
        Ok((cubin, false))
    }

    /// Entry path; an error if it is missing or damaged.
    pub(super) fn kept(&self, key: CacheKey) -> Result<PathBuf> {
        let mut detail = "no folder is set".to_owned();
        for path in self.paths() {
            match Folder::open(path).and_then(|folder| read(&folder, key)) {
                Ok(_) => return Ok(path.join(entry(key))),
                Err(error) => detail = error.to_string(),
            }
        }
        Err(Error::Cache { directory: self.directory.clone().unwrap_or_default(), detail })
    }

    /// Warns once about a folder that is not used.
    fn warn(&self, folder: Option<&Path>, why: impl std::fmt::Display) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            let folder = match folder {
                Some(folder) => format!(" in {}", folder.display()),
                None => String::new(),
            };
            log::warn!(
                "compiled kernels are not cached{folder} ({why}): they are kept among temporary files, or each start \
                 compiles them again; set WEFT_CACHE_DIR to a folder that only this user can write"
            );
        }
    }
}

impl Default for Cache {
    fn default() -> Cache {
        Cache::from_env()
    }
}

/// Entry name.
fn entry(key: CacheKey) -> String {
    format!("{key}.cubin")
}

fn keep(folder: &Folder, key: CacheKey, cubin: &[u8], held: Option<&Lock>) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    if held.is_some() {
        sweep(folder, key);
    }
    let serial = NEXT.fetch_add(1, Ordering::Relaxed);
    let temporary = format!("{key}.{}-{serial}.tmp", std::process::id());
    let written =
        write(folder, &temporary, key, cubin).and_then(|()| folder.rename(&temporary, &entry(key)));
    if written.is_err() {
        folder.remove(&temporary);
    }
    written
}

/// Removes temporary files from processes that died while writing this entry.
fn sweep(folder: &Folder, key: CacheKey) {
    let Ok(entries) = fs::read_dir(folder.path()) else { return };
    let key = key.to_string();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(&key) && name.ends_with(".tmp") {
            folder.remove(&name);
        }
    }
}

fn digest(key: CacheKey, cubin: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(key.0).chain_update(cubin).finalize().into()
}

fn write(folder: &Folder, name: &str, key: CacheKey, cubin: &[u8]) -> io::Result<()> {
    let mut file = File::from(folder.write(name, OFlags::EXCL)?);
    file.write_all(cubin)?;
    file.write_all(&key.0)?;
    file.write_all(&(cubin.len() as u64).to_le_bytes())?;
    file.write_all(&digest(key, cubin))?;
    file.write_all(MAGIC)
}

/// Entry code; an error if it is damaged, has another key, or is another user's.
fn read(folder: &Folder, key: CacheKey) -> io::Result<Vec<u8>> {
    let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let file = folder.read(&entry(key))?;
    let mut bytes = Vec::new();
    file.take(MAX_ENTRY + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_ENTRY {
        return Err(damaged("too long"));
    }
    let length = bytes.len().checked_sub(TRAILER).ok_or_else(|| damaged("too short"))?;
    let (cubin, trailer) = bytes.split_at(length);
    let (named, rest) = trailer.split_at(32);
    let (counted, rest) = rest.split_at(8);
    let (summed, magic) = rest.split_at(32);
    if magic != MAGIC || counted != (length as u64).to_le_bytes() {
        return Err(damaged("incomplete"));
    }
    if named != key.0 {
        return Err(damaged("another kernel's key"));
    }
    if summed != digest(key, cubin) {
        return Err(damaged("checksum mismatch"));
    }
    bytes.truncate(length);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_names_the_folder() {
        let named = |variables: &[(&str, &str)]| {
            let find = |name: &str| {
                let found = variables.iter().find(|(variable, _)| *variable == name);
                found.map(|(_, value)| PathBuf::from(value))
            };
            Cache::named_by(find).directory().map(|path| path.to_str().unwrap().to_owned())
        };
        let (own, xdg, home) = (("WEFT_CACHE_DIR", "/w"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h"));
        assert_eq!(named(&[own, xdg, home]).as_deref(), Some("/w"));
        assert_eq!(named(&[xdg, home]).as_deref(), Some("/x/weft"));
        assert_eq!(named(&[home]).as_deref(), Some("/h/.cache/weft"));
        assert_eq!(
            named(&[("WEFT_CACHE_DIR", ""), ("XDG_CACHE_HOME", "x"), home]).as_deref(),
            Some("/h/.cache/weft")
        );
        assert_eq!(named(&[]), None);
    }
}
