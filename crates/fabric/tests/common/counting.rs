//! Global allocator that counts a thread's allocations on request.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static COUNTED: Cell<Option<usize>> = const { Cell::new(None) };
}

fn count_one() {
    COUNTED.with(|counted| counted.set(counted.get().map(|count| count + 1)));
}

// SAFETY: all calls go to the system allocator; counting accesses a plain thread-local cell, which needs no
// allocation and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_one();
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_one();
        // SAFETY: the caller's contract is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `call` and counts this thread's allocations.
pub fn counting<T>(call: impl FnOnce() -> T) -> (T, usize) {
    COUNTED.set(Some(0));
    let result = call();
    (result, COUNTED.take().unwrap_or_default())
}

#[test]
fn allocations_are_seen() {
    let (vector, allocations) = counting(|| vec![1u8; 10]);
    assert_eq!((vector.len(), allocations), (10, 1));
    assert_eq!(counting(|| 1 + 1).1, 0);
}
