//! One rank's heap part, allocated or mapped here.

use super::location::{MemoryKind, MemoryLocation};
use super::offer::{DriverHandle, Offer};
use super::user_memory::{MappedFile, SharedUserMemory};
use crate::error::{Error, Result};
use rustix::fd::{AsFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use weft_control::Rank;
use weft_cuda::{
    Context, Device, DeviceMemory, IpcHandle, PeerMemory, Stream, VirtualMemory, driver,
    set_bytes_async,
};
use weft_fabric::{Memory, MemoryKind as MemoryOn, Reader};

/// A part, allocated by this process or mapped by it.
pub(super) enum HeapPart {
    /// Virtual memory, own or a peer's, shared by descriptor.
    Virtual(VirtualMemory),
    /// Own memory, shared by handle.
    Device(DeviceMemory),
    /// A peer's memory, opened by handle.
    Peer(PeerMemory),
    /// CPU memory, own or a peer's.
    Twin(Arc<Memory>),
    /// User memory in this process.
    User(SharedUserMemory),
    /// A peer user's file, on the CPU.
    PeerFile(MappedFile),
}

impl HeapPart {
    /// Allocates a zeroed part.
    pub fn allocate(location: &MemoryLocation, bytes: u64) -> Result<HeapPart> {
        let length = length(bytes)?;
        let MemoryLocation::Cuda { device, memory } = location else {
            return Ok(HeapPart::Twin(Arc::new(Memory::shared(length)?)));
        };
        let context = Context::primary(*device)?;
        let part = match memory {
            MemoryKind::Fd => HeapPart::Virtual(VirtualMemory::create(&context, length)?),
            MemoryKind::Ipc => HeapPart::Device(DeviceMemory::alloc(&context, length)?),
            MemoryKind::Twin => return Err(Error::TwinOnDevice { device: device.to_string() }),
        };
        // GPU memory holds old data, and all flags must start at zero.
        let stream = Stream::create(&context)?;
        let _bound = context.enter()?;
        set_bytes_async(part.address(), 0, length, stream.stream())?;
        stream.synchronize()?;
        Ok(part)
    }

    /// Maps a peer's part, with the descriptor if it is shared by descriptor.
    pub fn import(
        location: &MemoryLocation,
        peer: Rank,
        descriptor: Option<OwnedFd>,
        offer: &Offer,
    ) -> Result<HeapPart> {
        let missing = |what| Error::Malformed { peer, detail: format!("no {what}") };
        let descriptor = || descriptor.ok_or_else(|| missing("descriptor"));
        let MemoryLocation::Cuda { device, memory } = location else {
            if let Some(offset) = offer.file_offset {
                let mapped = MappedFile::new(peer, &descriptor()?, offset, offer.bytes)?;
                return Ok(HeapPart::PeerFile(mapped));
            }
            let memory = Memory::map(descriptor()?, length(offer.bytes)?)?;
            return Ok(HeapPart::Twin(Arc::new(memory)));
        };
        let context = Context::primary(*device)?;
        if *memory == MemoryKind::Ipc {
            let DriverHandle { handle, offset } =
                offer.handle.clone().ok_or_else(|| missing("handle"))?;
            let handle = IpcHandle { handle, offset, bytes: offer.bytes };
            return Ok(HeapPart::Peer(PeerMemory::open_ipc(&context, &handle)?));
        }
        let allocated = length(offer.allocated)?;
        Ok(HeapPart::Virtual(VirtualMemory::import(&context, descriptor()?, allocated)?))
    }

    /// Descriptor for the peers, if it is shared by descriptor.
    pub fn descriptor(&self) -> Result<Option<OwnedFd>> {
        match self {
            HeapPart::Virtual(memory) => Ok(Some(memory.export()?)),
            HeapPart::Twin(memory) => {
                let copy = memory.descriptor().map(|held| held.as_fd().try_clone_to_owned());
                let unusable = |error| weft_fabric::Error::system("cannot share a heap", error);
                Ok(copy.transpose().map_err(unusable)?)
            }
            HeapPart::User(memory) => memory.descriptor(),
            HeapPart::Device(_) | HeapPart::Peer(_) | HeapPart::PeerFile(_) => Ok(None),
        }
    }

    /// Offset in the user's file, if it lies in one.
    pub fn file_offset(&self) -> Option<u64> {
        match self {
            HeapPart::User(memory) => memory.file_offset(),
            _ => None,
        }
    }

    /// Driver handle, if it is shared by handle.
    pub fn handle(&self) -> Result<Option<DriverHandle>> {
        let memory = match self {
            HeapPart::Device(memory) => memory,
            HeapPart::User(memory) => return Ok(memory.handle()),
            _ => return Ok(None),
        };
        let IpcHandle { handle, offset, .. } = memory.ipc_handle()?;
        Ok(Some(DriverHandle { handle, offset }))
    }

    pub fn address(&self) -> u64 {
        match self {
            HeapPart::Virtual(memory) => memory.address(),
            HeapPart::Device(memory) => memory.address(),
            HeapPart::Peer(memory) => memory.address(),
            HeapPart::Twin(memory) => memory.address(),
            HeapPart::User(memory) => memory.address(),
            HeapPart::PeerFile(memory) => memory.address(),
        }
    }

    /// Length in bytes, at least the requested one.
    pub fn len(&self) -> u64 {
        let length = match self {
            HeapPart::User(memory) => return memory.len(),
            HeapPart::PeerFile(memory) => memory.len(),
            HeapPart::Virtual(memory) => memory.len(),
            HeapPart::Device(memory) => memory.len(),
            HeapPart::Peer(memory) => memory.len(),
            HeapPart::Twin(memory) => memory.len(),
        };
        length as u64
    }

    /// This rank's own part as memory for regions, kept alive by it. Peers load from the part as well, so that writes
    /// into it are for all readers. A part that is shared by descriptor may be mapped by other processes.
    pub fn region_memory(self: &Arc<HeapPart>, location: &MemoryLocation) -> Result<Arc<Memory>> {
        if let HeapPart::Twin(memory) = &**self {
            return Ok(memory.clone());
        }
        let address = NonNull::new(self.address() as *mut u8).unwrap_or(NonNull::dangling());
        let (bytes, owner) = (length(self.len())?, Box::new(self.clone()));
        let MemoryLocation::Cuda { device, .. } = location else {
            // SAFETY: the part keeps its bytes mapped at this address while `owner` lives.
            let memory = unsafe { Memory::user_buffer(address, bytes, MemoryOn::Host, owner) };
            return Ok(Arc::new(memory));
        };
        let (ordinal, descriptor) = (device.ordinal(), self.descriptor()?);
        // SAFETY: as above, on this rank's GPU.
        let memory = unsafe { Memory::on_device(address, bytes, ordinal, descriptor, owner) };
        Ok(Arc::new(memory.read_by(Reader::All)))
    }

    /// CPU address of a twin part.
    pub fn host(&self) -> Option<NonNull<u8>> {
        match self {
            HeapPart::Twin(memory) => memory.host(),
            _ => None,
        }
    }
}

impl std::fmt::Debug for HeapPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HeapPart({} bytes at {:#x})", self.len(), self.address())
    }
}

/// UUID and name of a location's GPU; zeros for the CPU.
pub(super) fn identity(location: &MemoryLocation) -> ([u8; 16], String) {
    match location {
        MemoryLocation::Cuda { device, .. } => (device.uuid(), described(*device)),
        MemoryLocation::Twin => ([0; 16], "the CPU".to_owned()),
    }
}

/// GPU with the PCI address, for errors: GPU numbers differ between processes, addresses do not.
fn described(device: Device) -> String {
    format!("{device} at {}", device.bus_id())
}

/// Checks that this location's GPU can access a peer's. Access to a GPU that is hidden from this process is detected
/// only when the memory is mapped.
pub(super) fn admit(
    location: &MemoryLocation,
    rank: u32,
    peer: Rank,
    theirs: &Offer,
) -> Result<()> {
    let MemoryLocation::Cuda { device, .. } = location else { return Ok(()) };
    if device.uuid() == theirs.device {
        return Ok(());
    }
    let reached = match visible(theirs.device)? {
        Some(other) => device.can_access(other)?,
        None => !device.is_mig(),
    };
    if reached {
        return Ok(());
    }
    let (here, there) = (described(*device), theirs.device_name.clone());
    Err(Error::NoPeerAccess { rank, peer, here, there })
}

/// GPU with this UUID, if visible to this process.
fn visible(uuid: [u8; 16]) -> Result<Option<Device>> {
    let driver = driver()?;
    for ordinal in 0..driver.device_count()? {
        let device = driver.device(ordinal)?;
        if device.uuid() == uuid {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

/// Gives all ranks in this process access to all parts.
pub(super) fn join(locations: &[MemoryLocation], parts: &[Arc<HeapPart>]) -> Result<()> {
    for (rank, location) in (0..).zip(locations) {
        for (peer, (other, part)) in (0..).map(Rank).zip(locations.iter().zip(parts)) {
            if location.memory() != other.memory() {
                let kind = |location: &MemoryLocation| format!("memory=\"{}\"", location.memory());
                return Err(Error::Disagreement {
                    peer,
                    ours: kind(location),
                    theirs: kind(other),
                });
            }
            let (MemoryLocation::Cuda { device, .. }, MemoryLocation::Cuda { device: owner, .. }) =
                (location, other)
            else {
                continue;
            };
            if device == owner {
                continue;
            }
            if !device.can_access(*owner)? {
                let (here, there) = (described(*device), described(*owner));
                return Err(Error::NoPeerAccess { rank, peer, here, there });
            }
            match &**part {
                HeapPart::Virtual(memory) => memory.allow(*device)?,
                HeapPart::Device(memory) => {
                    Context::primary(*device)?.enable_peer(memory.context())?;
                }
                HeapPart::Peer(_)
                | HeapPart::Twin(_)
                | HeapPart::User(_)
                | HeapPart::PeerFile(_) => {}
            }
        }
    }
    Ok(())
}

fn length(bytes: u64) -> Result<usize> {
    let too_many = |_| weft_fabric::Error::Limit {
        what: "bytes of a heap in this process",
        wanted: bytes,
        limit: usize::MAX as u64,
    };
    Ok(usize::try_from(bytes).map_err(too_many)?)
}
