//! One allocation of equal size for each rank of a host, mapped by all of them.
//!
//! [`Heap::over`] makes one on a communicator. In steps: [`Heap::allocate`] allocates this rank's
//! part, zeroed; what [`HeapBuilder::offer`] says goes to every peer; [`HeapBuilder::connect`] maps the
//! peers' parts. [`Heap::local_group`] does without any of that for ranks of one process.
//!
//! # How memory is shared
//! | [`Memory`] | allocated by | travels as | needs |
//! |---|---|---|---|
//! | `Fd` | the driver's virtual memory calls | a descriptor over an abstract Unix socket | one network namespace, one user |
//! | `Ipc` | `cuMemAlloc` | a handle in the offer | one PID namespace, or what else the driver asks for |
//! | `Twin` | a sealed memory file | a descriptor, as with `Fd` | as with `Fd` |
//!
//! A descriptor is given only to a process of the same user that shows the token of its own offer,
//! which has travelled over the control plane. Whoever has mapped a part can write all of it at any
//! time: ranks of a heap trust each other.
//!
//! Descriptors and handles name memory, not a GPU's number, so each process may see GPUs of its own
//! (`CUDA_VISIBLE_DEVICES`). GPUs are told apart by UUID. Two ranks may share one. Two whose GPUs do
//! not reach each other are refused by name.
//!
//! The heap is Weft's own allocation. PyTorch's allocator has no part in it, whatever its settings
//! are, `expandable_segments:True` among them.
//!
//! # Who may die when
//! A mapping keeps what it maps. The kernel counts the references to the physical memory of `Fd` and
//! `Twin`: the owner's, each descriptor and each peer's mapping hold one, so when a rank dies its part
//! stays readable and writable for the others until they unmap it, and a kernel that is just storing
//! there does not fault. The same holds for the driver's handles of `Ipc` when the owner *dies*; but
//! CUDA leaves undefined what happens if a live owner *frees* what a peer has open. So an `Ipc` heap
//! that is dropped without [`Heap::close`] leaves its own part allocated until the process ends.
//!
//! A heap may be dropped in any order among ranks. It must not be dropped while this rank's kernels
//! use it: synchronise first.

mod connect;
mod offer;
mod over;
mod part;
mod surroundings;
mod window;

pub(crate) use over::{agree, gather};
pub use window::Window;

use crate::error::{Error, Result};
use offer::{Offer, Said};
use part::Part;
use std::sync::Arc;
use surroundings::Surroundings;
use weft_cuda::Device;
use weft_fabric::local::Exchange;

/// How a heap's memory is made and shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The driver's virtual memory, shared by descriptor.
    Fd,
    /// `cuMemAlloc`, shared by the driver's own handles.
    Ipc,
    /// A memory file on the CPU, mapped by every rank.
    Twin,
}

impl Memory {
    fn number(self) -> u8 {
        match self {
            Memory::Fd => 0,
            Memory::Ipc => 1,
            Memory::Twin => 2,
        }
    }

    fn from_number(number: u8) -> Option<Memory> {
        [Memory::Fd, Memory::Ipc, Memory::Twin].into_iter().find(|kind| kind.number() == number)
    }
}

impl std::fmt::Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Memory::Fd => "fd",
            Memory::Ipc => "ipc",
            Memory::Twin => "twin",
        })
    }
}

/// Where a rank's part lies.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// On a GPU.
    Cuda {
        /// The GPU.
        device: Device,
        /// How its memory is shared: `Fd` or `Ipc`.
        memory: Memory,
    },
    /// On the CPU.
    Twin,
}

impl Place {
    fn memory(&self) -> Memory {
        match self {
            Place::Cuda { memory, .. } => *memory,
            Place::Twin => Memory::Twin,
        }
    }
}

/// A rank's part, allocated and not yet connected.
#[derive(Debug)]
pub struct HeapBuilder {
    place: Place,
    part: Part,
    offer: Offer,
    /// Listens from now on; none for IPC.
    exchange: Option<Exchange>,
}

/// All ranks' parts, as they are mapped here.
pub struct Heap {
    rank: u32,
    bytes: u64,
    place: Place,
    /// By rank, this rank's own among them.
    parts: Vec<Arc<Part>>,
    addresses: Vec<u64>,
    /// Whether peers may have this rank's part open in a way that does not keep it.
    leaks: bool,
}

impl Heap {
    /// Allocates this rank's part, all zeros.
    ///
    /// # Errors
    /// [`Error::Empty`] for no bytes; what the driver or the system says if it has no memory.
    pub fn allocate(place: Place, bytes: u64) -> Result<HeapBuilder> {
        if bytes == 0 {
            return Err(Error::Empty { bytes, ranks: 1 });
        }
        let surroundings = Surroundings::here();
        let part = Part::allocate(&place, bytes)?;
        let exchange = match place.memory() {
            Memory::Ipc => None,
            Memory::Fd | Memory::Twin => Some(Exchange::open(&surroundings.boot)?),
        };
        let (device, device_name) = part::identity(&place);
        let offer = Offer {
            memory: place.memory(),
            bytes,
            allocated: part.len(),
            surroundings,
            device,
            device_name,
            address: exchange.as_ref().map(Exchange::address).unwrap_or_default(),
            handle: part.handle()?,
        };
        Ok(HeapBuilder { place, part, offer, exchange })
    }

    /// The heaps of a group whose ranks all live in this process, by rank. Addresses are direct;
    /// nothing travels.
    ///
    /// # Errors
    /// As [`Heap::allocate`]; [`Error::Disagreement`] for places of different kinds,
    /// [`Error::NoPeerAccess`] for two GPUs that do not reach each other.
    pub fn local_group(places: &[Place], bytes: u64) -> Result<Vec<Heap>> {
        if bytes == 0 || places.is_empty() {
            return Err(Error::Empty { bytes, ranks: places.len() });
        }
        let parts = places.iter().map(|place| Ok(Arc::new(Part::allocate(place, bytes)?)));
        let parts: Vec<Arc<Part>> = parts.collect::<Result<_>>()?;
        part::join(places, &parts)?;
        let heaps = (0..).zip(places);
        Ok(heaps
            .map(|(rank, place)| Heap::new(rank, bytes, *place, parts.clone(), false))
            .collect())
    }

    fn new(rank: u32, bytes: u64, place: Place, parts: Vec<Arc<Part>>, leaks: bool) -> Heap {
        let addresses = parts.iter().map(|part| part.address()).collect();
        Heap { rank, bytes, place, parts, addresses, leaks }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks.
    pub fn size(&self) -> u32 {
        self.parts.len() as u32
    }

    /// Bytes of each rank's part.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where this rank's part lies.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Where a rank's part is mapped here.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn address(&self, rank: u32) -> u64 {
        self.addresses[rank as usize]
    }

    /// Where each rank's part is mapped here, by rank.
    pub fn addresses(&self) -> &[u64] {
        &self.addresses
    }

    /// Where this rank's own part is.
    pub fn own(&self) -> u64 {
        self.address(self.rank)
    }

    /// A rank's part as the CPU twin uses it; none if it is on a GPU, or if there is no such rank.
    pub fn window(&self, rank: u32) -> Option<Window<'_>> {
        let base = self.parts.get(rank as usize)?.host()?;
        // SAFETY: the part is mapped for as long as `self` holds it, and has at least `bytes`.
        Some(unsafe { Window::new(base, self.bytes as usize) })
    }
}

impl std::fmt::Debug for Heap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Heap")
            .field("rank", &self.rank)
            .field("size", &self.size())
            .field("bytes", &self.bytes)
            .field("place", &self.place)
            .finish()
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        if self.leaks
            && let Some(own) = self.parts.get(self.rank as usize)
        {
            log::warn!(
                "rank {} leaves {} bytes of GPU memory allocated until the process ends: peers may \
                 still have them open (the heap was not closed by all ranks)",
                self.rank,
                own.len()
            );
            std::mem::forget(own.clone());
        }
    }
}

impl HeapBuilder {
    /// What every peer must be told, over the control plane: it holds a secret.
    pub fn offer(&self) -> Vec<u8> {
        Said::Offer(Box::new(self.offer.clone())).encode()
    }
}
