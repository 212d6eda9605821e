//! Round calls on the driver. None waits; the writes progress with each poll.

use crate::area::Area;
use crate::error::Error;
use crate::plan::metadata;
use crate::plan::receive::ReceivePlan;
use crate::plan::rows::{Rows, RowsMut};
use crate::protocol::channel::TokenInput;
use crate::protocol::driver::Driver;
use crate::shape::config::{Layout, Weighting};
use crate::stage::Stage;
use std::ops::Range;
use std::sync::Arc;
use weft_fabric::{Memory, MissingPeer, Requests};

/// Round handle, from dispatch to release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RoundHandle {
    pub(crate) round: u64,
}

impl RoundHandle {
    /// Round number, from 0, equal on all ranks.
    pub fn round(&self) -> u64 {
        self.round
    }
}

/// Received tokens in place. They are valid until the handle is released.
pub struct ReceivedTokens<'a> {
    /// Channel memory.
    pub memory: &'a Arc<Memory>,
    /// The rows' byte range in `memory`.
    pub bytes: Range<usize>,
    /// Row stride in bytes.
    pub stride: usize,
    /// Row count: positions in the contiguous layout, slots in the indexed one.
    pub rows: usize,
    /// Row scales, if tokens have scales.
    pub scales: Option<ReceivedScales>,
    /// Row positions by expert.
    pub plan: &'a ReceivePlan,
}

/// Received tokens' scales, a scale row for each token row.
#[derive(Clone, Debug)]
pub struct ReceivedScales {
    /// Byte range in the tokens' memory; the first row begins at its first byte.
    pub bytes: Range<usize>,
    /// Scale row stride in bytes.
    pub stride: usize,
}

impl Driver {
    /// Begins a round. `tokens` holds `[tokens, hidden]` in the token type and must stay unchanged until the
    /// round is [`Stage::Dispatched`]; `ids` and `weights` are `[tokens, top_k]`. `scales` holds
    /// `[tokens, blocks]`, if tokens have scales.
    ///
    /// # Errors
    /// [`Error::InUse`] if all channels are held by rounds that were not released; [`Error::NotOnHost`] if
    /// the CPU cannot read the tokens; [`Error::WrongLength`]; errors from [`crate::SendPlan::build`]. On an
    /// error the round has not begun.
    pub fn begin<I: Copy + Into<i64>>(
        &mut self,
        tokens: TokenInput,
        ids: &[I],
        weights: Option<&[f32]>,
        scales: Option<&[u8]>,
    ) -> Result<RoundHandle, Error> {
        let round = self.next_round();
        let row_bytes = self.shape().token_bytes();
        let scales = scales.unwrap_or_default();
        let channels = self.shape().config().channels;
        let channel = self.channel_mut(round);
        if channel.stage != Stage::Idle {
            return Err(Error::InUse { round: channel.round, channels });
        }
        if tokens.memory.host().is_none() {
            return Err(Error::NotOnHost { what: Area::Input, place: tokens.memory.kind() });
        }
        channel.plan.build(ids, weights)?;
        let (expected, given) = (channel.plan.tokens() * row_bytes, tokens.memory.len());
        if given < expected {
            return Err(Error::WrongLength { what: "the tokens' bytes", expected, given });
        }
        metadata::check_scales(&channel.plan, scales)?;
        channel.begin(round, tokens, scales)?;
        self.advance_round();
        Ok(RoundHandle { round })
    }

    /// A round's stage; [`Stage::Idle`] after release.
    pub fn stage(&self, handle: RoundHandle) -> Stage {
        let channel = self.channel(handle.round);
        if channel.round == handle.round { channel.stage } else { Stage::Idle }
    }

    /// True if all tokens for this rank's experts have arrived and all this rank's writes have completed.
    ///
    /// # Errors
    /// [`Error::Capacity`], the same on every rank, if a rank lacks room for its tokens; the round has then
    /// ended. [`Error::WrongStage`].
    pub fn receive(&mut self, handle: RoundHandle) -> Result<bool, Error> {
        let stages = [Stage::Dispatching, Stage::Refused, Stage::Dispatched];
        self.expect(handle, &stages, "dispatch_recv")?;
        let channel = self.channel_mut(handle.round);
        match channel.take_refusal() {
            Some(refusal) => Err(refusal),
            None => Ok(channel.stage == Stage::Dispatched),
        }
    }

    /// A round's phase, and the peers that block it.
    pub fn missing(&self, handle: RoundHandle) -> (&'static str, Vec<MissingPeer>) {
        self.channel(handle.round).missing()
    }

    /// Tokens received in a round.
    ///
    /// # Errors
    /// [`Error::WrongStage`].
    pub fn received(&self, handle: RoundHandle) -> Result<ReceivedTokens<'_>, Error> {
        let stages = [Stage::Dispatched, Stage::Combining, Stage::Combined];
        self.expect(handle, &stages, "access to received tokens")?;
        let channel = self.channel(handle.round);
        let (area, rows) = match self.shape().config().layout {
            Layout::Contiguous { .. } => (Area::Expert, channel.receive.positions()),
            Layout::Indexed => {
                (Area::Tokens, self.shape().sizes().extent(Area::Tokens).rows as usize)
            }
        };
        let lie = |area| {
            let stride = self.shape().sizes().extent(area).stride as usize;
            let first = channel.areas.offset(area, 0) as usize;
            (first..first + rows * stride, stride)
        };
        let (bytes, stride) = lie(area);
        let scales = (self.shape().scale_bytes() > 0).then(|| match self.shape().config().layout {
            Layout::Contiguous { .. } => {
                let (bytes, stride) = lie(Area::ExpertScales);
                ReceivedScales { bytes, stride }
            }
            Layout::Indexed => {
                let (bytes, stride) = lie(Area::Metadata);
                let begin = bytes.start + self.shape().scales_in_record().start;
                ReceivedScales { bytes: begin.min(bytes.end)..bytes.end, stride }
            }
        });
        let (memory, plan) = (channel.areas.memory(), &channel.receive);
        Ok(ReceivedTokens { memory, bytes, stride, rows, scales, plan })
    }

    /// Token count for each expert in the group in this round.
    ///
    /// # Errors
    /// [`Error::WrongStage`].
    pub fn expert_load(&self, handle: RoundHandle) -> Result<&[u64], Error> {
        let stages = [Stage::Dispatched, Stage::Combining, Stage::Combined];
        self.expect(handle, &stages, "access to the experts' load")?;
        Ok(self.channel(handle.round).counts.rows_of_expert())
    }

    /// Computes the replies for one more source; the next poll sends them. `outputs` has a row for every
    /// position in the received plan, in the combine dtype, the same in each call. Returns true if sources
    /// remain.
    ///
    /// # Errors
    /// [`Error::WrongStage`], [`Error::TooFewRows`], [`Error::RowLength`].
    pub fn reply(
        &mut self,
        handle: RoundHandle,
        outputs: Rows<'_>,
        weighting: Weighting,
    ) -> Result<bool, Error> {
        self.expect(handle, &[Stage::Dispatched, Stage::Combining], "combine")?;
        let row_bytes = self.shape().area_row_bytes(Area::ExpertOutput);
        let channel = self.channel_mut(handle.round);
        outputs.require(Area::ExpertOutput, channel.receive.positions(), row_bytes)?;
        channel.reply_next(weighting, outputs)
    }

    /// Sums the replies in a round that is [`Stage::Combined`] into `out`, `[tokens, hidden]` in the output
    /// dtype.
    ///
    /// # Errors
    /// [`Error::WrongStage`], [`Error::TooFewRows`], [`Error::RowLength`].
    pub fn sum_replies(
        &mut self,
        handle: RoundHandle,
        out: RowsMut<'_>,
        weighting: Weighting,
    ) -> Result<(), Error> {
        self.expect(handle, &[Stage::Combined], "the sum of replies")?;
        self.channel_mut(handle.round).sum_replies(weighting, out)
    }

    /// Ends a round: peers may write to its channel again, and the received tokens are no longer valid. A
    /// received round need not be combined, if no rank combines it; a refused round may be released without
    /// [`Driver::receive`].
    ///
    /// # Errors
    /// [`Error::WrongStage`].
    pub fn release(&mut self, handle: RoundHandle, requests: &mut Requests) -> Result<(), Error> {
        let stages = [Stage::Dispatched, Stage::Refused, Stage::Combined];
        self.expect(handle, &stages, "release")?;
        self.channel_mut(handle.round).release(requests);
        Ok(())
    }

    /// Number of tokens that this rank sent in a round.
    pub fn tokens(&self, handle: RoundHandle) -> usize {
        self.channel(handle.round).plan.tokens()
    }

    /// Rows sent to other ranks, and (token, expert) pairs, the row count with one copy per expert; both
    /// without rows that stay on this rank.
    pub fn copies_sent(&self, handle: RoundHandle) -> (usize, usize) {
        let plan = &self.channel(handle.round).plan;
        let me = self.shape().config().rank;
        (plan.row_count() - plan.rows_for(me).len(), plan.pair_count() - plan.pairs_for(me).len())
    }

    pub(crate) fn expect(
        &self,
        handle: RoundHandle,
        stages: &[Stage],
        call: &'static str,
    ) -> Result<(), Error> {
        let stage = self.stage(handle);
        if stages.contains(&stage) {
            return Ok(());
        }
        Err(Error::WrongStage { call, round: handle.round, stage })
    }
}
