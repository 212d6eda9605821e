//! Rank clock offsets, measured when the group connects.

use super::Control;
use crate::clock::{ClockOffset, align};
use crate::core::Payload;
use crate::deadline::Deadline;
use crate::{Error, Operation, PeerStatus, Rank, Result, monotonic_ns};

/// Pings to rank 0 on connect; the one with the shortest round trip counts.
const PINGS: usize = 8;
const CONNECTING: &str = "the other ranks to join";

impl Control {
    /// Monotonic clock ([`crate::monotonic_ns`]) on `rank` minus rank 0's, in nanoseconds: subtract it
    /// from a time on `rank` to get a time on rank 0. Measured when the group connected;
    /// [`Control::clock_error`] bounds the error at that time.
    pub fn clock_offset(&self, rank: Rank) -> i64 {
        self.offset(rank).nanoseconds.saturating_sub(self.offset(Rank(0)).nanoseconds)
    }

    /// Error bound for [`Control::clock_offset`] in nanoseconds: half the shortest round trip; 0 between ranks
    /// on one host, which share a clock.
    pub fn clock_error(&self, rank: Rank) -> u64 {
        let host_of = |rank: Rank| self.members.get(rank.index()).map(|m| &m.host_id);
        if host_of(rank) == host_of(Rank(0)) {
            return 0;
        }
        self.offset(rank).error.saturating_add(self.offset(Rank(0)).error)
    }

    fn offset(&self, rank: Rank) -> ClockOffset {
        let member = self.members.get(rank.index());
        let offsets = self.process.offsets.get();
        member
            .zip(offsets)
            .and_then(|(member, offsets)| offsets.get(member.original_rank.index()).copied())
            .unwrap_or(ClockOffset::UNKNOWN)
    }

    /// Last connection step: each rank measures its offset, and all exchange them. After it, all
    /// ranks are connected to each other.
    pub(super) fn align_clocks(&self, deadline: &Deadline) -> Result<()> {
        let mut best = ClockOffset::UNKNOWN;
        if self.rank == Rank(0) {
            best = ClockOffset { nanoseconds: 0, error: 0 };
        } else {
            for _ in 0..PINGS {
                match self.ping(deadline)? {
                    Some(offset) => best = best.more_precise(offset),
                    None => break,
                }
            }
        }
        let payload = [best.nanoseconds.to_le_bytes(), best.error.to_le_bytes()].concat();
        let parts = match self.gather(Operation::Connect, Payload::Same(&payload), deadline) {
            Err(Error::Timeout { missing, waited, .. }) => {
                let hint = "they joined but did not finish connecting: check their errors";
                return Err(Error::Rendezvous { missing, waited, last: None, hint });
            }
            other => other?,
        };
        let mut measured = Vec::new();
        for (peer, part) in (0..).map(Rank).zip(parts) {
            let Some((nanoseconds, error)) = part.split_first_chunk().and_then(|(n, rest)| {
                Some((i64::from_le_bytes(*n), u64::from_le_bytes(rest.try_into().ok()?)))
            }) else {
                let problem = "its clock measurement is malformed".to_string();
                return Err(Error::Protocol { peer, problem });
            };
            measured.push(ClockOffset { nanoseconds, error });
        }
        let _ = self.process.offsets.set(align(&self.members, &measured));
        Ok(())
    }

    /// One ping to rank 0. `None` if rank 0 is lost or the deadline has passed; the gather that follows
    /// returns the error.
    fn ping(&self, deadline: &Deadline) -> Result<Option<ClockOffset>> {
        let shared = &self.process.shared;
        shared.with(|core| core.ping(Rank(0), monotonic_ns()));
        let pong = shared.wait(deadline, CONNECTING, |core| {
            let gone = core.status(Rank(0)) != PeerStatus::Alive;
            let ended = gone || core.usable(self.generation).is_err();
            core.pong.take().map(Some).or(ended.then_some(None))
        })?;
        Ok(pong
            .flatten()
            .map(|(sent, responded, received)| ClockOffset::from_ping(sent, responded, received)))
    }
}
