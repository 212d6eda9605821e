// Memory order: named fences, and the release of many flags by one fence.
//
// All threads of a team store payload; a barrier of the team follows; then one thread releases a flag at system
// scope. A barrier of threads does not cover bulk copies: the thread that issued them waits for their full
// completion (not only for the source to be read), and then releases. The waiter acquires the flag in one thread;
// a barrier of its team (or __syncwarp) follows; then all its threads read.
#pragma once
#include "weft/ptx.cuh"

namespace weft {

// Raises a peer's word to `epoch`. Release: stores that this thread has observed complete are visible before it.
WEFT_DEVICE void signal(u32 *word, u32 epoch) { ptx::store_release_sys(word, epoch); }

// One release fence for many flags, which follow as relaxed stores of the same thread.
WEFT_DEVICE void release_many() { ptx::fence_acq_rel_sys(); }
WEFT_DEVICE void signal_released(u32 *word, u32 epoch) { ptx::store_relaxed_sys(word, epoch); }

// Proxy fence, shared memory: bulk copies issued after the next barrier read this thread's ordinary stores. Also
// required between ordinary loads from a stage and the bulk load that refills it: in each thread that has read, or
// in the one that refills, after their arrival.
WEFT_DEVICE void fence_shared_for_bulk() { ptx::fence_proxy_async_shared(); }

// Proxy fence, global memory: bulk loads issued after this thread has acquired a flag read the released data.
WEFT_DEVICE void fence_global_for_bulk() { ptx::fence_proxy_async_global(); }

// Programmatic dependent launch: the blocks of a kernel may start before the previous kernel of the stream has ended.
//
// Called by all threads before the first access to memory that earlier work of the stream accesses: returns once all
// of that work has ended and its writes are visible.
WEFT_DEVICE void wait_for_previous_kernel() { ptx::griddepcontrol_wait(); }

// Called by one thread of each block: lets the blocks of the next kernel start once all blocks of this one have called
// it or have ended. Only behind the block's last wait for a peer: blocks that start earlier would occupy SMs on which
// kernels of other streams depend to make progress.
WEFT_DEVICE void start_next_kernel() { ptx::griddepcontrol_launch_dependents(); }

} // namespace weft
