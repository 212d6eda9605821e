//! Prefetches of cache lines: hints that hide the time of a transfer behind other work, without other effect.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Prefetches the lines of a range for loads. The first may begin before the range.
#[inline]
pub fn lines_for_load(address: *const u8, bytes: usize) {
    let within = address.addr() % LINE;
    for offset in (0..bytes + within).step_by(LINE) {
        for_load(address.wrapping_sub(within).wrapping_add(offset));
    }
}

/// Prefetches the line of an address for loads.
#[inline(always)]
pub fn for_load(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SSE is in the baseline of x86-64; a prefetch of any address has no architectural effect.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}

/// Prefetches the line of an address for stores, exclusively.
#[inline(always)]
pub fn for_store(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch of any address has no architectural effect; processors without PREFETCHW decode it as no
    // operation.
    unsafe {
        std::arch::asm!(
            "prefetchw [{address}]",
            address = in(reg) address,
            options(nostack, preserves_flags, readonly),
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}
