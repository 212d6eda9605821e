//! A peer's private memory, read in place.
//!
//! A link offers a [`MemoryReader`] for each peer whose memory it can read. Only the memory's owner names
//! addresses, by a counted write; a reader answers by another write, or by a credit, once it has read. A
//! wrong address makes the read fail and has no other effect.
//!
//! [`ProcessMemory`] reads by `process_vm_readv`. The kernel may refuse it (Yama, seccomp, another user
//! namespace), and a process in another container may have no pid here, so a read from a known word
//! decides at connect. A pidfd, opened before the first data read and checked after each one, proves that
//! the pid still denotes the same process; groups without reads have none. Each read ends with the word
//! again, which the owner clears when the group is poisoned, before any call there fails: so bytes from
//! memory that a failed call gave back are never taken for that call's bytes.

use crate::error::{Error, Result};
use crate::memory::{copy_bytes, is_slow};
use crate::types::ProviderKind;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::Timespec;
use std::fmt::{self, Debug};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Environment variable: 0 turns off reads from peers' memory.
pub(crate) const READS: &str = "WEFT_SHM_READS";

/// False if `WEFT_SHM_READS` is 0.
///
/// # Errors
/// [`Error::Provider`] for a value other than 0 and 1.
pub(crate) fn reads_from_env() -> Result<bool> {
    weft_environment::flag(READS, true)
        .map_err(|error| Error::Provider { provider: ProviderKind::Shm, detail: error.to_string() })
}

/// Failed read from a peer's memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryReadError {
    /// The peer has ended. Bytes read before are not valid.
    #[error("its process has ended")]
    Ended,
    /// The peer's group is poisoned there, so the memory may have another use. The cause follows on the
    /// control plane.
    #[error("its group has ended")]
    Revoked,
    /// Memory that the peer does not have, or that may not be read.
    #[error("{length} bytes at {address:#x} of its memory cannot be read: {detail}")]
    Unreadable {
        /// Address in the peer's process.
        address: u64,
        /// Bytes to read.
        length: u64,
        /// System error.
        detail: String,
    },
}

/// Reader for one peer's private memory, for example by `process_vm_readv` over shm.
pub trait MemoryReader: Debug + Send + Sync {
    /// Copies `length` bytes at `address` in the peer's process to `target`.
    ///
    /// # Safety
    /// `target` is valid for writes of `length` bytes, and no other thread accesses it during the call.
    ///
    /// # Errors
    /// [`MemoryReadError`]; the bytes at `target` are then undefined.
    unsafe fn read(
        &self,
        address: u64,
        target: *mut u8,
        length: usize,
    ) -> std::result::Result<(), MemoryReadError>;
}

/// Bytes in the word that a probe reads.
const WORD_BYTES: usize = 16;
/// Distance between a shifted read and the target, and the bytes it covers: a share of a core's
/// second-level cache.
const SHIFT: usize = 64;
const SHIFTED_BYTES: usize = 128 << 10;

/// Random word whose address and contents a rank sends to the peers, for probing.
#[derive(Debug)]
pub struct ProbeWord(Box<[AtomicU64; 2]>);

impl ProbeWord {
    /// A new word.
    pub fn new() -> io::Result<ProbeWord> {
        let mut word = [[0; 8]; 2];
        getrandom::fill(word.as_flattened_mut())
            .map_err(|error| io::Error::other(error.to_string()))?;
        Ok(ProbeWord(Box::new(word.map(|half| AtomicU64::new(u64::from_ne_bytes(half))))))
    }

    /// Ends all reads: those that are not complete fail with [`MemoryReadError::Revoked`].
    pub fn revoke(&self) {
        self.0.iter().for_each(|half| half.store(0, Ordering::SeqCst));
    }

    /// Message for the peers: address and contents.
    pub fn message(&self) -> Vec<u8> {
        let address = self.0.as_ptr().expose_provenance() as u64;
        let [first, second] = [0, 1].map(|half: usize| self.0[half].load(Ordering::SeqCst));
        [address.to_le_bytes(), first.to_ne_bytes(), second.to_ne_bytes()].concat()
    }
}

impl Drop for ProbeWord {
    fn drop(&mut self) {
        self.revoke();
    }
}

/// Another process's memory on this host.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    pid: Pid,
    /// Opened by the first read.
    process: OnceLock<OwnedFd>,
    /// Address and contents of the peer's word.
    word: (u64, [u8; WORD_BYTES]),
}

impl ProcessMemory {
    /// Memory in the process that sent this [`ProbeWord::message`]. The error says why it cannot be read.
    pub fn probe(pid: Pid, message: &[u8]) -> std::result::Result<ProcessMemory, String> {
        let (address, word) = message
            .split_first_chunk()
            .and_then(|(address, word)| Some((*address, <[u8; WORD_BYTES]>::try_from(word).ok()?)))
            .ok_or_else(|| format!("a probe of {} bytes", message.len()))?;
        let word = (u64::from_le_bytes(address), word);
        let memory = ProcessMemory { pid, process: OnceLock::new(), word };
        let mut nothing = [0; 0];
        // SAFETY: no byte is written.
        match unsafe { memory.read_at_any_distance(word.0, nothing.as_mut_ptr(), 0) } {
            Ok(found) if found == word.1 => Ok(memory),
            Ok(_) => Err("its number denotes another process here".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The peer's pidfd, opened once; `None` if this process has no descriptor left: the word still
    /// proves each read.
    fn process(&self) -> std::result::Result<Option<&OwnedFd>, MemoryReadError> {
        if self.process.get().is_none() {
            match pidfd_open(self.pid, PidfdFlags::empty()) {
                Ok(process) => drop(self.process.set(process)),
                Err(Errno::SRCH) => return Err(MemoryReadError::Ended),
                Err(error) => log::debug!("pidfd_open: {}", io::Error::from(error)),
            }
        }
        Ok(self.process.get())
    }

    /// True if the word is cleared, or the memory is gone.
    fn is_revoked(&self) -> bool {
        let mut nothing = [0; 0];
        let target = nothing.as_mut_ptr();
        // SAFETY: no byte is written to the target.
        let word = unsafe { read_process(self.pid, self.word.0, target, 0, Some(self.word.0)) };
        word.ok() != Some(self.word.1)
    }

    /// Reads a range, and then the word, which it returns.
    ///
    /// # Safety
    /// As for [`MemoryReader::read`].
    unsafe fn read_at_any_distance(
        &self,
        mut address: u64,
        mut target: *mut u8,
        mut length: usize,
    ) -> io::Result<[u8; WORD_BYTES]> {
        // The kernel copies by `rep movsb`. A shifted copy that is moved in place is faster than a slow one.
        while is_slow(address as usize, target.addr(), length) {
            let piece = (length - SHIFT).min(SHIFTED_BYTES);
            let shifted = target.wrapping_add(SHIFT);
            // SAFETY: the caller's: the segment and the shift are inside the range.
            unsafe {
                read_process(self.pid, address, shifted, piece, None)?;
                copy_bytes(shifted, target, piece);
            }
            (address, target) = (address.wrapping_add(piece as u64), target.wrapping_add(piece));
            length -= piece;
        }
        // SAFETY: the caller's, for the rest.
        unsafe { read_process(self.pid, address, target, length, Some(self.word.0)) }
    }

    fn has_ended(process: Option<&OwnedFd>) -> bool {
        let Some(process) = process else { return false };
        let mut polled = [PollFd::new(process, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // After an interrupted poll the descriptor counts as not readable.
        poll(&mut polled, Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

impl MemoryReader for ProcessMemory {
    unsafe fn read(
        &self,
        address: u64,
        target: *mut u8,
        length: usize,
    ) -> std::result::Result<(), MemoryReadError> {
        let process = self.process()?;
        // SAFETY: the caller's.
        let read = unsafe { self.read_at_any_distance(address, target, length) };
        match read {
            _ if Self::has_ended(process) => Err(MemoryReadError::Ended),
            Ok(word) if word != self.word.1 => Err(MemoryReadError::Revoked),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(MemoryReadError::Ended),
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) && self.is_revoked() => {
                Err(MemoryReadError::Revoked)
            }
            Err(error) => Err(unreadable(address, length, &error)),
            Ok(_) => Ok(()),
        }
    }
}

/// Reads all of a range, in as many kernel calls as that takes, and then the word at this address, which
/// it returns.
///
/// # Safety
/// As for [`MemoryReader::read`].
unsafe fn read_process(
    pid: Pid,
    address: u64,
    target: *mut u8,
    length: usize,
    word: Option<u64>,
) -> io::Result<[u8; WORD_BYTES]> {
    let mut found = [0; WORD_BYTES];
    let room = if word.is_some() { WORD_BYTES } else { 0 };
    let remote = |address: u64, iov_len| libc::iovec {
        iov_base: std::ptr::without_provenance_mut(address as usize),
        iov_len,
    };
    let mut done = 0;
    while done < length + room {
        let (read, of_word) = (done.min(length), done.saturating_sub(length));
        // The kernel reads the ranges in this order.
        let local_ranges = [
            libc::iovec { iov_base: target.wrapping_add(read).cast(), iov_len: length - read },
            libc::iovec {
                iov_base: found.as_mut_ptr().wrapping_add(of_word).cast(),
                iov_len: room - of_word,
            },
        ];
        let remote_ranges = [
            remote(address.wrapping_add(read as u64), length - read),
            remote(word.unwrap_or(0).wrapping_add(of_word as u64), room - of_word),
        ];
        // SAFETY: the kernel checks all ranges; it writes only to the local ones: `found`, and the
        // target, which is valid by this function's contract.
        let count = unsafe {
            let (local, remote) = (local_ranges.as_ptr(), remote_ranges.as_ptr());
            libc::process_vm_readv(pid.as_raw_pid(), local, 2, remote, 2, 0)
        };
        match usize::try_from(count) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(found)
}

fn unreadable(address: u64, length: usize, error: &io::Error) -> MemoryReadError {
    let (length, detail) = (length as u64, error.to_string());
    MemoryReadError::Unreadable { address, length, detail }
}

/// Memory that belongs to a simulated rank in this process, with the same checks as [`ProcessMemory`].
pub(crate) struct OwnMemory {
    is_alive: Box<dyn Fn() -> bool + Send + Sync>,
}

impl OwnMemory {
    /// Rank memory that is readable while `is_alive` returns true.
    pub fn while_alive(is_alive: impl Fn() -> bool + Send + Sync + 'static) -> OwnMemory {
        OwnMemory { is_alive: Box::new(is_alive) }
    }
}

impl fmt::Debug for OwnMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnMemory")
    }
}

impl MemoryReader for OwnMemory {
    unsafe fn read(
        &self,
        address: u64,
        target: *mut u8,
        length: usize,
    ) -> std::result::Result<(), MemoryReadError> {
        if !(self.is_alive)() {
            return Err(MemoryReadError::Ended);
        }
        // SAFETY: the caller's.
        let read =
            unsafe { read_process(rustix::process::getpid(), address, target, length, None) };
        read.map(drop).map_err(|error| unreadable(address, length, &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    fn of_this_process(word: &ProbeWord) -> ProcessMemory {
        ProcessMemory::probe(rustix::process::getpid(), &word.message()).unwrap()
    }

    fn read(
        memory: &ProcessMemory,
        address: u64,
        length: usize,
    ) -> std::result::Result<Vec<u8>, MemoryReadError> {
        let mut target = vec![0; length];
        // SAFETY: the vector has that length.
        unsafe { memory.read(address, target.as_mut_ptr(), length) }.map(|()| target)
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri does not support process_vm_readv")]
    fn memory_is_read_in_place() {
        let source: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        let address = source.as_ptr().expose_provenance() as u64;
        let word = ProbeWord::new().unwrap();
        let memory = of_this_process(&word);
        assert_eq!(read(&memory, address, source.len()).unwrap(), source);
        assert_eq!(read(&memory, address + 7, 5).unwrap(), source[7..12]);
        let mut target = vec![0u8; (1 << 20) + 2 * 4096];
        let long: Vec<u8> = (0..1u32 << 20).map(|i| (i % 253) as u8).collect();
        let address = long.as_ptr().expose_provenance() as u64;
        for distance in [0, 1, 16, 31, 32] {
            for length in [2049, 4096, (128 << 10) + 65, (256 << 10) + 64, 1 << 20] {
                let page = (address as usize).wrapping_sub(target.as_ptr().addr()) % 4096;
                let range = page + distance..page + distance + length;
                target.fill(0);
                // SAFETY: the range is inside the vector.
                unsafe { memory.read(address, target[range.clone()].as_mut_ptr(), length) }
                    .unwrap();
                assert!(target[range.clone()] == long[..length], "{length} bytes at {distance}");
                assert!(
                    target[..range.start].iter().chain(&target[range.end..]).all(|at| *at == 0)
                );
            }
        }
        word.revoke();
        assert_eq!(read(&memory, address, 5), Err(MemoryReadError::Revoked));
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri does not support process_vm_readv")]
    fn a_wrong_address_is_an_error_of_the_read() {
        let word = ProbeWord::new().unwrap();
        let memory = of_this_process(&word);
        for address in [0, 8, u64::MAX - 3] {
            let error = read(&memory, address, 64).unwrap_err();
            assert!(matches!(error, MemoryReadError::Unreadable { .. }), "{error}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri does not support pidfd_open")]
    fn a_word_that_differs_is_another_process() {
        let mut message = ProbeWord::new().unwrap().message();
        let word = ProbeWord::new().unwrap();
        message[..8].copy_from_slice(&word.message()[..8]);
        let refused = ProcessMemory::probe(rustix::process::getpid(), &message).unwrap_err();
        assert!(refused.contains("another process"), "{refused}");
        assert!(ProcessMemory::probe(rustix::process::getpid(), &message[..9]).is_err());
    }

    fn sleeper() -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", "echo; exec sleep 60"]).stdout(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri starts no processes")]
    fn the_end_of_the_process_is_an_error_of_the_read() {
        let mut child = sleeper();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let pid = Pid::from_child(&child);
        let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        assert!(!ProcessMemory::has_ended(Some(&process)));
        let (process, word) = (OnceLock::from(process), (4096, [0; WORD_BYTES]));
        let memory = ProcessMemory { pid, process, word };
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(read(&memory, 4096, 8), Err(MemoryReadError::Ended));
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri does not support pidfd_open")]
    fn a_reused_number_is_never_believed() {
        // The pid is this process's, whose memory is readable; the pidfd belongs to a process that has
        // ended.
        let mut child = sleeper();
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let process = OnceLock::from(process);
        child.kill().unwrap();
        child.wait().unwrap();
        let source = [7u8; 64];
        let word = (source.as_ptr().expose_provenance() as u64, [7; WORD_BYTES]);
        let memory = ProcessMemory { pid: rustix::process::getpid(), process, word };
        let address = source.as_ptr().expose_provenance() as u64;
        assert_eq!(read(&memory, address, 64), Err(MemoryReadError::Ended));
    }
}
