//! Equally long rows in plain bytes: views into areas and the caller's arrays.

use crate::area::Area;
use crate::error::Error;
use std::ops::Range;

/// Rows with `row_bytes` bytes, `stride` bytes apart.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    stride: usize,
}

impl<'a> Rows<'a> {
    /// Rows in `bytes`; `stride` is at least `row_bytes`, which is at least 1.
    pub fn new(bytes: &'a [u8], row_bytes: usize, stride: usize) -> Rows<'a> {
        assert!(0 < row_bytes && row_bytes <= stride, "rows do not overlap");
        Rows { bytes, row_bytes, stride }
    }

    /// Number of whole rows.
    pub fn count(&self) -> usize {
        whole_rows(self.bytes.len(), self.row_bytes, self.stride)
    }

    /// Row `index`; panics past the end. Callers check by [`Rows::require`] first.
    pub fn row(&self, index: usize) -> &'a [u8] {
        &self.bytes[index * self.stride..][..self.row_bytes]
    }

    /// The same stretch in each row: bytes `columns`, at least one.
    pub fn columns(&self, columns: Range<usize>) -> Rows<'a> {
        assert!(columns.end <= self.row_bytes, "a stretch of a row is within it");
        let bytes = self.bytes.get(columns.start..).unwrap_or_default();
        Rows::new(bytes, columns.len(), self.stride)
    }

    /// Rejects fewer than `count` rows, and rows with another length.
    pub fn require(&self, what: Area, count: usize, row_bytes: usize) -> Result<(), Error> {
        require(what, (self.count(), self.row_bytes), (count, row_bytes))
    }
}

/// The rows that one source sent, from a slot area: see
/// [`ReceivePlan::source_rows`](crate::ReceivePlan::source_rows).
#[derive(Clone, Copy, Debug)]
pub struct SourceRows<'a> {
    pub(crate) private: Rows<'a>,
    pub(crate) private_rows: usize,
    pub(crate) remainder: Rows<'a>,
}

impl<'a> SourceRows<'a> {
    /// The source's row `index`; panics past the end, so callers [`SourceRows::require`] first.
    pub fn row(&self, index: usize) -> &'a [u8] {
        match index.checked_sub(self.private_rows) {
            None => self.private.row(index),
            Some(index) => self.remainder.row(index),
        }
    }

    /// The same stretch in each row: bytes `columns`, at least one.
    pub fn columns(&self, columns: Range<usize>) -> SourceRows<'a> {
        SourceRows {
            private: self.private.columns(columns.clone()),
            private_rows: self.private_rows,
            remainder: self.remainder.columns(columns),
        }
    }

    /// Rejects fewer than `count` rows, and rows with another length.
    pub fn require(&self, what: Area, count: usize, row_bytes: usize) -> Result<(), Error> {
        let private = count.min(self.private_rows);
        self.private.require(what, private, row_bytes)?;
        self.remainder.require(what, count - private, row_bytes)
    }
}

/// Rows that can be written.
#[derive(Debug)]
pub struct RowsMut<'a> {
    bytes: &'a mut [u8],
    row_bytes: usize,
    stride: usize,
}

impl<'a> RowsMut<'a> {
    /// Rows in `bytes`; `stride` is at least `row_bytes`, which is at least 1.
    pub fn new(bytes: &'a mut [u8], row_bytes: usize, stride: usize) -> RowsMut<'a> {
        assert!(0 < row_bytes && row_bytes <= stride, "rows do not overlap");
        RowsMut { bytes, row_bytes, stride }
    }

    /// Number of whole rows.
    pub fn count(&self) -> usize {
        whole_rows(self.bytes.len(), self.row_bytes, self.stride)
    }

    /// Row `index`; panics past the end, so callers [`RowsMut::require`] first.
    pub fn row(&mut self, index: usize) -> &mut [u8] {
        &mut self.bytes[index * self.stride..][..self.row_bytes]
    }

    /// Rejects fewer than `count` rows, and rows with another length.
    pub fn require(&self, what: Area, count: usize, row_bytes: usize) -> Result<(), Error> {
        require(what, (self.count(), self.row_bytes), (count, row_bytes))
    }
}

fn whole_rows(bytes: usize, row_bytes: usize, stride: usize) -> usize {
    bytes.checked_sub(row_bytes).map_or(0, |rest| rest / stride + 1)
}

fn require(what: Area, given: (usize, usize), needed: (usize, usize)) -> Result<(), Error> {
    if needed.0 > 0 && given.1 != needed.1 {
        return Err(Error::RowLength { what, needed: needed.1, given: given.1 });
    }
    if given.0 < needed.0 {
        return Err(Error::TooFewRows { what, needed: needed.0, given: given.0 });
    }
    Ok(())
}
