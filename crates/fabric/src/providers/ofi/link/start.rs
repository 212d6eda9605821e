//! One part handed to its NIC: copied inside of the call, or under way.

use super::super::peer::Peer;
use super::super::rail::{Message, Rail, Use};
use super::super::region::Region;
use super::super::wire::immediate;
use super::ranges::{Ranges, Slice};
use crate::link::{Posted, Work};
use crate::types::{Class, Page};
use std::sync::Arc;

/// Why a part was not started.
pub enum Refusal {
    /// An error number of the provider.
    Provider(i32),
    /// A page that the link cannot name.
    Page(String),
}

impl From<i32> for Refusal {
    fn from(error: i32) -> Refusal {
        Refusal::Provider(error)
    }
}

/// A part that is about to leave.
pub struct Start<'a> {
    pub work: &'a Work<'a>,
    pub rail: &'a mut Rail,
    pub peer: &'a mut Peer,
    /// Place of the rail.
    pub index: usize,
    /// See [`super::OfiLink::max_injected`].
    pub max_injected: Option<u64>,
}

/// Whether the provider has taken a part, and what becomes of one that it has.
type Started = Result<(bool, Posted), Refusal>;

impl Start<'_> {
    #[inline(always)]
    pub fn part(&mut self, regions: &[Option<Arc<Region>>]) -> Started {
        match self.work.pages {
            [] => self.signal(),
            [page] if page.length > 0 => self.page(page, regions),
            pages => self.pages(pages, regions),
        }
    }

    #[inline(always)]
    fn signal(&mut self) -> Started {
        let (end, immediate) = (self.peer.ends[self.index], self.immediate());
        if self.max_injected.is_some() {
            return Ok((self.rail.inject_signal(end, immediate)?, Posted::Done));
        }
        Ok((self.rail.signal(end, immediate, 0, self.used())?, Posted::InFlight))
    }

    #[inline(always)]
    fn page(&mut self, page: &Page, regions: &[Option<Arc<Region>>]) -> Started {
        let (immediate, used) = (self.immediate(), self.used());
        let Start { rail, peer, index, max_injected, .. } = self;
        let Some(slice) = Slice::of(page, regions, peer, *index) else {
            return Err(Refusal::Page(Slice::refused(page, regions, peer, *index)));
        };
        let Slice { is_of_host, source, mut descriptor, destination } = slice;
        let address = peer.ends[*index].0;
        if is_of_host && max_injected.is_some_and(|most| page.length <= most) {
            // SAFETY: the region has the source's memory.
            let taken = unsafe { rail.inject(address, &source, &destination, immediate) };
            return Ok((taken?, Posted::Done));
        }
        let mut message = Message {
            address,
            sources: &[source],
            descriptors: std::slice::from_mut(&mut descriptor),
            destinations: &[destination],
            immediate,
        };
        // SAFETY: the engine keeps sources until the part has ended, as does `kept` of the link after a fence.
        let taken = unsafe { rail.write(&mut message, 0, used) };
        Ok((taken?, Posted::InFlight))
    }

    fn pages(&mut self, pages: &[Page], regions: &[Option<Arc<Region>>]) -> Started {
        let (immediate, used) = (self.immediate(), self.used());
        let Start { rail, peer, index, .. } = self;
        let mut ranges = Ranges::new();
        for page in pages.iter().filter(|page| page.length > 0) {
            let slice = Slice::of(page, regions, peer, *index)
                .ok_or_else(|| Refusal::Page(Slice::refused(page, regions, peer, *index)))?;
            ranges.push(slice).map_err(Refusal::Page)?;
        }
        // SAFETY: as in `page`.
        let taken = unsafe { ranges.write(rail, peer.ends[*index], immediate, used) };
        Ok((taken?, Posted::InFlight))
    }

    #[inline(always)]
    fn immediate(&self) -> u64 {
        immediate(self.work.lane, self.work.rider)
    }

    #[inline(always)]
    fn used(&self) -> Use {
        let Work { token, peer, class, .. } = *self.work;
        Use::Part { token, peer: peer.0, is_bulk: class == Class::Bulk }
    }
}
