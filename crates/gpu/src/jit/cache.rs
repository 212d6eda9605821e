//! The folder of compiled kernels.
//!
//! An entry is `<key>.cubin`: the machine code and behind it a trailer of 80 bytes, the key, the
//! length of the code, a SHA-256 of key and code, and a mark. It is written under another name and
//! renamed, so nobody sees a part of it; what a crash of the machine or a bad disk leaves all the same
//! is found by the trailer, compiled again and replaced. `<key>.lock` is empty and stays.
//!
//! The digest tells damage, not malice: whoever can write to the folder decides what runs on the GPU.
//! It is made for this user alone.

use super::Key;
use super::lock::{Lock, Tried, lock};
use crate::error::{Error, Result};
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const MARK: &[u8; 8] = b"weftjit1";
const TRAILER: usize = 32 + 8 + 32 + MARK.len();
/// No kernel is nearly as large; a file that is was not written here.
const MAX_ENTRY: u64 = 1 << 28;
/// How long a rank waits for another that compiles the same.
const PATIENCE: Duration = Duration::from_secs(120);

/// Where compiled kernels are kept. Any number of threads, processes and users of a cache can share
/// its folder.
#[derive(Debug)]
pub struct Cache {
    directory: Option<PathBuf>,
    patience: Duration,
    warned: AtomicBool,
}

impl Cache {
    /// The folder that the environment names: `WEFT_CACHE_DIR`, else `weft` in `XDG_CACHE_HOME`, else
    /// `.cache/weft` in `HOME`. Without any of them nothing is kept.
    pub fn from_env() -> Cache {
        let cache = Cache::named_by(|name| std::env::var_os(name).map(PathBuf::from));
        if cache.directory.is_none() {
            cache.warn("neither WEFT_CACHE_DIR, XDG_CACHE_HOME nor HOME names a folder");
        }
        cache
    }

    fn named_by(variable: impl Fn(&str) -> Option<PathBuf>) -> Cache {
        let set = |name| variable(name).filter(|path| !path.as_os_str().is_empty());
        // A relative XDG_CACHE_HOME is to be ignored, says its specification.
        let absolute = |name| set(name).filter(|path| path.is_absolute());
        let directory = set("WEFT_CACHE_DIR")
            .or_else(|| absolute("XDG_CACHE_HOME").map(|path| path.join("weft")))
            .or_else(|| absolute("HOME").map(|path| path.join(".cache/weft")));
        Cache { directory, ..Cache::none() }
    }

    /// This folder. It is made when something is kept.
    pub fn at(directory: impl Into<PathBuf>) -> Cache {
        Cache { directory: Some(directory.into()), ..Cache::none() }
    }

    /// Keeps nothing.
    pub fn none() -> Cache {
        Cache { directory: None, patience: PATIENCE, warned: AtomicBool::new(false) }
    }

    /// Waits no longer than this for another rank that compiles the same, then compiles as well. Two
    /// minutes if nothing is said.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Cache {
        Cache { patience, ..self }
    }

    /// The folder, if anything is kept.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    fn path(&self, key: Key, suffix: &str) -> Option<PathBuf> {
        Some(self.directory.as_ref()?.join(format!("{key}{suffix}")))
    }

    /// The code of an entry, if it is there and whole.
    pub(super) fn find(&self, key: Key) -> Option<Vec<u8>> {
        let path = self.path(key, ".cubin")?;
        match read(&path, key) {
            Ok(cubin) => Some(cubin),
            Err(error) => {
                // What cannot be read at all is a matter of the folder, and `fill` speaks of that.
                if error.kind() == io::ErrorKind::InvalidData {
                    log::warn!(
                        "the compiled kernel {} is of no use ({error}): it is compiled again",
                        path.display()
                    );
                }
                None
            }
        }
    }

    /// Compiles what is not there and keeps it, unless another does so meanwhile. Returns the code and
    /// whether it was another.
    pub(super) fn fill(
        &self,
        key: Key,
        compile: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<(Vec<u8>, bool)> {
        let Some(path) = self.path(key, ".lock") else { return Ok((compile()?, false)) };
        if let Err(error) = self.make_directory() {
            self.warn(error);
            return Ok((compile()?, false));
        }
        // A damaged entry is warned of once, by the caller's `find`, and not at every look.
        let entry = path.with_extension("cubin");
        let held = match lock(&path, self.patience, || read(&entry, key).ok()) {
            Tried::Done(cubin) => return Ok((cubin, true)),
            Tried::Held(lock) => Some(lock),
            Tried::Not(error) => {
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

    /// Where the code of this key lies; an error if it does not.
    pub(super) fn kept(&self, key: Key) -> Result<PathBuf> {
        let failed = |detail: String| Error::Cache {
            directory: self.directory.clone().unwrap_or_default(),
            detail,
        };
        let path = self
            .path(key, ".cubin")
            .ok_or_else(|| failed("no folder is named for them".to_owned()))?;
        read(&path, key).map_err(|error| failed(error.to_string()))?;
        Ok(path)
    }

    fn make_directory(&self) -> io::Result<()> {
        let Some(directory) = &self.directory else { return Ok(()) };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
    }

    fn keep(&self, key: Key, cubin: &[u8], held: Option<&Lock>) -> io::Result<()> {
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

    /// Removes what processes that died while writing this entry have left.
    fn sweep(&self, key: Key) {
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

    /// Says once what the cache is not good for.
    fn warn(&self, why: impl std::fmt::Display) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            let place = match &self.directory {
                Some(directory) => format!(" in {}", directory.display()),
                None => String::new(),
            };
            log::warn!(
                "compiled kernels are not kept{place} ({why}): each start compiles them again; set \
                 WEFT_CACHE_DIR to a folder that can be written"
            );
        }
    }
}

impl Default for Cache {
    fn default() -> Cache {
        Cache::from_env()
    }
}

fn digest(key: Key, cubin: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(key.0).chain_update(cubin).finalize().into()
}

fn write(path: &Path, key: Key, cubin: &[u8]) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).open(path)?;
    file.write_all(cubin)?;
    file.write_all(&key.0)?;
    file.write_all(&(cubin.len() as u64).to_le_bytes())?;
    file.write_all(&digest(key, cubin))?;
    file.write_all(MARK)
}

/// The code in the entry at `path`; an error if it is not whole or is another's.
fn read(path: &Path, key: Key) -> io::Result<Vec<u8>> {
    let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(damaged("it is no file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_ENTRY + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_ENTRY {
        return Err(damaged("it is too long"));
    }
    let length = bytes.len().checked_sub(TRAILER).ok_or_else(|| damaged("it is too short"))?;
    let (cubin, trailer) = bytes.split_at(length);
    let (named, rest) = trailer.split_at(32);
    let (counted, rest) = rest.split_at(8);
    let (summed, mark) = rest.split_at(32);
    if mark != MARK || counted != (length as u64).to_le_bytes() {
        return Err(damaged("it was not written to its end"));
    }
    if named != key.0 {
        return Err(damaged("it is another kernel's"));
    }
    if summed != digest(key, cubin) {
        return Err(damaged("its bytes have changed"));
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
