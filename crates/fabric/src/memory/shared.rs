//! Shareable memory: pages of a sealed memory file, and the mapping of a peer's.

use super::{Keep, Memory, Place};
use crate::error::{Error, Result};
use rustix::fd::AsFd;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use std::ptr::NonNull;

impl Memory {
    /// Zeroed pages without a name, shareable by descriptor. Nothing is left behind when the last
    /// process that maps them ends.
    pub fn shared(length: usize) -> Result<Memory> {
        if cfg!(miri) {
            return Memory::unshared(length);
        }
        let failed = |source: rustix::io::Errno| Error::Allocate { length, source: source.into() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let descriptor = rustix::fs::memfd_create("weft", flags).map_err(failed)?;
        rustix::fs::ftruncate(&descriptor, length.max(1) as u64).map_err(failed)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&descriptor, seals).map_err(failed)?;
        let mut memory = Memory::map(&descriptor, length)?;
        if let Keep::Mapping { descriptor: keep, .. } = &mut memory._keep {
            *keep = Some(descriptor);
        }
        Ok(memory)
    }

    /// Zeroed pages of this process alone, for miri, which has no memory files. What needs no second
    /// process, such as the simulator, runs there all the same.
    fn unshared(length: usize) -> Result<Memory> {
        let mapped = length.max(1);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address that the system picks aliases nothing.
        let address =
            unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, access, MapFlags::PRIVATE) }
                .map_err(|source| Error::Allocate { length, source: source.into() })?;
        let address = NonNull::new(address.cast::<u8>()).expect("a mapping has an address");
        let keep = Keep::Mapping { descriptor: None, address, length: mapped };
        Ok(Memory { address, length, place: Place::Host, _keep: keep })
    }

    /// Maps pages that a peer shared by descriptor. They must be sealed as [`Memory::shared`] seals
    /// them: were they to shrink, touching them would kill this process. The mapping outlives the
    /// descriptor, so that many regions of many peers do not use up a process's descriptors.
    pub fn map(descriptor: impl AsFd, length: usize) -> Result<Memory> {
        let failed = |source: std::io::Error| Error::Allocate { length, source };
        let seals = rustix::fs::fcntl_get_seals(&descriptor).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return Err(failed(std::io::Error::other(
                "the descriptor is not sealed against shrinking",
            )));
        }
        let held = rustix::fs::fstat(&descriptor).map_err(|e| failed(e.into()))?.st_size;
        if (held as u64) < length as u64 {
            return Err(failed(std::io::Error::other(format!(
                "the descriptor holds {held} bytes, {length} were announced"
            ))));
        }
        // SAFETY: a fresh mapping at an address that the kernel picks aliases nothing.
        let address = unsafe {
            mmap(
                std::ptr::null_mut(),
                length.max(1),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &descriptor,
                0,
            )
        }
        .map_err(|e| failed(e.into()))?;
        let address = NonNull::new(address.cast::<u8>())
            .ok_or_else(|| failed(std::io::Error::other("mapped at address zero")))?;
        let keep = Keep::Mapping { descriptor: None, address, length: length.max(1) };
        Ok(Memory { address, length, place: Place::Host, _keep: keep })
    }
}
