//! One rank's part of a heap, as it is allocated or mapped here.

use super::offer::{Handle, Offer};
use super::{Memory, Place};
use crate::error::{Error, Result};
use rustix::fd::{AsFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use weft_control::Rank;
use weft_cuda::{
    Context, Device, DeviceMemory, IpcHandle, PeerMemory, Stream, VirtualMemory, driver,
    set_bytes_async,
};

/// Allocated by this process, or mapped by it.
pub(super) enum Part {
    /// Shared by descriptor, ours or a peer's.
    Virtual(VirtualMemory),
    /// Ours, shared by handle.
    Device(DeviceMemory),
    /// A peer's, opened by handle.
    Peer(PeerMemory),
    /// On the CPU, ours or a peer's.
    Twin(weft_fabric::Memory),
}

impl Part {
    /// Allocates, all zeros.
    pub fn allocate(place: &Place, bytes: u64) -> Result<Part> {
        let length = length(bytes)?;
        let Place::Cuda { device, memory } = place else {
            return Ok(Part::Twin(weft_fabric::Memory::shared(length)?));
        };
        let context = Context::primary(*device)?;
        let part = match memory {
            Memory::Fd => Part::Virtual(VirtualMemory::create(&context, length)?),
            Memory::Ipc => Part::Device(DeviceMemory::alloc(&context, length)?),
            Memory::Twin => return Err(Error::TwinOnDevice { device: device.to_string() }),
        };
        // What a GPU gives holds what was there before, and every flag must begin at zero.
        let stream = Stream::create(&context)?;
        let _bound = context.enter()?;
        set_bytes_async(part.address(), 0, length, stream.stream())?;
        stream.synchronize()?;
        Ok(part)
    }

    /// Maps what a peer has offered, with the descriptor that it gave.
    pub fn import(
        place: &Place,
        peer: Rank,
        descriptor: Option<OwnedFd>,
        offer: &Offer,
    ) -> Result<Part> {
        let missing = |what| Error::Malformed { peer, detail: format!("it came without a {what}") };
        let descriptor = || descriptor.ok_or_else(|| missing("descriptor"));
        let Place::Cuda { device, memory } = place else {
            let memory = weft_fabric::Memory::map(descriptor()?, length(offer.bytes)?)?;
            return Ok(Part::Twin(memory));
        };
        let context = Context::primary(*device)?;
        if *memory == Memory::Ipc {
            let Handle { handle, offset } =
                offer.handle.clone().ok_or_else(|| missing("handle"))?;
            let handle = IpcHandle { handle, offset, bytes: offer.bytes };
            return Ok(Part::Peer(PeerMemory::open_ipc(&context, &handle)?));
        }
        let allocated = length(offer.allocated)?;
        Ok(Part::Virtual(VirtualMemory::import(&context, descriptor()?, allocated)?))
    }

    /// A descriptor for the peers, if that is how it is shared.
    pub fn descriptor(&self) -> Result<Option<OwnedFd>> {
        match self {
            Part::Virtual(memory) => Ok(Some(memory.export()?)),
            Part::Twin(memory) => {
                let copy = memory.descriptor().map(|held| held.as_fd().try_clone_to_owned());
                let unusable = |error| weft_fabric::Error::system("cannot share a heap", error);
                Ok(copy.transpose().map_err(unusable)?)
            }
            Part::Device(_) | Part::Peer(_) => Ok(None),
        }
    }

    /// A handle of the driver, if that is how it is shared.
    pub fn handle(&self) -> Result<Option<Handle>> {
        let Part::Device(memory) = self else { return Ok(None) };
        let IpcHandle { handle, offset, .. } = memory.ipc_handle()?;
        Ok(Some(Handle { handle, offset }))
    }

    pub fn address(&self) -> u64 {
        match self {
            Part::Virtual(memory) => memory.address(),
            Part::Device(memory) => memory.address(),
            Part::Peer(memory) => memory.address(),
            Part::Twin(memory) => memory.address(),
        }
    }

    /// Bytes, which may be more than were asked for.
    pub fn len(&self) -> u64 {
        let length = match self {
            Part::Virtual(memory) => memory.len(),
            Part::Device(memory) => memory.len(),
            Part::Peer(memory) => memory.len(),
            Part::Twin(memory) => memory.len(),
        };
        length as u64
    }

    /// Where the CPU reaches it, if it does.
    pub fn host(&self) -> Option<NonNull<u8>> {
        match self {
            Part::Twin(memory) => memory.host(),
            _ => None,
        }
    }
}

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Part({} bytes at {:#x})", self.len(), self.address())
    }
}

/// UUID and name of a place's GPU; zeros for the CPU.
pub(super) fn identity(place: &Place) -> ([u8; 16], String) {
    match place {
        Place::Cuda { device, .. } => (device.uuid(), described(*device)),
        Place::Twin => ([0; 16], "the CPU".to_owned()),
    }
}

/// A GPU for an error: its number may be another in every process, its place on the bus is not.
fn described(device: Device) -> String {
    format!("{device} at {}", device.bus_id())
}

/// Refuses a peer whose memory this place's GPU cannot reach. Of a GPU that this process does not
/// see, only mapping its memory will tell.
pub(super) fn admit(place: &Place, rank: u32, peer: Rank, theirs: &Offer) -> Result<()> {
    let Place::Cuda { device, .. } = place else { return Ok(()) };
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

/// The GPU of this UUID, if this process sees it.
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

/// Lets every rank of this process reach every part at the address that it has.
pub(super) fn join(places: &[Place], parts: &[Arc<Part>]) -> Result<()> {
    for (rank, place) in (0..).zip(places) {
        for (peer, (other, part)) in (0..).map(Rank).zip(places.iter().zip(parts)) {
            if place.memory() != other.memory() {
                let kind = |place: &Place| format!("memory=\"{}\"", place.memory());
                return Err(Error::Disagreement { peer, ours: kind(place), theirs: kind(other) });
            }
            let (Place::Cuda { device, .. }, Place::Cuda { device: owner, .. }) = (place, other)
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
                Part::Virtual(memory) => memory.allow(*device)?,
                Part::Device(memory) => {
                    Context::primary(*device)?.enable_peer(memory.context())?;
                }
                Part::Peer(_) | Part::Twin(_) => {}
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
