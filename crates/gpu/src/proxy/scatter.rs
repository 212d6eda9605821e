//! SCATTER commands: one request for all members whose rounds have credits, and parts that wait for the others.

use super::command::{CommandError, CommandFields, Problem};
use super::driver::{ProxyDriver, event_of};
use super::words::position_of;
use std::sync::atomic::{AtomicU32, Ordering};
use weft_control::Rank;
use weft_fabric::{Page, RegionKey, Requests, ScatterWrite};

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

impl ProxyDriver {
    /// Accepts a SCATTER whose lengths are these.
    ///
    /// # Errors
    /// [`CommandError`] if a member's bytes are out of range; nothing was written then.
    pub(super) fn accept_scatter(
        &mut self,
        ticket: u64,
        fields: &CommandFields,
        lengths: &[AtomicU32],
        requests: &mut Requests,
    ) -> Result<(), CommandError> {
        let refused = |problem| CommandError { ticket, fields: *fields, problem };
        self.read_lengths(fields, lengths).map_err(refused)?;
        self.write_members(fields, requests);
        Ok(())
    }

    /// Reads the lengths, each once, and checks all members.
    fn read_lengths(
        &mut self,
        fields: &CommandFields,
        lengths: &[AtomicU32],
    ) -> Result<(), Problem> {
        let ProxyDriver { limits, scatter, .. } = self;
        let members = &limits.templates[usize::from(fields.peer)].members;
        let windows = limits.scatter_windows(fields)?;
        scatter.lengths.clear();
        for (member, length) in members.iter().zip(lengths) {
            let length = length.load(Ordering::Relaxed);
            windows.check(member, length)?;
            scatter.lengths.push(length);
        }
        Ok(())
    }

    /// Writes the members' next rounds as one request. A part without a credit waits, as a put does.
    fn write_members(&mut self, fields: &CommandFields, requests: &mut Requests) {
        let ProxyDriver { limits, windows, counters, ends, outstanding, scatter, .. } = self;
        let (counter, each) = (counters[fields.word as usize], counters.len());
        let members = &limits.templates[usize::from(fields.peer)].members;
        let destinations = &windows[usize::from(fields.destination_window)].destinations;
        // A window without a region has no bytes, so that all lengths are 0.
        let source = windows[usize::from(fields.source_window)].source;
        let source = source.map_or(NO_REGION, |(key, _)| key);
        let mut list = requests.scatter(counter, source);
        scatter.signals.clear();
        for (member, &length) in members.iter().zip(&scatter.lengths) {
            let (peer, length) = (member.peer, u64::from(length));
            let source_offset = fields.source_offset.saturating_add(member.source_offset);
            let destination_offset =
                fields.destination_offset.saturating_add(member.destination_offset);
            let region = destinations.get(peer.index()).and_then(Option::as_ref);
            let destination = region.map_or(NO_REGION, |region| region.key);
            let end = &mut ends[position_of(peer, fields.word, each)];
            if !end.waiting.is_empty() || !end.has_credit(self.rounds) {
                let page = Page { source, source_offset, destination, destination_offset, length };
                outstanding.add(&mut end.waiting, (length > 0).then_some(page));
                continue;
            }
            let round = end.next;
            end.next += 1;
            if length == 0 {
                scatter.signals.push((peer, round));
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
            list.finish(event_of(self.namespace, part));
        }
        for (peer, round) in scatter.signals.drain(..) {
            requests.write(peer, counter, round, None, Requests::NO_EVENT);
        }
    }
}
