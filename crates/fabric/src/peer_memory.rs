//! Private memory of a peer, read in place.
//!
//! A link offers a [`MemoryReader`] for each peer whose memory it can read. Only the owner of memory names its
//! addresses, by a counted write; a reader answers by another one, or by a credit, once it has read. A wrong address is
//! an error of the read and has no other effect.
//!
//! [`ProcessMemory`] reads by `process_vm_readv`. The kernel may refuse it (Yama, seccomp, another user namespace), so a
//! read of a known word decides at connect. A pidfd, opened before that read and checked after each one, proves that
//! the number of the process still denotes the same process. Each read ends with the word again, which its owner clears
//! when its group is poisoned, before any of its calls fails: so no bytes of memory that a failed call gave back are
//! taken for those of the call.

use crate::error::{Error, Result};
use crate::memory::{copy_bytes, is_slow};
use crate::types::ProviderKind;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::Timespec;
use std::fmt::{self, Debug};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Environment variable: 0 turns reads of peers' memory off.
pub(crate) const READS: &str = "WEFT_SHM_READS";

/// False if `WEFT_SHM_READS` is 0.
///
/// # Errors
/// [`Error::Provider`] for a value other than 0 and 1.
pub(crate) fn reads_from_env() -> Result<bool> {
    let value = std::env::var_os(READS).unwrap_or_default();
    match value.to_string_lossy().trim() {
        "" | "1" => Ok(true),
        "0" => Ok(false),
        other => {
            let detail = format!("{READS} {other:?}: expected 0 or 1");
            Err(Error::Provider { provider: ProviderKind::Shm, detail })
        }
    }
}

/// Failed read of a peer's memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryReadError {
    /// The peer has ended. Bytes read before are not valid.
    #[error("its process has ended")]
    Ended,
    /// The peer's group is poisoned there, so its memory may have another use. Its cause follows on the control plane.
    #[error("its group has ended")]
    Revoked,
    /// Memory that the peer does not have, or that may not be read.
    #[error("{length} bytes at {address:#x} of its memory cannot be read: {detail}")]
    Unreadable {
        /// Address in the peer's process.
        address: u64,
        /// Bytes to read.
        length: u64,
        /// Error of the system.
        detail: String,
    },
}

/// Reader of one peer's private memory.
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

/// Bytes of the word that a probe reads.
const WORD_BYTES: usize = 16;
/// Distance of a shifted read from its target, and its bytes: a share of a core's second-level cache.
const SHIFT: usize = 64;
const SHIFTED_BYTES: usize = 128 << 10;

/// Random word whose address and contents a rank sends to its peers, for their probes.
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

/// Memory of another process of this host.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    pid: Pid,
    process: OwnedFd,
    /// Address and contents of its word.
    word: (u64, [u8; WORD_BYTES]),
}

impl ProcessMemory {
    /// Memory of a process that sent this [`ProbeWord::message`]. The error is the reason why it cannot be read.
    pub fn probe(pid: Pid, message: &[u8]) -> std::result::Result<ProcessMemory, String> {
        let (address, word) = message
            .split_first_chunk()
            .and_then(|(address, word)| Some((*address, <[u8; WORD_BYTES]>::try_from(word).ok()?)))
            .ok_or_else(|| format!("a probe of {} bytes", message.len()))?;
        let process = pidfd_open(pid, PidfdFlags::empty())
            .map_err(|error| format!("pidfd_open: {}", io::Error::from(error)))?;
        let word = (u64::from_le_bytes(address), word);
        let memory = ProcessMemory { pid, process, word };
        let mut nothing = [0; 0];
        // SAFETY: no byte is written.
        match unsafe { memory.read(word.0, nothing.as_mut_ptr(), 0) } {
            Ok(()) => Ok(memory),
            Err(MemoryReadError::Revoked) => {
                Err("its number denotes another process here".to_owned())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// True if the word is cleared, or its memory is gone.
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
            // SAFETY: the caller's: the piece and the shift are inside the range.
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

    fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
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
        // SAFETY: the caller's.
        let read = unsafe { self.read_at_any_distance(address, target, length) };
        match read {
            _ if self.has_ended() => Err(MemoryReadError::Ended),
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

/// Reads all of a range, by as many calls of the kernel as that takes, and then the word at this address, which it
/// returns.
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
        // SAFETY: the kernel checks all ranges; it writes to the local ones alone: `found`, and the target, which is
        // valid by the contract of this function.
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

/// Memory of a simulated rank of this process, with the checks of [`ProcessMemory`].
pub(crate) struct OwnMemory {
    is_alive: Box<dyn Fn() -> bool + Send + Sync>,
}

impl OwnMemory {
    /// Memory of a rank that is readable while `is_alive` returns true.
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

/// The process at the other end of a connected Unix socket.
pub(crate) fn peer_process(socket: impl AsFd) -> io::Result<Pid> {
    Ok(rustix::net::sockopt::socket_peercred(socket)?.pid)
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
        let memory = ProcessMemory { pid, process, word: (4096, [0; WORD_BYTES]) };
        assert!(!memory.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(read(&memory, 4096, 8), Err(MemoryReadError::Ended));
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri does not support pidfd_open")]
    fn a_reused_number_is_never_believed() {
        // The number is that of this process, whose memory is readable; the pidfd is that of one that has ended.
        let mut child = sleeper();
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let source = [7u8; 64];
        let word = (source.as_ptr().expose_provenance() as u64, [7; WORD_BYTES]);
        let memory = ProcessMemory { pid: rustix::process::getpid(), process, word };
        let address = source.as_ptr().expose_provenance() as u64;
        assert_eq!(read(&memory, address, 64), Err(MemoryReadError::Ended));
    }
}
