//! Ranges of one part: where its bytes are, as one NIC names them.

use super::super::peer::Peer;
use super::super::rail::{MAX_RANGES, Message, Rail, Use};
use super::super::region::Region;
use super::super::sys;
use super::super::wire::Target;
use crate::types::Page;
use std::ffi::c_void;
use std::sync::Arc;

/// One page of a part as its NIC takes it.
pub struct Slice {
    /// The source is memory of the host.
    pub is_of_host: bool,
    pub source: libc::iovec,
    pub descriptor: *mut c_void,
    pub destination: sys::RmaRange,
}

impl Slice {
    /// `None` if the source is outside of its region, or the destination was not granted.
    #[inline(always)]
    pub fn of(
        page: &Page,
        regions: &[Option<Arc<Region>>],
        peer: &mut Peer,
        rail: usize,
    ) -> Option<Slice> {
        let region = regions.get(page.source.0 as usize)?.as_ref()?;
        let (address, descriptor) = region.source(rail, page.source_offset, page.length)?;
        let destination =
            peer.destination(rail, page.destination, page.destination_offset, page.length)?;
        let iov_base = address as *mut c_void;
        let source = libc::iovec { iov_base, iov_len: page.length as usize };
        let is_of_host = region.is_of_host();
        Some(Slice { is_of_host, source, descriptor, destination })
    }

    /// Why there is no [`Slice::of`] this page.
    #[cold]
    #[inline(never)]
    pub fn refused(
        page: &Page,
        regions: &[Option<Arc<Region>>],
        peer: &mut Peer,
        rail: usize,
    ) -> String {
        let region = regions.get(page.source.0 as usize).and_then(Option::as_ref);
        if region.and_then(|it| it.source(rail, page.source_offset, page.length)).is_none() {
            return format!("the source is outside of region {}", page.source.0);
        }
        peer.refused(page.destination, page.destination_offset, page.length)
    }
}

/// The ranges of a part of several pages, or of none.
pub struct Ranges {
    sources: [libc::iovec; MAX_RANGES],
    descriptors: [*mut c_void; MAX_RANGES],
    destinations: [sys::RmaRange; MAX_RANGES],
    count: usize,
}

impl Ranges {
    pub fn new() -> Ranges {
        let null = std::ptr::null_mut();
        Ranges {
            sources: [libc::iovec { iov_base: null, iov_len: 0 }; MAX_RANGES],
            descriptors: [null; MAX_RANGES],
            destinations: [sys::RmaRange { addr: 0, len: 0, key: 0 }; MAX_RANGES],
            count: 0,
        }
    }

    pub fn push(&mut self, slice: Slice) -> Result<(), String> {
        let Ranges { sources, descriptors, destinations, count } = self;
        if *count == MAX_RANGES {
            return Err(format!("a part of more than {MAX_RANGES} pages"));
        }
        sources[*count] = slice.source;
        descriptors[*count] = slice.descriptor;
        destinations[*count] = slice.destination;
        *count += 1;
        Ok(())
    }

    /// [`Rail::write`] of these ranges.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn write(
        &mut self,
        rail: &mut Rail,
        end: (sys::Address, Target),
        immediate: u64,
        used: Use,
    ) -> Result<bool, i32> {
        let Ranges { sources, descriptors, destinations, count } = self;
        if *count == 0 {
            return rail.signal(end, immediate, 0, used);
        }
        let mut message = Message {
            address: end.0,
            sources: &sources[..*count],
            descriptors: &mut descriptors[..*count],
            destinations: &destinations[..*count],
            immediate,
        };
        // SAFETY: by the caller's promise.
        unsafe { rail.write(&mut message, 0, used) }
    }
}
