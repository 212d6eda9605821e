//! One peer: slots, lanes, grants and copies.

use super::super::copy::CopyEngine;
use super::super::copy::outbox::Outbox;
use super::super::copy::pinned::PinnedRegions;
use super::super::granted_ranges::GrantedRanges;
use super::slots::{ArrivedSlots, SentSlots};
use super::wire::{PairShape, SlotLanes};
use crate::clock;
use crate::memory::Memory;
use crate::types::{Lane, RegionKey, Time, TrafficClass};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Sleep between two polls for copies that a fence waits for.
pub(super) const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Progress for a part in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The pages are being copied into the slot.
    Copying,
    /// The slot waits to be posted.
    Ready,
    /// Posted; the inner link owes this many completions, and reads the slot until then.
    Posted { pending: u32 },
}

/// Part in one of our slots.
pub(super) struct OutgoingPart {
    pub token: u64,
    pub lane: Lane,
    pub class: TrafficClass,
    /// Header and payload bytes.
    pub length: u64,
    pub stage: Stage,
    /// Reported to the engine.
    pub is_reported: bool,
    /// The peer has freed the slot.
    pub is_freed: bool,
    /// GPU memory that is read.
    pub sources: Vec<Arc<Memory>>,
}

/// Part in one of the peer's slots here, being copied.
pub(super) struct IncomingPart {
    pub lane: Lane,
    /// GPU memory that is written: a region may be released while a peer still writes to it.
    pub destinations: Vec<Arc<Memory>>,
}

/// Connected peer.
pub(super) struct StagedPeer {
    pub shape: PairShape,
    /// Lanes here that it raises.
    pub ours: SlotLanes,
    /// Lanes there that this rank raises.
    pub theirs: SlotLanes,
    /// Pin on the slots; ahead of them, to be dropped first.
    pub pinned: PinnedRegions,
    /// Slots that it fills, then slots that this rank fills.
    /// Absent before the first grant.
    pub memory: Option<Arc<Memory>>,
    /// Ranges that it may write here.
    pub granted: GrantedRanges,
    /// Ranges that may be written there.
    pub imported: GrantedRanges,
    /// The peer's regions in GPUs.
    pub in_gpus: BTreeSet<RegionKey>,
    /// The peer's slots can be written.
    pub has_slots: bool,

    pub sent: SentSlots,
    /// By slot.
    pub outgoing: Vec<Option<OutgoingPart>>,
    /// Copies into slots; a part's token is the turn.
    pub gathers: Outbox,
    /// Turns to post.
    pub ready: VecDeque<u64>,

    pub arrived: ArrivedSlots,
    /// By slot.
    pub incoming: Vec<Option<IncomingPart>>,
    /// Copies out of slots; a part's token is the turn.
    pub scatters: Outbox,
    /// Freed slots that are not reported to it.
    pub owed: u64,

    /// It violated the protocol, or a copy failed: nothing more is taken from it.
    pub is_refused: bool,
    /// Reason why it is lost, reported once copies are complete.
    pub loss: Option<String>,
    pub is_loss_reported: bool,
}

impl StagedPeer {
    pub fn new(shape: PairShape, ours: SlotLanes, theirs: SlotLanes) -> StagedPeer {
        StagedPeer {
            shape,
            ours,
            theirs,
            pinned: PinnedRegions::default(),
            memory: None,
            granted: GrantedRanges::default(),
            imported: GrantedRanges::default(),
            in_gpus: BTreeSet::new(),
            has_slots: false,
            sent: SentSlots::new(shape.slots),
            outgoing: (0..shape.slots).map(|_| None).collect(),
            gathers: Outbox::default(),
            ready: VecDeque::new(),
            arrived: ArrivedSlots::new(shape.slots),
            incoming: (0..shape.slots).map(|_| None).collect(),
            scatters: Outbox::default(),
            owed: 0,
            is_refused: false,
            loss: None,
            is_loss_reported: false,
        }
    }

    /// The next turn for a part in this class, if the slot is free. Bulk parts leave one slot to
    /// latency-critical ones.
    pub fn next_turn(&self, class: TrafficClass) -> Option<u64> {
        let left = u64::from(class == TrafficClass::Bulk && self.shape.slots > 1);
        let turn = self.sent.next().filter(|_| self.sent.free_slots() > left)?;
        // The inner link may still read a slot that the peer has freed.
        self.outgoing[self.shape.slot(turn).0].is_none().then_some(turn)
    }

    /// True with parts in our slots.
    pub fn has_outgoing(&self) -> bool {
        self.outgoing.iter().any(Option::is_some)
    }

    /// True with copies out of slots in flight.
    pub fn has_incoming(&self) -> bool {
        self.incoming.iter().any(Option::is_some)
    }

    /// True with copies in flight.
    pub fn has_copies(&self) -> bool {
        !self.gathers.is_empty() || !self.scatters.is_empty()
    }

    /// Records the first reason why the peer is lost.
    pub fn lose(&mut self, why: String) {
        if !self.is_loss_reported {
            self.loss.get_or_insert(why);
        }
    }

    /// Takes nothing more from the peer.
    pub fn refuse(&mut self, why: String) {
        self.is_refused = true;
        self.lose(why);
    }

    /// Waits for copies in flight, without reporting them, and closes the queues. False if some are not
    /// complete at the deadline.
    pub fn drain(
        &mut self,
        engine: Option<&mut (dyn CopyEngine + 'static)>,
        deadline: Time,
    ) -> bool {
        let Some(engine) = engine else { return true };
        for outbox in [&mut self.gathers, &mut self.scatters] {
            outbox.seal(engine);
            while !outbox.is_empty() {
                outbox.take_finished(engine, |_| {});
                if !outbox.is_empty() {
                    if clock::now() >= deadline {
                        return false;
                    }
                    std::thread::sleep(POLL_INTERVAL);
                }
            }
            outbox.close(engine);
        }
        true
    }
}
