//! The memory of one set of buffers, by area.
//!
//! The one place where this crate looks at memory that peers write. What makes it sound is the
//! protocol of [`crate::exchange`]: only those rows of arrival areas are named that a counter has
//! counted and whose credit was not given back, so no peer writes them; peers may be writing other
//! rows of the same area. The other areas are this rank's alone.

use crate::rows::{Area, Rows, RowsMut};
use crate::shape::Shape;
use std::ops::Range;
use std::sync::Arc;
use weft_fabric::{Engine, Memory, Region, RegionKey};

/// One set of buffers.
#[derive(Debug)]
pub(crate) struct Areas {
    shape: Shape,
    region: Region,
    /// Packed rows on their way out; `None` if no route packs.
    staging: Option<Region>,
}

impl Areas {
    /// Allocates a set, with so many bytes to pack rows in.
    pub fn new(
        engine: &mut Engine,
        shape: &Shape,
        staging_bytes: usize,
    ) -> weft_fabric::Result<Areas> {
        let region = engine.alloc(shape.sizes().buffer_bytes() as usize)?;
        let mut areas = Areas { shape: shape.clone(), region, staging: None };
        if staging_bytes > 0 {
            match engine.alloc(staging_bytes) {
                Ok(staging) => areas.staging = Some(staging),
                Err(error) => {
                    areas.release(engine);
                    return Err(error);
                }
            }
        }
        Ok(areas)
    }

    /// Gives the memory back.
    pub fn release(&self, engine: &mut Engine) {
        engine.release(&self.region);
        if let Some(staging) = &self.staging {
            engine.release(staging);
        }
    }

    /// The region in which rows are packed, if any route packs. No peer writes there.
    pub fn staging(&self) -> Option<&Region> {
        self.staging.as_ref()
    }

    /// The region, to grant it.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Its key.
    pub fn key(&self) -> RegionKey {
        self.region.key()
    }

    /// Its memory.
    pub fn memory(&self) -> &Arc<Memory> {
        self.region.memory()
    }

    /// The bytes that peers may write: the arrival areas, which stand first.
    pub fn granted(&self) -> Range<u64> {
        0..self.shape.sizes().extent(Area::SendHeader).offset
    }

    /// The first byte of a row.
    pub fn offset(&self, area: Area, row: usize) -> u64 {
        let extent = self.shape.sizes().extent(area);
        extent.offset + row as u64 * u64::from(extent.stride)
    }

    /// Rows `rows` of an area, to read; of an arrival area, rows that have all arrived.
    pub fn rows(&self, area: Area, rows: Range<usize>) -> Rows<'_> {
        let extent = self.shape.sizes().extent(area);
        let stride = extent.stride as usize;
        let (offset, length) = (self.offset(area, rows.start) as usize, rows.len() * stride);
        // SAFETY: see the module's page: callers name rows of arrival areas between count and credit
        // only, and the other areas are written by this rank only, through `&mut self`.
        let bytes = unsafe { self.memory().bytes(offset, length) };
        Rows::new(bytes, self.shape.area_row_bytes(area), stride)
    }

    /// Rows of one area, to write, beside whatever [`Areas::rows`] of another, to read.
    ///
    /// # Panics
    /// If both are the same area.
    pub fn write_beside<'a>(
        &'a mut self,
        area: Area,
        rows: Range<usize>,
        other: Area,
    ) -> (RowsMut<'a>, impl Fn(Range<usize>) -> Rows<'a>) {
        assert_ne!(area, other, "an area is not read and written at once");
        let this = &*self;
        (this.rows_mut_unchecked(area, rows), move |rows| this.rows(other, rows))
    }

    /// Rows of an area, to write.
    pub fn rows_mut(&mut self, area: Area, rows: Range<usize>) -> RowsMut<'_> {
        self.rows_mut_unchecked(area, rows)
    }

    fn rows_mut_unchecked(&self, area: Area, rows: Range<usize>) -> RowsMut<'_> {
        let stride = self.shape.sizes().extent(area).stride as usize;
        let (offset, length) = (self.offset(area, rows.start) as usize, rows.len() * stride);
        // SAFETY: see the module's page; `write_beside` and `rows_mut` hold `&mut self`, and the
        // only other slices that live beside this one are of another area.
        let bytes = unsafe { self.memory().bytes_mut(offset, length) };
        RowsMut::new(bytes, self.shape.area_row_bytes(area), stride)
    }
}
