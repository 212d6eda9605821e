//! Symmetric heap: one equally large allocation for each rank on a host, mapped by all ranks.
//!
//! [`Heap::create`] makes one on a communicator, in these steps: [`HeapBuilder::allocate`] allocates this rank's part,
//! zeroed; [`HeapBuilder::offer`] is sent to all peers; [`HeapBuilder::connect`] maps the peers' parts.
//! [`Heap::local_group`] needs no exchange for ranks in one process.
//!
//! # How memory is shared
//! | [`MemoryKind`] | allocated by | shared as | requires |
//! |---|---|---|---|
//! | `Fd` | the driver's virtual memory calls | a descriptor over an abstract Unix socket | one network namespace, one user |
//! | `Ipc` | `cuMemAlloc` | a handle in the offer | one PID namespace, or as the driver requires |
//! | `Twin` | a sealed memory file | a descriptor, as with `Fd` | as with `Fd` |
//!
//! A descriptor is sent only to a process with the same user that presents its own offer's token, which was exchanged
//! over the control plane. A rank that has mapped a part can write all of it at any time: ranks in a heap trust each
//! other.
//!
//! Descriptors and handles identify memory, not GPU numbers, so `CUDA_VISIBLE_DEVICES` may differ between
//! processes. GPUs are identified by UUID. Ranks may share a GPU. Ranks whose GPUs lack peer access are rejected with
//! an error that names both.
//!
//! Weft allocates the heap, independent from PyTorch's allocator and settings such as `expandable_segments:True`.
//!
//! [`Heap::register`] makes a heap from user memory ([`UserMemory`]).
//!
//! # Lifetime across ranks
//! A mapping keeps the memory alive. For `Fd` and `Twin` the kernel counts references to the physical memory: the
//! owner, each descriptor and each peer mapping hold one, so when a rank dies its part stays readable and writable for
//! the others until they unmap it, and a kernel that is storing there does not fault. The same holds for `Ipc` driver
//! handles when the owner *dies*; but CUDA leaves it undefined if a live owner *frees* memory that a peer has open. So
//! an `Ipc` heap that is dropped without [`Heap::close`] leaves its own part allocated until the process ends.
//!
//! A heap may be dropped in any order among ranks. It must not be dropped while this rank's kernels
//! use it: synchronise first.
//!
//! - `location.rs`: GPU or CPU, and how memory is shared
//! - `process_identity.rs`: a process's host, namespaces and user
//! - `user_memory.rs`: user memory as a heap part
//! - `offer.rs`: offers and refusals on the control plane
//! - `part.rs`: one rank's part, allocated or mapped here
//! - `host_view.rs`: CPU view of a part
//! - `symmetric.rs`: [`Heap`], all ranks' parts
//! - `builder.rs`: [`HeapBuilder`], from a part and all ranks' offers to a heap
//! - `collective.rs`: collective calls on a communicator

mod builder;
mod collective;
mod host_view;
mod location;
mod offer;
mod part;
mod process_identity;
mod symmetric;
mod user_memory;

pub use builder::HeapBuilder;
pub use collective::agree;
pub(crate) use collective::gather;
pub use host_view::HostView;
pub use location::{MemoryKind, MemoryLocation};
pub use symmetric::Heap;
pub use user_memory::UserMemory;
