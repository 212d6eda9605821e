//! User memory as a heap part, mapped by peers in place.
//!
//! On a GPU, peers open the allocation by IPC handle; on the CPU, it is a file range that the user has mapped. The
//! user keeps it alive until [`Heap::close`](super::Heap::close) has returned on all ranks.

use super::location::MemoryLocation;
use super::offer::DriverHandle;
use crate::error::{Error, Result};
use rustix::fd::{AsFd as _, OwnedFd};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::ptr::NonNull;
use weft_control::Rank;
use weft_cuda::{Context, IpcHandle, is_ipc_capable};

/// User memory.
#[derive(Debug)]
pub struct UserMemory {
    /// Address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// On the CPU, the mapped file and the offset there.
    pub file: Option<(OwnedFd, u64)>,
}

/// User memory at its own rank, with the handle for peers.
pub(super) struct SharedUserMemory {
    memory: UserMemory,
    handle: Option<DriverHandle>,
}

impl SharedUserMemory {
    /// Prepares memory for sharing.
    pub fn new(location: &MemoryLocation, memory: UserMemory) -> Result<SharedUserMemory> {
        let MemoryLocation::Cuda { device, .. } = location else {
            return Ok(SharedUserMemory { memory, handle: None });
        };
        if !is_ipc_capable(memory.address)? {
            let (address, device) = (memory.address, device.to_string());
            return Err(Error::NotShareable { address, device });
        }
        let context = Context::primary(*device)?;
        let bytes = usize::try_from(memory.bytes).unwrap_or(usize::MAX);
        let IpcHandle { handle, offset, .. } = IpcHandle::of(&context, memory.address, bytes)?;
        Ok(SharedUserMemory { memory, handle: Some(DriverHandle { handle, offset }) })
    }

    pub fn address(&self) -> u64 {
        self.memory.address
    }

    pub fn len(&self) -> u64 {
        self.memory.bytes
    }

    pub fn handle(&self) -> Option<DriverHandle> {
        self.handle.clone()
    }

    /// File offset, on the CPU.
    pub fn file_offset(&self) -> Option<u64> {
        self.memory.file.as_ref().map(|(_, offset)| *offset)
    }

    /// File descriptor, on the CPU.
    pub fn descriptor(&self) -> Result<Option<OwnedFd>> {
        let copy = self.memory.file.as_ref().map(|(file, _)| file.as_fd().try_clone_to_owned());
        let unusable = |error| weft_fabric::Error::system("cannot share a file", error);
        Ok(copy.transpose().map_err(unusable)?)
    }
}

/// Range in a peer's file, mapped here. The peer must not truncate the file.
pub(super) struct MappedFile {
    base: NonNull<c_void>,
    /// Bytes before the range, and in it.
    offset: usize,
    bytes: usize,
}

// SAFETY: only addresses in shared memory are handed out.
unsafe impl Send for MappedFile {}
// SAFETY: as above.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Maps `bytes` at `offset` in a file.
    pub fn new(peer: Rank, file: &OwnedFd, offset: u64, bytes: u64) -> Result<MappedFile> {
        let failed = |error: std::io::Error| weft_fabric::Error::system("cannot map a file", error);
        let held = rustix::fs::fstat(file).map_err(|error| failed(error.into()))?.st_size as u64;
        let end = offset.checked_add(bytes).filter(|end| *end <= held);
        let Some(length) = end.and_then(|end| usize::try_from(end).ok()) else {
            let detail =
                format!("its file holds {held} bytes, of which {bytes} at {offset} are shared");
            return Err(Error::Malformed { peer, detail });
        };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address chosen by the kernel has no alias.
        let base = unsafe { mmap(std::ptr::null_mut(), length, access, MapFlags::SHARED, file, 0) };
        let base = base.map_err(|error| failed(error.into()))?;
        let null = || failed(std::io::Error::other("mapped at address zero"));
        let base = NonNull::new(base).ok_or_else(null)?;
        Ok(MappedFile { base, offset: offset as usize, bytes: bytes as usize })
    }

    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64 + self.offset as u64
    }

    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: this mapping's own pages, which the users guarantee to be unused.
        let _ = unsafe { munmap(self.base.as_ptr(), self.offset + self.bytes) };
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> OwnedFd {
        let file = rustix::fs::memfd_create("lent", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(rustix::io::write(&file, bytes), Ok(bytes.len()));
        file
    }

    #[test]
    fn a_range_of_a_file_is_mapped_at_its_offset() {
        let bytes: Vec<u8> = (0..200).collect();
        let file = file(&bytes);
        let mapped = MappedFile::new(Rank(1), &file, 17, 100).unwrap();
        let at = mapped.address() as *mut u8;
        // SAFETY: 100 bytes in this test's own mapping.
        let seen: Vec<u8> = (0..mapped.len()).map(|byte| unsafe { at.add(byte).read() }).collect();
        assert_eq!(seen, bytes[17..117]);
        // SAFETY: as above.
        unsafe { at.write(255) };
        let again = MappedFile::new(Rank(1), &file, 0, 200).unwrap();
        // SAFETY: 200 bytes in another mapping of the same file.
        assert_eq!(unsafe { (again.address() as *const u8).add(17).read() }, 255);
    }

    #[test]
    fn a_file_shorter_than_its_shared_range_is_rejected() {
        let file = file(&[1; 64]);
        for (offset, bytes) in [(0, 65), (64, 1), (u64::MAX, 2), (1, u64::MAX)] {
            let refused = MappedFile::new(Rank(2), &file, offset, bytes).map(drop).unwrap_err();
            assert!(matches!(refused, Error::Malformed { peer: Rank(2), .. }), "{refused}");
            assert!(refused.to_string().contains("its file holds 64 bytes"), "{refused}");
        }
    }
}
