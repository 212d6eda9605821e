//! Cache of compiled kernels in a folder.
//!
//! An entry is `<key>.cubin`: the machine code, then a trailer of 80 bytes with the key, the length of the code, a
//! SHA-256 of key and code, and a magic number. It is written under a temporary name and renamed, so readers find it
//! whole; damage by a crash of the machine or a bad disk is detected by the trailer, and the entry is compiled again.
//! `<key>.lock` is empty and stays.
//!
//! The digest detects damage, not attacks: write access to the folder controls the code on the GPU. The folder is
//! created with access for this user only.

use super::lock::{Lock, LockOutcome, lock};
use super::request::CacheKey;
use crate::error::{Error, Result};
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const MAGIC: &[u8; 8] = b"weftjit1";
const TRAILER: usize = 32 + 8 + 32 + MAGIC.len();
/// Size limit of an entry, far above any kernel.
const MAX_ENTRY: u64 = 1 << 28;
/// Time that a process waits for another that compiles the same.
const LOCK_TIMEOUT: Duration = Duration::from_secs(120);

/// Cache of compiled kernels. Threads, processes and caches may share a folder.
#[derive(Debug)]
pub struct Cache {
    directory: Option<PathBuf>,
    lock_timeout: Duration,
    warned: AtomicBool,
}

impl Cache {
    /// Cache in the folder of the environment: `WEFT_CACHE_DIR`, else `weft` in `XDG_CACHE_HOME`, else `.cache/weft` in
    /// `HOME`. Without any of them, caching is off.
    pub fn from_env() -> Cache {
        let cache = Cache::named_by(|name| std::env::var_os(name).map(PathBuf::from));
        if cache.directory.is_none() {
            cache.warn("none of WEFT_CACHE_DIR, XDG_CACHE_HOME and HOME is set");
        }
        cache
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
        Cache { directory: None, lock_timeout: LOCK_TIMEOUT, warned: AtomicBool::new(false) }
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

    fn path(&self, key: CacheKey, suffix: &str) -> Option<PathBuf> {
        Some(self.directory.as_ref()?.join(format!("{key}{suffix}")))
    }

    /// Code of an entry, if present and undamaged.
    pub(super) fn find(&self, key: CacheKey) -> Option<Vec<u8>> {
        let path = self.path(key, ".cubin")?;
        match read(&path, key) {
            Ok(cubin) => Some(cubin),
            Err(error) => {
                // An unreadable file is a problem of the folder, which `fill` reports.
                if error.kind() == io::ErrorKind::InvalidData {
                    log::warn!(
                        "compiled kernel {} is damaged ({error}): compiling it again",
                        path.display()
                    );
                }
                None
            }
        }
    }

    /// Compiles and stores an entry, unless another process stores it first. Returns the code, and true if it is the
    /// other's.
    pub(super) fn fill(
        &self,
        key: CacheKey,
        compile: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<(Vec<u8>, bool)> {
        let Some(path) = self.path(key, ".lock") else { return Ok((compile()?, false)) };
        if let Err(error) = self.make_directory() {
            self.warn(error);
            return Ok((compile()?, false));
        }
        // The caller's `find` has warned about a damaged entry; the attempts here do not.
        let entry = path.with_extension("cubin");
        let held = match lock(&path, self.lock_timeout, || read(&entry, key).ok()) {
            LockOutcome::Done(cubin) => return Ok((cubin, true)),
            LockOutcome::Held(lock) => Some(lock),
            LockOutcome::Unavailable(error) => {
                self.warn(error);
                None
            }
        };
        let cubin = compile()?;
        if let Err(error) = self.keep(key, &cubin, held.as_ref()) {
            self.warn(error);
        }
        Ok((cubin, false))
    }

    /// Path of an entry; an error if it is missing or damaged.
    pub(super) fn kept(&self, key: CacheKey) -> Result<PathBuf> {
        let failed = |detail: String| Error::Cache {
            directory: self.directory.clone().unwrap_or_default(),
            detail,
        };
        let path = self.path(key, ".cubin").ok_or_else(|| failed("no folder is set".to_owned()))?;
        read(&path, key).map_err(|error| failed(error.to_string()))?;
        Ok(path)
    }

    fn make_directory(&self) -> io::Result<()> {
        let Some(directory) = &self.directory else { return Ok(()) };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
    }

    fn keep(&self, key: CacheKey, cubin: &[u8], held: Option<&Lock>) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let Some(path) = self.path(key, ".cubin") else { return Ok(()) };
        if held.is_some() {
            self.sweep(key);
        }
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{serial}.tmp", std::process::id()));
        let written = write(&temporary, key, cubin).and_then(|()| fs::rename(&temporary, &path));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// Removes temporary files of processes that died while writing this entry.
    fn sweep(&self, key: CacheKey) {
        let Some(Ok(entries)) = self.directory.as_ref().map(fs::read_dir) else { return };
        let key = key.to_string();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(&key) && name.ends_with(".tmp") {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Warns once that caching is off.
    fn warn(&self, why: impl std::fmt::Display) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            let folder = match &self.directory {
                Some(directory) => format!(" in {}", directory.display()),
                None => String::new(),
            };
            log::warn!(
                "compiled kernels are not cached{folder} ({why}): each start compiles them again; set \
                 WEFT_CACHE_DIR to a writable folder"
            );
        }
    }
}

impl Default for Cache {
    fn default() -> Cache {
        Cache::from_env()
    }
}

fn digest(key: CacheKey, cubin: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(key.0).chain_update(cubin).finalize().into()
}

fn write(path: &Path, key: CacheKey, cubin: &[u8]) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).open(path)?;
    file.write_all(cubin)?;
    file.write_all(&key.0)?;
    file.write_all(&(cubin.len() as u64).to_le_bytes())?;
    file.write_all(&digest(key, cubin))?;
    file.write_all(MAGIC)
}

/// Code of the entry at `path`; an error if it is damaged or has another key.
fn read(path: &Path, key: CacheKey) -> io::Result<Vec<u8>> {
    let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(damaged("not a file"));
    }
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
        return Err(damaged("key of another kernel"));
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
