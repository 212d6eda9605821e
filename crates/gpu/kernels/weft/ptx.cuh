// PTX instructions without a CUDA C++ intrinsic, one function each.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define WEFT_DEVICE __device__ __forceinline__

namespace weft::ptx {

// Nanoseconds, common to all SMs on a GPU, with coarse resolution.
WEFT_DEVICE u64 globaltimer() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
// Programmatic dependent launch, without effect in a kernel that was not launched so, or on a GPU without it.
WEFT_DEVICE void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
WEFT_DEVICE void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
WEFT_DEVICE void nanosleep(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

WEFT_DEVICE u32 load_acquire_sys(const u32 *p) { u32 v; asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
WEFT_DEVICE u64 load_acquire_sys(const u64 *p) { u64 v; asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
WEFT_DEVICE u32 load_relaxed_sys(const u32 *p) { u32 v; asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
WEFT_DEVICE u64 load_relaxed_sys(const u64 *p) { u64 v; asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
WEFT_DEVICE void store_release_sys(u32 *p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
WEFT_DEVICE void store_release_sys(u64 *p, u64 v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
WEFT_DEVICE void store_relaxed_sys(u32 *p, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
WEFT_DEVICE void store_relaxed_sys(u64 *p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
// Fence at system scope: stores made or observed by this thread before it are visible to any reader of its later
// stores.
WEFT_DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
WEFT_DEVICE void add_release_sys(u32 *p, u32 v) { asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

WEFT_DEVICE u64 load_relaxed_gpu(const u64 *p) { u64 v; asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
WEFT_DEVICE u64 load_acquire_gpu(const u64 *p) { u64 v; asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
WEFT_DEVICE void store_release_gpu(u64 *p, u64 v) { asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
WEFT_DEVICE u64 compare_swap_release_gpu(u64 *p, u64 expected, u64 v) { u64 seen; asm volatile("atom.release.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(seen) : "l"(p), "l"(expected), "l"(v) : "memory"); return seen; }
WEFT_DEVICE void max_relaxed_gpu(u64 *p, u64 v) { asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

// Two 8-byte words, each atomic by itself, with no order between them.
WEFT_DEVICE void store_relaxed_sys_pair(void *p, u64 a, u64 b) { asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory"); }
WEFT_DEVICE ulonglong2 load_relaxed_sys_pair(const void *p) { ulonglong2 v; asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory"); return v; }

// 16 bytes that this kernel reads once: not allocated in L1.
WEFT_DEVICE uint4 load_stream(const void *p) { uint4 v; asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v; }
// 16 bytes from memory that is not written while the kernel runs.
WEFT_DEVICE uint4 load_constant(const void *p) { uint4 v; asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p)); return v; }
WEFT_DEVICE void store_stream(void *p, uint4 v) { asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }

// Shared-memory words passed between warps in a block.
WEFT_DEVICE u32 load_acquire_cta(const u32 *p) { u32 v; asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
WEFT_DEVICE void store_release_cta(u32 *p, u32 v) { asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

WEFT_DEVICE u32 shared_address(const void *p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Proxy fences between ordinary accesses and bulk copies, for the named state space. Without a state space the
// instruction compiles to a GPU-wide memory barrier in each thread.
WEFT_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
WEFT_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
WEFT_DEVICE void bulk_store(void *global, const void *shared, u32 bytes) { asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory"); }
WEFT_DEVICE void bulk_load(void *shared, const void *global, u32 bytes, u64 *barrier) { asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory"); }
WEFT_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but this thread's newest `N` groups are complete: the bytes are visible to it.
template <u32 N> WEFT_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
// Waits until all but this thread's newest `N` groups have been read from shared memory.
template <u32 N> WEFT_DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }

WEFT_DEVICE void mbarrier_init(u64 *barrier, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory"); }
WEFT_DEVICE void mbarrier_expect(u64 *barrier, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory"); }
WEFT_DEVICE void mbarrier_arrive(u64 *barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory"); }
WEFT_DEVICE bool mbarrier_try_wait(u64 *barrier, u32 parity) { u32 done; asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory"); return done; }

// Named barrier for `threads` threads.
WEFT_DEVICE void named_barrier(u32 name, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }

WEFT_DEVICE bool named_barrier_all(u32 name, u32 threads, bool mine) { u32 all; asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.red.and.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }" : "=r"(all) : "r"(name), "r"(threads), "r"(static_cast<u32>(mine)) : "memory"); return all; }
// Arrives at a named barrier without waiting.
WEFT_DEVICE void named_barrier_arrive(u32 name, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory"); }

// Two floats converted to e4m3, round to nearest even, saturating; `low` in the low byte.
WEFT_DEVICE u16 e4m3_pair(float low, float high) { u16 v; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low)); return v; }
WEFT_DEVICE u32 bf16_pair(float low, float high) { u32 v; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low)); return v; }
WEFT_DEVICE u32 f16_pair(float low, float high) { u32 v; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low)); return v; }
WEFT_DEVICE float f16_low(u32 v) { float f; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(f) : "r"(v)); return f; }
WEFT_DEVICE float f16_high(u32 v) { float f; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(v)); return f; }

} // namespace weft::ptx
