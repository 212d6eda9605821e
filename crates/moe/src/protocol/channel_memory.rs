//! Channel memory, by area.
//!
//! Only this file in the crate accesses memory that peers write. Soundness rests on the
//! [`crate::protocol::channel`] protocol: in an arrival area, only rows are accessed that a counter has
//! counted and that were not credited, so no peer writes them; peers may be writing other rows in the same
//! area. Only this rank writes the other areas.

use crate::area::Area;
use crate::plan::rows::{Rows, RowsMut};
use crate::shape::Shape;
use std::ops::Range;
use std::sync::Arc;
use weft_fabric::{Engine, Memory, Region, RegionKey};

/// Memory for one channel.
#[derive(Debug)]
pub(crate) struct ChannelMemory {
    shape: Shape,
    region: Region,
    /// Staging memory for packed rows; `None` if no route packs.
    staging: Option<Region>,
}

impl ChannelMemory {
    /// Allocates a channel, with `staging_bytes` bytes for packed rows.
    pub fn new(
        engine: &mut Engine,
        shape: &Shape,
        staging_bytes: usize,
    ) -> weft_fabric::Result<ChannelMemory> {
        let region = engine.alloc(shape.sizes().channel_bytes() as usize)?;
        let mut areas = ChannelMemory { shape: shape.clone(), region, staging: None };
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

    /// Releases the memory.
    pub fn release(&self, engine: &mut Engine) {
        engine.release(&self.region);
        if let Some(staging) = &self.staging {
            engine.release(staging);
        }
    }

    /// The staging region, if any route packs. No peer writes it.
    pub fn staging(&self) -> Option<&Region> {
        self.staging.as_ref()
    }

    /// Region to grant to peers.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Region key.
    pub fn key(&self) -> RegionKey {
        self.region.key()
    }

    /// Region memory.
    pub fn memory(&self) -> &Arc<Memory> {
        self.region.memory()
    }

    /// Byte range that peers may write: the arrival areas, which come first.
    pub fn granted(&self) -> Range<u64> {
        0..self.shape.sizes().extent(Area::SendHeader).offset
    }

    /// A row's first byte.
    pub fn offset(&self, area: Area, row: usize) -> u64 {
        let extent = self.shape.sizes().extent(area);
        extent.offset + row as u64 * u64::from(extent.stride)
    }

    /// Rows `rows` in an area, for reading. In an arrival area, all these rows must have arrived.
    pub fn rows(&self, area: Area, rows: Range<usize>) -> Rows<'_> {
        let extent = self.shape.sizes().extent(area);
        let stride = extent.stride as usize;
        let (offset, length) = (self.offset(area, rows.start) as usize, rows.len() * stride);
        // SAFETY: see the module's header. Callers name rows in arrival areas only between count and credit;
        // only this rank writes the other areas, through `&mut self`.
        let bytes = unsafe { self.memory().bytes(offset, length) };
        Rows::new(bytes, self.shape.area_row_bytes(area), stride)
    }

    /// Rows in one area, for writing, and a reader for rows in another.
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

    /// Rows in an area, for writing.
    pub fn rows_mut(&mut self, area: Area, rows: Range<usize>) -> RowsMut<'_> {
        self.rows_mut_unchecked(area, rows)
    }

    fn rows_mut_unchecked(&self, area: Area, rows: Range<usize>) -> RowsMut<'_> {
        let stride = self.shape.sizes().extent(area).stride as usize;
        let (offset, length) = (self.offset(area, rows.start) as usize, rows.len() * stride);
        // SAFETY: see the module's header. `write_beside` and `rows_mut` hold `&mut self`, and the only other
        // slices that live at the same time are in another area.
        let bytes = unsafe { self.memory().bytes_mut(offset, length) };
        RowsMut::new(bytes, self.shape.area_row_bytes(area), stride)
    }
}
