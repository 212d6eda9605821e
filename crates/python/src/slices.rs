//! Slices of regions, as Python passes them.

use crate::errors::Error;
use crate::numbers::{
    Count, DestinationOffset, DestinationStride, Length, SourceOffset, SourceStride,
};
use weft_fabric::{Page, RegionKey, StridedPages};

/// Slices: source region, offset, the peer's region, offset, length; slice count, and the strides in bytes
/// in the source and in the destination.
pub type PySlices =
    (u32, SourceOffset, u32, DestinationOffset, Length, Count, SourceStride, DestinationStride);

/// Pages of all slices, in order.
pub fn pages(slices: Vec<PySlices>) -> Result<Vec<Page>, Error> {
    let mut pages = Vec::with_capacity(slices.len());
    for row in slices {
        let (source, source_offset, destination, destination_offset, length, count, ..) = row;
        let (.., source_stride, destination_stride) = row;
        let first = Page {
            source: RegionKey(source),
            source_offset: source_offset.0,
            destination: RegionKey(destination),
            destination_offset: destination_offset.0,
            length: length.0,
        };
        let slices = StridedPages {
            first,
            count: count.0,
            source_stride: source_stride.0,
            destination_stride: destination_stride.0,
        };
        slices.append_to(&mut pages)?;
    }
    Ok(pages)
}
