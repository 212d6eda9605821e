//! Batch inputs and outputs as rows in one array: runs over neighbouring slots, and rows padded to one length.

use super::batch::Batch;
use std::ops::Range;
use std::sync::Arc;
use weft_fabric::Memory;

/// Input run: consecutive queries in a batch, in equally spaced slots: one strided copy.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// First query.
    pub first: usize,
    /// Query count.
    pub count: usize,
    /// Input bytes per query.
    pub length: u64,
    /// Row stride in `bytes`.
    pub stride: u64,
    /// From the first row's start to the last row's end. Between them are other parts of the same slots.
    pub bytes: &'a [u8],
}

impl<'a> Run<'a> {
    /// Query indexes in the run.
    pub fn queries(&self) -> Range<usize> {
        self.first..self.first + self.count
    }

    /// Input for query `index` in the run.
    ///
    /// # Panics
    /// Beyond the query count.
    pub fn row(&self, index: usize) -> &'a [u8] {
        &self.bytes[index * self.stride as usize..][..self.length as usize]
    }
}

/// Output run: memory for consecutive queries in a batch, in equally spaced slots: one strided copy.
#[derive(Debug)]
pub struct RunMut<'a> {
    /// Query count.
    pub count: usize,
    /// Output bytes per query.
    pub length: u64,
    /// Row stride in `bytes`.
    pub stride: u64,
    /// From the first row's start to the last row's end. Between them are other parts of the same slots.
    pub bytes: &'a mut [u8],
}

impl RunMut<'_> {
    /// Output for query `index` in the run.
    ///
    /// # Panics
    /// Beyond the query count.
    pub fn row(&mut self, index: usize) -> &mut [u8] {
        &mut self.bytes[index * self.stride as usize..][..self.length as usize]
    }
}

impl Batch<'_> {
    /// Memory in which the queries lie and the answers begin: each front end's, twice. It lives until the batch has
    /// ended, also if the front end is lost.
    pub fn memories(&self) -> impl Iterator<Item = &Arc<Memory>> {
        let memories = self.job.memories();
        memories
            .flat_map(|memory| [memory.incoming.region(), memory.outgoing.region()])
            .map(|region| region.memory())
    }

    /// Output memory for up to `most` queries from `first` on that have neighbouring slots and equally long outputs.
    /// Lengths are as in [`Batch::output`].
    ///
    /// # Panics
    /// Beyond the query or tensor count, and if `most` is 0.
    pub fn output_run(&mut self, first: usize, most: usize, tensor: usize) -> RunMut<'_> {
        assert!(most > 0, "a run has at least one query");
        let last = self.len().min(first + most);
        let length = self.output_length(first, tensor);
        let mut count = 1;
        while first + count < last && self.output_length(first + count, tensor) == length {
            let ((memory, slot), (other, other_slot)) =
                (self.job.place(first), self.job.place(first + count));
            if other.id != memory.id || other_slot as usize != slot as usize + count {
                break;
            }
            count += 1;
        }
        let (memory, slot) = self.job.place(first);
        let stride = memory.outgoing_layout.stride();
        let (offset, across) =
            (memory.outgoing_layout.offset(tensor), (count as u64 - 1) * stride + length);
        let bytes = memory.outgoing.write_across_in_job(slot, offset, across);
        RunMut { count, length, stride, bytes }
    }

    /// Longest input in a batch, in bytes.
    ///
    /// # Panics
    /// Beyond the tensor count.
    pub fn longest(&self, tensor: usize) -> u64 {
        (0..self.len()).map(|query| self.job.input_bytes(query, tensor)).max().unwrap_or(0)
    }

    /// All queries' inputs in order, merged where slots are neighbours and the inputs equally long.
    /// [`super::AcceleratorConfig::by_slot`] brings neighbours together.
    ///
    /// # Panics
    /// Beyond the tensor count.
    pub fn runs(&self, tensor: usize) -> impl Iterator<Item = Run<'_>> {
        let mut next = 0;
        std::iter::from_fn(move || {
            let run = (next < self.len()).then(|| self.run_at(next, tensor))?;
            next += run.count;
            Some(run)
        })
    }

    fn run_at(&self, first: usize, tensor: usize) -> Run<'_> {
        let ((memory, slot), length) = (self.job.place(first), self.job.input_bytes(first, tensor));
        let is_neighbour = |query: &usize| {
            let (other, other_slot) = self.job.place(*query);
            other.id == memory.id
                && other_slot as usize == slot as usize + (query - first)
                && self.job.input_bytes(*query, tensor) == length
        };
        let count = 1 + (first + 1..self.len()).take_while(is_neighbour).count();
        let stride = memory.incoming_layout.stride();
        let offset = memory.incoming_layout.offset(tensor);
        let bytes = memory.incoming.read_across(slot, offset, (count as u64 - 1) * stride + length);
        Run { first, count, length, stride, bytes }
    }

    /// Copies all queries' inputs into rows with `row` bytes each, the rest of each row filled with `fill`. Rows for
    /// the longest input have `batch.longest(tensor)` bytes.
    ///
    /// # Panics
    /// If `rows` has another size than `row` bytes for each query, or an input is longer than `row`.
    pub fn gather(&self, tensor: usize, row: u64, fill: u8, rows: &mut [u8]) {
        let row = row as usize;
        assert_eq!(rows.len(), self.len() * row, "rows of {row} bytes for {} queries", self.len());
        for run in self.runs(tensor) {
            for (index, query) in run.queries().enumerate() {
                let (input, padding) =
                    rows[query * row..(query + 1) * row].split_at_mut(run.length as usize);
                input.copy_from_slice(run.row(index));
                padding.fill(fill);
            }
        }
    }
}
