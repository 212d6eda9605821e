// Copies pages from one address to another: one launch for a list. `page_kernel.rs` has the host's side: layout, limits.

using u64 = unsigned long long;

struct Page {
    u64 to;
    u64 from;
    u64 length;
};

struct PageList {
    const Page* table; // in host memory
    unsigned count;
    unsigned tile;   // pages that a block takes at a time, at most TILE
    unsigned chunks; // chunks of the longest page
    unsigned chunk;  // bytes of a chunk, a multiple of 16
};

constexpr unsigned TILE = WEFT_TILE;
constexpr unsigned WARP = 32;
constexpr unsigned WORDS = sizeof(Page) / sizeof(u64);
// Loads of a lane before the first store.
constexpr unsigned DEPTH = 8;

// Copies n elements by a warp.
template <class T>
__device__ void move(u64 to, u64 from, unsigned n, unsigned lane) {
    auto* target = reinterpret_cast<T*>(to);
    auto* source = reinterpret_cast<const T*>(from);
    for (unsigned start = lane; start < n; start += WARP * DEPTH) {
        T held[DEPTH];
#pragma unroll
        for (unsigned k = 0; k < DEPTH; ++k)
            if (start + k * WARP < n) held[k] = __ldcs(source + start + k * WARP);
#pragma unroll
        for (unsigned k = 0; k < DEPTH; ++k)
            if (start + k * WARP < n) target[start + k * WARP] = held[k];
    }
}

// Copies bytes by a warp: in words of 16 bytes between single bytes at both ends where both addresses allow it, else
// in shorter ones.
__device__ void move_bytes(u64 to, u64 from, unsigned length, unsigned lane) {
    u64 apart = to ^ from;
    unsigned word = apart % 16 == 0 ? 16 : apart % 4 == 0 ? 4 : 1;
    unsigned head = unsigned(-to & (word - 1));
    head = head < length ? head : length;
    move<unsigned char>(to, from, head, lane);
    to += head, from += head, length -= head;
    unsigned body = length / word;
    if (word == 16)
        move<uint4>(to, from, body, lane);
    else if (word == 4)
        move<unsigned>(to, from, body, lane);
    else
        move<unsigned char>(to, from, body, lane);
    move<unsigned char>(to + body * word, from + body * word, length - body * word, lane);
}

extern "C" __global__ void __launch_bounds__(512) weft_copy_pages(const __grid_constant__ PageList list) {
    __shared__ Page tile[TILE];
    unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    unsigned step = gridDim.x * list.tile;
    auto held = [&](unsigned start) {
        unsigned pages = start < list.count ? min(list.tile, list.count - start) : 0;
        auto* words = reinterpret_cast<const u64*>(list.table + start);
        return threadIdx.x < pages * WORDS ? __ldcv(words + threadIdx.x) : 0;
    };
    // The next tile travels over PCIe while this one is copied.
    u64 next = held(blockIdx.x * list.tile);
    for (unsigned start = blockIdx.x * list.tile; start < list.count; start += step) {
        unsigned pages = min(list.tile, list.count - start);
        if (threadIdx.x < pages * WORDS) reinterpret_cast<u64*>(tile)[threadIdx.x] = next;
        __syncthreads();
        next = held(start + step);
        for (unsigned each = warp; each < pages * list.chunks; each += warps) {
            Page page = tile[each / list.chunks];
            u64 offset = u64(each % list.chunks) * list.chunk;
            if (offset >= page.length) continue;
            u64 rest = page.length - offset;
            unsigned length = rest < list.chunk ? unsigned(rest) : list.chunk;
            move_bytes(page.to + offset, page.from + offset, length, lane);
        }
        __syncthreads();
    }
}
