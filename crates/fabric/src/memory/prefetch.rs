//! Cache line prefetches: hints that hide transfer time behind other work, without other effect.

/// Cache line size in bytes.
const LINE: usize = 64;

/// Prefetches a range's lines for loads. The first may begin before the range.
#[inline]
pub fn lines_for_load(address: *const u8, bytes: usize) {
    let within = address.addr() % LINE;
    for offset in (0..bytes + within).step_by(LINE) {
        for_load(address.wrapping_sub(within).wrapping_add(offset));
    }
}

/// Prefetches an address's line for loads.
#[inline(always)]
pub fn for_load(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SSE is in the x86-64 baseline; prefetching any address has no architectural effect.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}

/// Prefetches an address's line for stores, exclusively.
#[inline(always)]
pub fn for_store(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: prefetching any address has no architectural effect; processors without PREFETCHW decode it
    // as no operation.
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
