//! Byte copies that take the same time at every distance between target and source.
//!
//! The C library and the kernel copy long ranges by `rep movsb`. On AMD Zen 3 this is many times slower
//! if the target lies 1 to 31 bytes behind the source, both as page offsets. Whole-page vectors that
//! `malloc` returns one after another are 16 bytes apart in this sense, and so are a page and a long
//! `malloc` vector. (For Zen 4 see [glibc bug
//! 30994](https://sourceware.org/bugzilla/show_bug.cgi?id=30994).)

/// Page size in bytes.
const PAGE: usize = 4096;
/// Smallest distance in a page at which `rep movsb` is fast.
const FAST_DISTANCE: usize = 32;
/// Bytes that the C library copies without `rep movsb`.
const PIECE: usize = 2048;

/// True if `rep movsb` is slow between these addresses.
#[inline]
pub(crate) fn is_slow(source: usize, target: usize, length: usize) -> bool {
    let distance = target.wrapping_sub(source) % PAGE;
    length > PIECE && distance > 0 && distance < FAST_DISTANCE
}

/// Copies `length` bytes from `source` to `target`. The ranges may overlap.
///
/// # Safety
/// As for [`std::ptr::copy`].
#[inline]
pub unsafe fn copy_bytes(source: *const u8, target: *mut u8, length: usize) {
    let overlap = source.addr().abs_diff(target.addr()) < length;
    if overlap || !is_slow(source.addr(), target.addr(), length) {
        // SAFETY: the caller's.
        unsafe { std::ptr::copy(source, target, length) };
        return;
    }
    for start in (0..length).step_by(PIECE) {
        let piece = PIECE.min(length - start);
        // SAFETY: the caller's, for a segment in both ranges, which do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(source.add(start), target.add(start), piece) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_copied_at_all_distances() {
        let source: Vec<u8> = (0..4 * PAGE).map(|i| (i % 251) as u8).collect();
        for distance in [0, 1, 16, 31, 32, PAGE + 16, 2 * PAGE - 1] {
            for length in [0, 1, PIECE, PIECE + 1, 2 * PAGE] {
                let mut apart = vec![0; 5 * PAGE];
                let shift = (source.as_ptr().addr().wrapping_sub(apart.as_ptr().addr())) % PAGE;
                let start = shift + distance;
                let mut within = source.clone();
                // SAFETY: the vectors have more bytes.
                unsafe {
                    copy_bytes(source.as_ptr(), apart.as_mut_ptr().add(start), length);
                    let from = within.as_ptr();
                    copy_bytes(from, within.as_mut_ptr().add(distance), length);
                }
                assert_eq!(apart[start..start + length], source[..length]);
                assert!(apart[..start].iter().chain(&apart[start + length..]).all(|one| *one == 0));
                assert_eq!(within[distance..distance + length], source[..length]);
            }
        }
    }

    #[test]
    fn distances_are_those_within_a_page() {
        assert!(is_slow(PAGE, 7 * PAGE + 16, PAGE));
        assert!(is_slow(PAGE + 8, 9, PAGE));
        assert!(is_slow(2 * PAGE - 1, 15, PAGE));
        assert!(!is_slow(PAGE, PAGE, PAGE));
        assert!(!is_slow(16, 8, PAGE));
        assert!(!is_slow(0, FAST_DISTANCE, PAGE));
        assert!(!is_slow(0, 16, PIECE));
    }
}
