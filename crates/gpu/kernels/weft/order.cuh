// Memory order: fences by name, and the release of many flags by one fence.
//
// Payload is stored by all threads of a team; a barrier of the team follows; then one thread releases a
// flag at system scope. Bulk copies are not covered by a barrier of threads: the thread that issued them
// waits for their full completion (not only for the source to be read), and then releases. The waiter
// acquires the flag in one thread; a barrier of its team (or __syncwarp) follows; then all of them read.
#pragma once
#include "weft/ptx.cuh"

namespace weft {

// Raises a peer's word to `epoch`. Release: what this thread has seen complete is visible before it.
WEFT_DEVICE void signal(u32 *word, u32 epoch) { ptx::store_release_sys(word, epoch); }

// One fence for the flags of many writes; the flags follow as relaxed stores of the same thread.
WEFT_DEVICE void release_many() { ptx::fence_acq_rel_sys(); }
WEFT_DEVICE void signal_released(u32 *word, u32 epoch) { ptx::store_relaxed_sys(word, epoch); }

// Shared memory written by this thread's ordinary stores: bulk copies issued after the next barrier read it.
// Also before a bulk load refills a stage that this thread has read by ordinary loads.
WEFT_DEVICE void fence_shared_for_bulk() { ptx::fence_proxy_async_shared(); }

// Global memory whose flag this thread has acquired: bulk loads that it issues now read what was released.
WEFT_DEVICE void fence_global_for_bulk() { ptx::fence_proxy_async_global(); }

} // namespace weft
