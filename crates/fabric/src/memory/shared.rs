//! Shareable memory: pages in a sealed memory file, with NUMA and huge page placement, and mappings of
//! peers' memory.

use super::placement::Placement;
use super::{Memory, MemoryKind, MemoryOwner, huge, numa};
use crate::error::{Error, Result};
use rustix::fd::AsFd;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use std::io;
use std::ptr::NonNull;

impl Memory {
    /// Anonymous zeroed pages, shareable by descriptor. The system frees them with the last process that
    /// maps them.
    pub fn shared(length: usize) -> Result<Memory> {
        Memory::shared_with(length, Placement::default())
    }

    /// Same as [`Memory::shared`], with pages placed as `placement` demands. Huge pages round the mapping
    /// up to a multiple of 2 MiB; the memory keeps the requested length.
    ///
    /// # Errors
    /// [`Error::Allocate`]; [`Error::NoNumaNode`] and [`Error::NumaBind`] for a node;
    /// [`Error::HugePages`] if the system has too few.
    pub fn shared_with(length: usize, placement: Placement) -> Result<Memory> {
        if cfg!(miri) {
            return Memory::anonymous(length);
        }
        let node = placement.numa_node.map(numa::find).transpose()?;
        let failed = |source: io::Error| match placement.huge_pages {
            true => huge::refused(length, placement.numa_node, source),
            false => Error::Allocate { length, source },
        };
        let memory = create(length, placement.huge_pages).map_err(failed)?;
        if let Some(node) = node {
            node.bind(memory.address, memory.mapped())?;
        }
        if placement.huge_pages
            && let Err(source) = huge::populate(memory.address, memory.mapped())
        {
            // Pages allocated so far are freed before the error counts the free ones.
            drop(memory);
            return Err(failed(source));
        }
        Ok(memory)
    }

    /// Zeroed pages without a file, which take no memory before they are touched: staging slots. A child
    /// process maps the same pages, so a fork moves none that a device reads or writes. Also for miri, which
    /// has no memory files and no shared mappings; enough for tests within one process, such as the simulator's.
    pub(crate) fn anonymous(length: usize) -> Result<Memory> {
        let mapped = length.max(1);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags =
            if cfg!(miri) { MapFlags::PRIVATE } else { MapFlags::SHARED | MapFlags::NORESERVE };
        // SAFETY: a fresh mapping at an address that the system picks has no aliases.
        let address = unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, access, flags) }
            .map_err(|source| Error::Allocate { length, source: source.into() })?;
        let address = NonNull::new(address.cast::<u8>()).expect("a mapping has an address");
        let owner = MemoryOwner::Mapping { descriptor: None, address, length: mapped };
        Ok(Memory::new(address, length, MemoryKind::Host, owner))
    }

    /// Maps pages that a peer shared by descriptor, also huge pages. They must be sealed as by
    /// [`Memory::shared`]: an access to shrunk memory would kill this process. The mapping outlives the
    /// descriptor, so many peers' regions do not exhaust the process's descriptors.
    pub fn map(descriptor: impl AsFd, length: usize) -> Result<Memory> {
        map(descriptor, length).map_err(|source| Error::Allocate { length, source })
    }

    /// Mapped bytes: the length, rounded up to whole file pages.
    fn mapped(&self) -> usize {
        match &self.owner {
            MemoryOwner::Mapping { length, .. } => *length,
            _ => self.length,
        }
    }
}

/// A new memory file, sealed and mapped.
fn create(length: usize, huge_pages: bool) -> io::Result<Memory> {
    let (kind, page) = match huge_pages {
        true => (MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, huge::PAGE),
        false => (MemfdFlags::empty(), 1),
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind;
    let descriptor = rustix::fs::memfd_create("weft", flags)?;
    rustix::fs::ftruncate(&descriptor, round_up(length, page)? as u64)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&descriptor, seals)?;
    let mut memory = map(&descriptor, length)?;
    if let MemoryOwner::Mapping { descriptor: owner, .. } = &mut memory.owner {
        *owner = Some(descriptor);
    }
    Ok(memory)
}

fn map(descriptor: impl AsFd, length: usize) -> io::Result<Memory> {
    let seals = rustix::fs::fcntl_get_seals(&descriptor).unwrap_or(SealFlags::empty());
    if !seals.contains(SealFlags::SHRINK) {
        return Err(io::Error::other("the descriptor is not sealed against shrinking"));
    }
    let file = rustix::fs::fstat(&descriptor)?;
    if (file.st_size as u64) < length as u64 {
        let held = file.st_size;
        return Err(io::Error::other(format!(
            "the descriptor holds {held} bytes, {length} were announced"
        )));
    }
    // The kernel unmaps huge pages as a whole or not at all.
    let mapped = round_up(length, usize::try_from(file.st_blksize).unwrap_or(1))?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let anywhere = std::ptr::null_mut();
    // SAFETY: a fresh mapping at an address that the kernel picks has no aliases.
    let address = unsafe { mmap(anywhere, mapped, access, MapFlags::SHARED, &descriptor, 0) }?;
    let address = NonNull::new(address.cast::<u8>());
    let address = address.ok_or_else(|| io::Error::other("mapped at address zero"))?;
    let owner = MemoryOwner::Mapping { descriptor: None, address, length: mapped };
    Ok(Memory::new(address, length, MemoryKind::Host, owner))
}

/// Smallest multiple of `page` that holds `length` bytes, at least one page.
fn round_up(length: usize, page: usize) -> io::Result<usize> {
    let whole = length.max(1).checked_next_multiple_of(page.max(1));
    whole.ok_or_else(|| io::Error::other("more bytes than there are addresses"))
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    const HUGE: Placement = Placement { numa_node: None, huge_pages: true };

    /// Memory in huge pages; `None` without any, after checking the error.
    fn huge(length: usize, placement: Placement) -> Option<Memory> {
        match Memory::shared_with(length, placement) {
            Ok(memory) => Some(memory),
            Err(Error::HugePages { detail, .. }) => {
                assert!(detail.contains("leave huge_pages out"), "{detail}");
                eprintln!("skipped: {detail}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn huge_pages_are_mapped_by_their_descriptor_and_unmapped() {
        for placement in [HUGE, Placement { numa_node: Some(0), ..HUGE }] {
            let Some(memory) = huge(huge::PAGE + 5, placement) else { continue };
            assert_eq!(memory.len(), huge::PAGE + 5);
            assert_eq!(memory.mapped(), 2 * huge::PAGE);
            assert_eq!(memory.address() % huge::PAGE as u64, 0);
            memory.copy_in(huge::PAGE, b"woven");
            let peer = Memory::map(memory.descriptor().expect("shareable"), memory.len());
            let peer = peer.expect("mapped");
            let mut bytes = [1; 6];
            peer.copy_out(huge::PAGE - 1, &mut bytes);
            assert_eq!(&bytes, b"\0woven");
            // Drop asserts that `munmap` succeeded, which it does for whole huge pages only.
        }
    }

    #[test]
    fn huge_pages_are_sealed() {
        let Some(memory) = huge(5, HUGE) else { return };
        let descriptor = memory.descriptor().expect("shareable");
        let shrunk = rustix::fs::ftruncate(descriptor, 0);
        assert_eq!(shrunk, Err(rustix::io::Errno::PERM));
    }

    #[test]
    fn too_many_huge_pages_are_an_error_that_counts_them() {
        let error = Memory::shared_with(1 << 44, HUGE).expect_err("16 TiB").to_string();
        assert!(error.starts_with("17592186044416 bytes in huge pages of 2 MiB: "), "{error}");
        assert!(error.ends_with("leave huge_pages out"), "{error}");
        let none = error.contains("this kernel has none");
        assert!(none || error.contains("8388608 pages needed"), "{error}");
        assert!(none || error.contains("sysctl -w vm.nr_hugepages="), "{error}");
    }

    #[test]
    fn a_length_beyond_all_addresses_is_an_error() {
        for placement in [HUGE, Placement::default()] {
            assert!(Memory::shared_with(usize::MAX, placement).is_err());
        }
    }

    #[test]
    fn memory_that_could_shrink_is_not_mapped() {
        let open = rustix::fs::memfd_create("weft", MemfdFlags::ALLOW_SEALING).expect("a file");
        let error = Memory::map(&open, 1).expect_err("not sealed").to_string();
        assert!(error.contains("not sealed against shrinking"), "{error}");
    }

    #[test]
    fn a_mapping_longer_than_its_file_is_an_error() {
        let memory = Memory::shared(5).expect("memory");
        let descriptor = memory.descriptor().expect("shareable");
        let error = Memory::map(descriptor, 6).expect_err("a byte too many").to_string();
        assert!(error.contains("holds 5 bytes, 6 were announced"), "{error}");
    }
}
