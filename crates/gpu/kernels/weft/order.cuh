// Memory order: named fences, and releasing many flags with one fence.
//
// All threads in a team store payload; a team barrier follows; then one thread releases a flag at system scope. A
// thread barrier does not cover bulk copies: the thread that issued them waits for full completion (not only until the
// source has been read), and then releases. The waiter acquires the flag in one thread; a team barrier (or __syncwarp)
// follows; then all threads in the team read.
//
// A proxy's command is such a flag, but in four quarters: the lanes that store them fence once before (release_commands
// in proxy.cuh). A word that a proxy raises is acquired as a flag is. Of several blocks that wait for one word in host
// memory one acquires it and publishes it in GPU memory with release at GPU scope; the others acquire that, which is as
// good: causality order is transitive.
#pragma once
#include "weft/ptx.cuh"

namespace weft {

// Raises a peer's word to `epoch`. Release: stores that this thread has observed complete are visible before it.
WEFT_DEVICE void signal(u32 *word, u32 epoch) { ptx::store_release_sys(word, epoch); }

// One release fence for many flags, which follow as relaxed stores in the same thread.
WEFT_DEVICE void release_many() { ptx::fence_acq_rel_sys(); }
WEFT_DEVICE void signal_released(u32 *word, u32 epoch) { ptx::store_relaxed_sys(word, epoch); }

// Proxy fence, shared memory: bulk copies issued after the next barrier read this thread's ordinary stores. Also
// required between ordinary loads from a stage and the bulk load that refills it: in each thread that has read, or in
// the thread that refills, after the readers arrive.
WEFT_DEVICE void fence_shared_for_bulk() { ptx::fence_proxy_async_shared(); }

// Proxy fence, global memory: bulk loads issued after this thread has acquired a flag read the released data.
WEFT_DEVICE void fence_global_for_bulk() { ptx::fence_proxy_async_global(); }

// Programmatic dependent launch: a kernel's blocks may start before the previous kernel in the stream has ended.
//
// Called by all threads before the first access to memory that earlier work in the stream accesses: returns once all
// that work has ended and the writes are visible.
WEFT_DEVICE void wait_for_previous_kernel() { ptx::griddepcontrol_wait(); }

// Called by one thread per block: lets the next kernel's blocks start once all blocks in this one have called it or
// have ended. Call it only after the block's last wait for a peer: blocks that start earlier would occupy SMs that
// kernels in other streams need to make progress.
WEFT_DEVICE void start_next_kernel() { ptx::griddepcontrol_launch_dependents(); }

} // namespace weft
