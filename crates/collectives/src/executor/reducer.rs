//! Reducer: reductions and copies of a rank.

use super::reads::{Arithmetic, Folder, Operand};
use crate::reduction::{self, Element, Reduction};
use crate::run_error::RunError;
use std::sync::Arc;
use weft_fabric::MemoryReader;

/// Memory-bound work of a rank.
pub(super) struct Reducer {
    folder: Folder,
}

impl Reducer {
    /// Reducer with readers of all peers, by rank.
    pub fn new(readers: Vec<Option<Arc<dyn MemoryReader>>>) -> Reducer {
        Reducer { folder: Folder::new(readers) }
    }

    /// Operands of the next fold or read, to be filled in.
    pub fn operands(&mut self) -> &mut Vec<Operand> {
        self.folder.operands()
    }

    /// Folds the operands into `target`.
    ///
    /// # Safety
    /// As for [`Folder::fold`].
    pub unsafe fn fold(
        &mut self,
        how: Arithmetic,
        target: *mut u8,
        bytes: usize,
    ) -> Result<(), RunError> {
        // SAFETY: the caller's.
        unsafe { self.folder.fold(how, target, bytes) }
    }

    /// Reads the operand, or copies it, to `target`.
    ///
    /// # Safety
    /// As for [`Reducer::fold`], with one operand.
    pub unsafe fn read(&mut self, target: *mut u8, bytes: usize) -> Result<(), RunError> {
        // SAFETY: the caller's.
        unsafe { self.folder.copy(target, bytes) }
    }

    /// Writes `a op b` to `target`.
    ///
    /// # Safety
    /// As for [`reduction::combine`], with `bytes` of whole elements.
    pub unsafe fn combine(
        &mut self,
        (reduction, element): (Reduction, Element),
        target: *mut u8,
        [a, b]: [*const u8; 2],
        bytes: usize,
    ) {
        // SAFETY: the caller's.
        unsafe { reduction::combine(reduction, element, target, a, b, bytes / element.bytes()) };
    }

    /// Calls `map(target, source, bytes)`.
    ///
    /// # Safety
    /// `map` accesses this memory alone.
    pub unsafe fn map(
        &mut self,
        target: *mut u8,
        source: *const u8,
        bytes: usize,
        map: impl Fn(*mut u8, *const u8, usize),
    ) {
        map(target, source, bytes);
    }
}
