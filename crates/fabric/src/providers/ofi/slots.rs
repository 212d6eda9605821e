//! Rail slots: scratch memory for each operation in flight, and how it is used.

use std::cell::UnsafeCell;
use std::ffi::c_void;

/// The provider's scratch memory for one operation (`fi_context2`).
#[repr(C, align(64))]
struct Context(UnsafeCell<[usize; 8]>);

// SAFETY: only the provider reads and writes it, under the provider's own locks.
unsafe impl Sync for Context {}

/// Operation that a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotUse {
    /// Part that the engine posted.
    Part { token: u64, peer: u32, is_bulk: bool },
    /// Part whose failure was reported when the peer was fenced.
    Abandoned,
    /// Link control message.
    Control { peer: u32 },
    /// Posted receive, for a provider that consumes one for each immediate.
    Receive,
    /// Unused.
    Free,
}

/// Slots for operations in flight, with contexts at fixed addresses.
pub struct Slots {
    contexts: Box<[Context]>,
    pub uses: Vec<SlotUse>,
    pub free: Vec<u32>,
}

impl Slots {
    pub fn new(count: usize) -> Slots {
        let contexts = (0..count).map(|_| Context(UnsafeCell::default())).collect();
        Slots {
            contexts,
            uses: vec![SlotUse::Free; count],
            free: (0..count as u32).rev().collect(),
        }
    }

    pub fn context(&self, slot: u32) -> *mut c_void {
        self.contexts[slot as usize].0.get().cast()
    }

    /// Slot for a context.
    fn of(&self, context: *mut c_void) -> Option<usize> {
        let offset = (context.addr()).wrapping_sub(self.contexts.as_ptr().addr());
        let slot = offset / size_of::<Context>();
        (offset.is_multiple_of(size_of::<Context>()) && slot < self.uses.len()).then_some(slot)
    }

    /// Frees a context's slot; returns how it was used.
    pub fn take(&mut self, context: *mut c_void) -> Option<SlotUse> {
        let slot = self.of(context)?;
        let slot_use = std::mem::replace(&mut self.uses[slot], SlotUse::Free);
        if slot_use == SlotUse::Free {
            return None;
        }
        self.free.push(slot as u32);
        Some(slot_use)
    }
}
