// crates/gpu/kernels/weft/ptx.cuh instructions for the host, with which a C++ compiler compiles the device headers.
// A block has one thread, which may stand for a warp's lanes in turn (weft_each_lane).
#pragma once
#include <sched.h>
#include <time.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define WEFT_DEVICE inline
#define __device__ inline
#define __noinline__ __attribute__((noinline, unused))

struct uint4 { u32 x, y, z, w; };

// Lanes in turn: the later ones take from a shuffle what the first one has put into it.
struct Lanes { u64 shuffled[4]; u32 next; };
inline thread_local struct { u32 x; } threadIdx = {0};
inline thread_local Lanes lanes = {};
template <typename F> inline void weft_each_lane(u32 count, const F &work) {
    for (u32 lane = 0; lane < count; ++lane) threadIdx.x = lane, lanes.next = 0, work(lane);
    threadIdx.x = 0;
}
template <typename T> inline T weft_shuffle(T value) {
    if (lanes.next == sizeof lanes.shuffled / sizeof(u64)) return value;
    u64 &kept = lanes.shuffled[lanes.next++];
    if (threadIdx.x == 0) kept = value;
    return static_cast<T>(kept);
}

// Called at each fence with system scope, if a test has set it: what the thread has stored is visible then.
inline void (*on_system_fence)() = nullptr;

static inline u32 atomicCAS(u32 *p, u32 expected, u32 value) { __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); return expected; }
static inline u64 atomicCAS(u64 *p, u64 expected, u64 value) { __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); return expected; }
static inline u32 atomicExch(u32 *p, u32 value) { return __atomic_exchange_n(p, value, __ATOMIC_RELAXED); }

static inline u64 atomicAdd(u64 *p, u64 value) { return __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }
static inline u32 __shfl_sync(u32, u32 value, int) { return weft_shuffle(value); }
static inline u64 __shfl_sync(u32, u64 value, int) { return weft_shuffle(value); }
static inline u32 __popc(u32 value) { return static_cast<u32>(__builtin_popcount(value)); }
static inline void __syncwarp() {}

namespace weft::ptx {

WEFT_DEVICE u64 globaltimer() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); sched_yield(); return t.tv_sec * 1000000000ull + t.tv_nsec; }
WEFT_DEVICE void griddepcontrol_wait() {}
WEFT_DEVICE void griddepcontrol_launch_dependents() {}

WEFT_DEVICE u32 load_acquire_sys(const u32 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
WEFT_DEVICE u64 load_acquire_sys(const u64 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
WEFT_DEVICE u32 load_relaxed_sys(const u32 *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
WEFT_DEVICE void store_release_sys(u32 *p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
WEFT_DEVICE void store_relaxed_sys(u32 *p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
WEFT_DEVICE u64 load_relaxed_gpu(const u64 *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
WEFT_DEVICE u64 load_acquire_gpu(const u64 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
WEFT_DEVICE void store_release_gpu(u64 *p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
WEFT_DEVICE u64 compare_swap_release_gpu(u64 *p, u64 expected, u64 v) { __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED); return expected; }
WEFT_DEVICE void max_relaxed_gpu(u64 *p, u64 v) { for (u64 seen = load_relaxed_gpu(p); seen < v && !__atomic_compare_exchange_n(p, &seen, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);) {} }
WEFT_DEVICE void store_relaxed_sys_pair(void *p, u64 a, u64 b) { u64 *to = static_cast<u64 *>(p); __atomic_store_n(to, a, __ATOMIC_RELAXED), __atomic_store_n(to + 1, b, __ATOMIC_RELAXED); }
WEFT_DEVICE void fence_acq_rel_sys() { __atomic_thread_fence(__ATOMIC_ACQ_REL); if (on_system_fence != nullptr) on_system_fence(); }

WEFT_DEVICE uint4 load_stream(const void *p) { return *static_cast<const uint4 *>(p); }
WEFT_DEVICE void store_stream(void *p, uint4 v) { *static_cast<uint4 *>(p) = v; }

WEFT_DEVICE void fence_proxy_async_shared() {}
WEFT_DEVICE void fence_proxy_async_global() {}
WEFT_DEVICE bool mbarrier_try_wait(u64 *, u32) { return true; }
WEFT_DEVICE void named_barrier(u32, u32) {}
WEFT_DEVICE bool named_barrier_all(u32, u32, bool mine) { return mine; }

} // namespace weft::ptx
