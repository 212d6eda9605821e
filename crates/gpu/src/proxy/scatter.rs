//! SCATTER commands: one request for all members whose rounds have credits, and parts that wait for the others.

use super::command::{CommandFields, Problem};
use super::limits::{ScatterWindows, TemplateMember};
use super::outstanding::{Outstanding, event_of};
use super::rounds::End;
use super::words::position_of;
use std::sync::atomic::{AtomicU32, Ordering};
use weft_control::Rank;
use weft_fabric::{CounterId, Page, RegionKey, RemoteRegion, Requests, ScatterWrite};

/// Key where a window has no region, with which no byte is written.
const NO_REGION: RegionKey = RegionKey(u32::MAX);

/// Buffers for one SCATTER at a time.
#[derive(Debug)]
pub(super) struct ScatterBuffers {
    /// By member.
    lengths: Vec<u32>,
    /// Rounds without bytes.
    signals: Vec<(Rank, u64)>,
}

impl ScatterBuffers {
    /// Buffers for this many members.
    pub fn with_capacity(members: usize) -> ScatterBuffers {
        ScatterBuffers {
            lengths: Vec::with_capacity(members),
            signals: Vec::with_capacity(members),
        }
    }
}

/// A SCATTER's regions, word and members.
#[derive(Clone, Copy)]
pub(super) struct ScatterTarget<'a> {
    pub fields: &'a CommandFields,
    pub members: &'a [TemplateMember],
    /// `None`, if the window has no region here; all lengths are 0 then.
    pub source: Option<RegionKey>,
    /// By rank.
    pub destinations: &'a [Option<RemoteRegion>],
    pub counter: CounterId,
    /// Words for each peer.
    pub words: usize,
    /// Rounds in a window.
    pub rounds: u32,
    pub namespace: u16,
}

impl ScatterBuffers {
    /// Reads the lengths, each once, and checks all members.
    ///
    /// # Errors
    /// [`Problem`] if a member's bytes are out of range.
    pub fn read(
        &mut self,
        windows: &ScatterWindows<'_>,
        members: &[TemplateMember],
        lengths: &[AtomicU32],
    ) -> Result<(), Problem> {
        self.lengths.clear();
        for (member, length) in members.iter().zip(lengths) {
            let length = length.load(Ordering::Relaxed);
            windows.check(member, length)?;
            self.lengths.push(length);
        }
        Ok(())
    }

    /// Writes the next rounds to all members whose lengths were read, as one request. A part without a credit waits, as a
    /// put does.
    pub fn write(
        &mut self,
        target: &ScatterTarget<'_>,
        ends: &mut [End],
        outstanding: &mut Outstanding,
        requests: &mut Requests,
    ) {
        let ScatterTarget { fields, members, destinations, counter, .. } = *target;
        let source = target.source.unwrap_or(NO_REGION);
        let mut list = requests.scatter(counter, source);
        self.signals.clear();
        for (member, &length) in members.iter().zip(&self.lengths) {
            let (peer, length) = (member.peer, u64::from(length));
            let source_offset = fields.source_offset.saturating_add(member.source_offset);
            let destination_offset =
                fields.destination_offset.saturating_add(member.destination_offset);
            let region = destinations.get(peer.index()).and_then(Option::as_ref);
            let destination = region.map_or(NO_REGION, |region| region.key);
            let end = &mut ends[position_of(peer, fields.word, target.words)];
            if !end.waiting.is_empty() || !end.has_credit(target.rounds) {
                let page = Page { source, source_offset, destination, destination_offset, length };
                outstanding.add(&mut end.waiting, (length > 0).then_some(page));
                continue;
            }
            let round = end.next;
            end.next += 1;
            if length == 0 {
                self.signals.push((peer, round));
                continue;
            }
            list.push(ScatterWrite {
                peer,
                round,
                source_offset,
                destination,
                destination_offset,
                length,
            });
        }
        if !list.is_empty() {
            let part = outstanding.start(list.len() as u32);
            list.finish(event_of(target.namespace, part));
        }
        for (peer, round) in self.signals.drain(..) {
            requests.write(peer, counter, round, None, Requests::NO_EVENT);
        }
    }
}
