//! Mailboxes: short messages, such as small all-reduces, between ranks that map each other's memory, in
//! order and by plain copies.
//!
//! Each rank allocates one region with an area for each peer (`area.rs`). A message needs no post, no
//! lane and no credit: it is stored with a number into the sender's next slot, and the receiver polls
//! that slot. A rank that may sleep announces this in a word of the region ([`MailboxWaits`]); a peer
//! that finds the word set rings the rank's doorbell.
//!
//! Mailboxes exist on routes that are [`crate::Route::mapped`]. Like all group memory, they are not used
//! again once the group is poisoned.

mod area;
mod table;
mod waits;

pub use area::{MailboxArea, MailboxEnd, SLOTS};
pub use waits::{MailboxWait, MailboxWaits};

use crate::atomics::Word64;
use crate::engine::{Engine, Region, RemoteRegion};
use crate::error::{Error, Result};
use crate::link::MappedPeer;
use crate::poison::PoisonFlag;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use table::AreaTable;
use weft_control::Rank;

/// A rank's mailboxes, one for each peer.
pub struct Mailboxes {
    rank: Rank,
    region: Region,
    own: AreaTable,
    peers: Vec<Option<MailboxPeer>>,
    waits: Arc<MailboxWaits>,
    poison: Arc<PoisonFlag>,
    /// A store since the last [`Mailboxes::flush`].
    has_unflushed: bool,
}

struct MailboxPeer {
    mapped: MappedPeer,
    table: AreaTable,
    end: MailboxEnd,
    /// A store since the last flush.
    is_unflushed: bool,
}

impl Mailboxes {
    /// Allocates this rank's region, for messages up to `message_bytes` bytes long, equal on all ranks.
    ///
    /// # Errors
    /// Same as [`Engine::alloc`].
    pub fn allocate(engine: &mut Engine, message_bytes: usize) -> Result<Mailboxes> {
        let (rank, size) = (engine.rank(), engine.size());
        let region = engine.alloc(AreaTable::bytes_for(size, message_bytes))?;
        let Some(own) = AreaTable::new(region.memory().clone(), size, message_bytes) else {
            let (wanted, limit) = (message_bytes as u64, 0);
            return Err(Error::Limit { what: "bytes of a message", wanted, limit });
        };
        let waits = Arc::new(MailboxWaits::new(own.clone()));
        let peers = (0..size).map(|_| None).collect();
        let poison = engine.poison_flag().clone();
        Ok(Mailboxes { rank, region, own, peers, waits, poison, has_unflushed: false })
    }

    /// Region to grant to every peer as a whole.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Announces this rank's waits.
    pub fn waits(&self) -> &Arc<MailboxWaits> {
        &self.waits
    }

    /// Connects a peer by the region that it granted.
    ///
    /// # Errors
    /// [`Error::Malformed`] if the region has another length or is not mapped.
    pub fn link(&mut self, engine: &Engine, remote: RemoteRegion) -> Result<()> {
        let (peer, size) = (remote.peer, self.peers.len() as u32);
        let malformed = |detail: String| Error::Malformed { peer, what: "a mailbox", detail };
        let length = self.region.memory().len() as u64;
        if remote.length != length {
            return Err(malformed(format!("{} bytes: expected {length}", remote.length)));
        }
        let mapped = engine.mapped_peer(remote);
        let mapped = mapped.ok_or_else(|| malformed("memory that is not mapped".to_owned()))?;
        let table = AreaTable::new(mapped.memory.clone(), size, self.own.message_bytes());
        let table = table.ok_or_else(|| malformed(format!("misaligned {length} bytes")))?;
        if let Some(slot) = self.peers.get_mut(peer.index()) {
            let end = MailboxEnd::default();
            *slot = Some(MailboxPeer { mapped, table, end, is_unflushed: false });
        }
        Ok(())
    }

    /// Error from a poisoned group.
    ///
    /// # Errors
    /// [`Error::Poisoned`].
    #[inline]
    pub fn check(&self) -> Result<()> {
        match self.poison.get() {
            None => Ok(()),
            Some(cause) => Err(Error::Poisoned(cause.clone())),
        }
    }

    /// True if a message may be sent to a peer now.
    #[inline]
    pub fn has_room(&self, peer: Rank) -> bool {
        let to = self.peers.get(peer.index()).and_then(Option::as_ref);
        to.is_some_and(|to| to.end.has_room(&self.own.area(peer)))
    }

    /// Sends a message with `length` bytes, at most as many as allocated, to a peer with room. `write`
    /// writes all bytes. [`Mailboxes::flush`] wakes the peer.
    ///
    /// # Panics
    /// If messages are not as long, or the peer has no room.
    #[inline]
    pub fn send(&mut self, peer: Rank, length: usize, write: impl FnOnce(&mut [u8])) {
        let Some(Some(to)) = self.peers.get_mut(peer.index()) else { return };
        assert!(length <= self.own.message_bytes() && to.end.has_room(&self.own.area(peer)));
        let area = to.table.area(self.rank);
        to.end.send(&area, |slot| {
            // SAFETY: the slot has as many bytes, and is free: the peer reads it after the head is
            // stored.
            write(unsafe { std::slice::from_raw_parts_mut(area.payload(slot), length) });
        });
        (to.is_unflushed, self.has_unflushed) = (true, true);
    }

    /// True if the next message from a peer has arrived.
    #[inline]
    pub fn is_ready(&self, peer: Rank) -> bool {
        let from = self.peers.get(peer.index()).and_then(Option::as_ref);
        from.is_some_and(|from| from.end.ready(&self.own.area(peer)).is_some())
    }

    /// Next message from a peer, if it has arrived: `length` bytes, at most as many as allocated, in
    /// mailbox memory.
    ///
    /// # Panics
    /// If messages are not as long.
    #[inline]
    pub fn message(&self, peer: Rank, length: usize) -> Option<&[u8]> {
        assert!(length <= self.own.message_bytes());
        let (from, area) = (self.peers.get(peer.index())?.as_ref()?, self.own.area(peer));
        let payload = area.payload(from.end.ready(&area)?);
        // SAFETY: the slot has as many bytes; the peer stores there again after `free`, which the borrow
        // excludes.
        Some(unsafe { std::slice::from_raw_parts(payload, length) })
    }

    /// Frees the slot that holds the next message from a peer, which has arrived and was read.
    #[inline]
    pub fn free(&mut self, peer: Rank) {
        let Some(Some(from)) = self.peers.get_mut(peer.index()) else { return };
        let (own, theirs) = (self.own.area(peer), from.table.area(self.rank));
        if from.end.free(&own, &theirs) {
            (from.is_unflushed, self.has_unflushed) = (true, true);
        }
    }

    /// Messages taken from a peer.
    pub fn received(&self, peer: Rank) -> u64 {
        let from = self.peers.get(peer.index()).and_then(Option::as_ref);
        from.map_or(0, |from| from.end.received())
    }

    /// Wakes the peers that have announced a wait and to which messages were sent, or slots freed, since the last
    /// flush.
    #[inline]
    pub fn flush(&mut self) {
        if !std::mem::take(&mut self.has_unflushed) {
            return;
        }
        AtomicU64::fence();
        for peer in self.peers.iter_mut().flatten() {
            if std::mem::take(&mut peer.is_unflushed) && peer.table.has_wait() {
                peer.mapped.announce_message();
            }
        }
    }
}
