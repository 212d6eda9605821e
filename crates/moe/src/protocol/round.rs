//! Calls of a round on the driver. None of them waits; their writes progress with each poll.

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

/// Handle of a round, from its dispatch to its release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RoundHandle {
    pub(crate) round: u64,
}

impl RoundHandle {
    /// Number of the round, from 0, equal on all ranks.
    pub fn round(&self) -> u64 {
        self.round
    }
}

/// Received tokens in place. They are valid until the handle is released.
pub struct ReceivedTokens<'a> {
    /// Memory of the channel.
    pub memory: &'a Arc<Memory>,
    /// Byte range of the rows in `memory`.
    pub bytes: Range<usize>,
    /// Distance of rows, in bytes.
    pub stride: usize,
    /// Number of rows: positions in the contiguous layout, slots in the indexed one.
    pub rows: usize,
    /// Scales of the rows, if tokens have scales.
    pub scales: Option<ReceivedScales>,
    /// Positions of the rows by expert.
    pub plan: &'a ReceivePlan,
}

/// Scales of received tokens, a row of scales for each row of tokens.
#[derive(Clone, Debug)]
pub struct ReceivedScales {
    /// Byte range in the tokens' memory; the first row begins at its first byte.
    pub bytes: Range<usize>,
    /// Distance of rows of scales, in bytes.
    pub stride: usize,
}

impl Driver {
    /// Begins a round. `tokens` holds `[tokens, hidden]` of the token type and must stay unchanged until the
    /// round is [`Stage::Dispatched`]; `ids` and `weights` are `[tokens, top_k]`. `scales` holds `[tokens,
    /// blocks]`, if tokens have scales.
    ///
    /// # Errors
    /// [`Error::InUse`] if all channels are held by rounds that were not released; [`Error::NotOnHost`] if
    /// the CPU cannot read the tokens; [`Error::WrongLength`]; those of [`crate::SendPlan::build`]. On an
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

    /// Stage of a round; [`Stage::Idle`] after its release.
    pub fn stage(&self, handle: RoundHandle) -> Stage {
        let channel = self.channel(handle.round);
        if channel.round == handle.round { channel.stage } else { Stage::Idle }
    }

    /// True if all tokens for this rank's experts have arrived and all writes of this rank have completed.
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

    /// Phase of a round, and the peers that block it.
    pub fn missing(&self, handle: RoundHandle) -> (&'static str, Vec<MissingPeer>) {
        self.channel(handle.round).missing()
    }

    /// Received tokens of a round.
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

    /// Tokens of each expert of the group in this round.
    ///
    /// # Errors
    /// [`Error::WrongStage`].
    pub fn expert_load(&self, handle: RoundHandle) -> Result<&[u64], Error> {
        let stages = [Stage::Dispatched, Stage::Combining, Stage::Combined];
        self.expect(handle, &stages, "access to the experts' load")?;
        Ok(self.channel(handle.round).counts.rows_of_expert())
    }

    /// Computes the replies for one more source; the next poll sends them. `outputs` has a row for every
    /// position of the received plan, in the combine dtype, the same in each call. Returns true if sources
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

    /// Sums the replies of a round that is [`Stage::Combined`] into `out`, `[tokens, hidden]` in the output
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

    /// Rows sent to other ranks, and (token, expert) pairs, the rows of one copy per expert; both without
    /// those that stay on this rank.
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
