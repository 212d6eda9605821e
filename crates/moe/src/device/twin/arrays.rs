//! Call arrays, as regions with the lengths that the shape requires.

use weft_gpu::raw_memory::RawMemory;

/// Dispatch send arrays.
pub(super) struct DispatchInputArrays<'a> {
    pub(super) tokens: RawMemory<'a>,
    pub(super) scales: RawMemory<'a>,
    pub(super) ids: RawMemory<'a>,
    pub(super) weights: RawMemory<'a>,
    pub(super) count: RawMemory<'a>,
    pub(super) given: u32,
    pub(super) layer: u32,
}

/// Dispatch receive arrays.
pub(super) struct DispatchOutputArrays<'a> {
    pub(super) tokens: RawMemory<'a>,
    pub(super) scales: RawMemory<'a>,
    pub(super) counts: RawMemory<'a>,
    pub(super) offsets: RawMemory<'a>,
    pub(super) rows: RawMemory<'a>,
    pub(super) weights: RawMemory<'a>,
    pub(super) experts: RawMemory<'a>,
    pub(super) load: RawMemory<'a>,
    pub(super) load_bytes: u32,
}

impl DispatchOutputArrays<'_> {
    /// Fills the outputs with values that are not valid results.
    pub(super) fn poison(&self) {
        for array in [&self.tokens, &self.scales, &self.rows, &self.weights, &self.experts] {
            array.fill_all(0xFF);
        }
        self.clear();
    }

    /// Marks all dense rows as empty.
    pub(super) fn name_no_expert(&self) {
        self.rows.fill_all(0xFF);
        self.weights.fill_all(0);
        self.experts.fill_all(0xFF);
    }

    pub(super) fn clear(&self) {
        self.counts.fill_all(0);
        self.offsets.fill_all(0);
    }

    /// Writes element `at` in an array, if the array is given.
    pub(super) fn set(&self, array: RawMemory<'_>, at: u64, bytes: [u8; 4]) {
        if array.is_given() {
            array.set_element(0, at, bytes);
        }
    }
}

/// Combine receive arrays.
pub(super) struct CombineArrays<'a> {
    pub(super) combined: RawMemory<'a>,
    /// Added to the sums, in this order.
    pub(super) added: [RawMemory<'a>; 3],
    pub(super) count: RawMemory<'a>,
    pub(super) given: u32,
}
