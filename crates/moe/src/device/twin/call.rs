//! A twin call: begin and end, waits, and records.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::time::Instant;

use super::Twin;
use super::launch::TwinLaunch;
use super::packet::{open, seal};
use crate::device::abi::arguments::{PlanLocation, plan_key};
use crate::device::abi::record::{MoeCode, MoePhase};
use crate::device::shape::channel_layout::{DeviceArea, PlanWord, StateWord};
use weft_gpu::raw_memory::RawMemory;
use weft_gpu::twin::Backoff;
use weft_gpu::{Code, Record};

/// The group has failed: a fatal record exists, and outputs are poisoned.
#[derive(Debug)]
pub(super) struct GroupFailed;

/// Call for one phase on one channel.
pub(super) struct TwinCall<'a> {
    pub(super) twin: &'a Twin,
    phase: MoePhase,
    pub(super) channel: u32,
    pub(super) plan: PlanLocation,
    pub(super) positions: u32,
    /// False for a call by `Twin::peek`, which enters no phase.
    entered: bool,
    /// Round number; `epoch` is the epoch.
    round: u32,
    pub(super) epoch: u32,
    begun: Instant,
}

/// A round's epoch, for example 5 in round 5. Memory is 0 before the first round, so no round has epoch 0.
fn epoch_of(round: u32) -> u32 {
    if round == 0 { 1 << 31 } else { round }
}

impl Twin {
    /// Begins a call, if the group is alive, the phase is next on the channel, and no call for the phase
    /// runs there.
    pub(super) fn begin(
        &self,
        at: TwinLaunch,
        phase: MoePhase,
    ) -> Result<TwinCall<'_>, GroupFailed> {
        let TwinLaunch { channel, plan, .. } = at;
        let positions = at.positions(&self.shape);
        let mut call = TwinCall {
            twin: self,
            phase,
            channel,
            plan,
            positions,
            entered: true,
            round: 0,
            epoch: 0,
            begun: Instant::now(),
        };
        let entered = call.state(StateWord::Entered, phase as u64).fetch_add(1, AcqRel);
        let left = call.state(StateWord::Left, phase as u64).load(Acquire);
        if self.watch.is_dead() || call.state(StateWord::Closed, 0).load(Acquire) != 0 {
            return Err(GroupFailed);
        }
        if self.watch.is_aborted() {
            return Err(call.fail(Code::Aborted, self.rank(), 0, 0, 0));
        }
        if entered != left {
            let (expected, seen) = (left.into(), entered.into());
            return Err(call.fail(Code::Overlap, self.rank(), 0, expected, seen));
        }
        let epochs = [0, 1, 2, 3].map(|phase| call.state(StateWord::Epoch, phase).load(Acquire));
        let next = (1..4).find(|&phase| epochs[phase - 1] != epochs[phase]).unwrap_or(0) as u64;
        if next != phase as u64 {
            return Err(call.fail(Code::OutOfOrder, self.rank(), 0, next, phase as u64));
        }
        call.round = epochs[phase as usize].wrapping_add(1);
        call.epoch = epoch_of(call.round);
        Ok(call)
    }

    /// Begins reading the counts in the round in flight, without entering a phase.
    pub(super) fn peek(&self, at: TwinLaunch) -> Result<TwinCall<'_>, GroupFailed> {
        let (phase, positions) = (MoePhase::DispatchRecv, at.positions(&self.shape));
        let TwinLaunch { channel, plan, .. } = at;
        let mut call = TwinCall {
            twin: self,
            phase,
            channel,
            plan,
            positions,
            entered: false,
            round: 0,
            epoch: 0,
            begun: Instant::now(),
        };
        let closed = call.state(StateWord::Closed, 0).load(Acquire) != 0;
        let [sent, received] =
            [0, 1].map(|phase| call.state(StateWord::Epoch, phase).load(Acquire));
        if self.watch.is_dead() || closed || sent == received {
            return Err(GroupFailed);
        }
        (call.round, call.epoch) = (sent, epoch_of(sent));
        Ok(call)
    }
}

impl TwinCall<'_> {
    /// This call's room for a rank's rows, or for each expert's.
    pub(super) fn room(&self) -> u32 {
        let shape = &self.twin.shape;
        if shape.expert_capacity() > 0 { shape.expert_capacity() } else { self.positions }
    }

    fn state(&self, word: StateWord, phase: u64) -> &std::sync::atomic::AtomicU32 {
        let at = self.twin.shape.at(self.channel, DeviceArea::State);
        self.twin.own().word(at + 4 * (word as u64 + phase))
    }

    /// Memory for a plan area, and the area's offset there.
    pub(super) fn plan_area(&self, area: DeviceArea) -> (RawMemory<'_>, u64) {
        let (shape, areas) = (&self.twin.shape, self.twin.shape.channel_layout());
        if self.plan.address == 0 {
            return (self.twin.own(), shape.at(self.channel, area));
        }
        let at = areas.extent(area).offset - areas.extent(DeviceArea::Slots).offset;
        // SAFETY: the twin's callers guarantee the plan's length.
        (unsafe { RawMemory::new(self.plan.address, areas.plan_bytes()) }, at)
    }

    /// A plan word, after the sources' words.
    pub(super) fn plan_word(&self, word: PlanWord) -> u32 {
        let ranks = u64::from(self.twin.shape.config().ranks);
        let (plan, at) = self.plan_area(DeviceArea::Received);
        u32::from_le_bytes(plan.element(at, ranks + word as u64))
    }

    pub(super) fn set_plan_word(&self, word: PlanWord, value: u32) {
        let ranks = u64::from(self.twin.shape.config().ranks);
        let (plan, at) = self.plan_area(DeviceArea::Received);
        plan.set_element(at, ranks + word as u64, value.to_le_bytes());
    }

    /// Key for a plan made in this round.
    pub(super) fn own_key(&self) -> u32 {
        plan_key(self.twin.shape.channel_number(self.twin.number, self.channel), self.epoch)
    }

    /// Ends the phase in this round.
    pub(super) fn end(self) {
        self.state(StateWord::Epoch, self.phase as u64).store(self.round, Release);
    }

    /// Fails the group; the first failure writes the record.
    pub(super) fn fail(
        &self,
        code: Code,
        peer: u32,
        slot: u32,
        expected: u64,
        seen: u64,
    ) -> GroupFailed {
        self.twin.watch.fail(&self.record(code, peer, slot, expected, seen));
        GroupFailed
    }

    /// Writes a notice, if the host has read the previous one.
    pub(super) fn notice(&self, code: MoeCode, peer: u32, slot: u32, expected: u64, seen: u64) {
        self.twin.watch.notice(&self.record(code.into(), peer, slot, expected, seen));
    }

    fn record(&self, code: Code, peer: u32, slot: u32, expected: u64, seen: u64) -> Record {
        let planned = code == MoeCode::Expert.into() && self.twin.plans_by_chunk();
        let phase = if planned { MoePhase::Plan } else { self.phase };
        let (phase, peer) = (phase as u32, Some(peer));
        let (rank, channel) = (self.twin.rank(), self.channel);
        Record { code, rank, phase, peer, channel, slot, expected, seen }
    }

    /// Waits until `look` finds this round's epoch; on a timeout the record has the value seen.
    pub(super) fn wait<T>(
        &self,
        peer: u32,
        slot: u32,
        look: impl Fn() -> Result<T, u32>,
    ) -> Result<T, GroupFailed> {
        let mut backoff = Backoff::default();
        loop {
            self.twin.jitter.point();
            let seen = match look() {
                Ok(value) => return Ok(value),
                Err(seen) => seen.into(),
            };
            let record = |code| self.record(code, peer, slot, self.epoch.into(), seen);
            if self.twin.watch.has_expired(self.begun, record) {
                return Err(GroupFailed);
            }
            backoff.pause();
        }
    }

    /// Waits for a packet in this round and returns the value. Acquire: all reads and writes by its writer
    /// before the packet are complete.
    pub(super) fn wait_packet(
        &self,
        area: DeviceArea,
        at: u64,
        peer: u32,
    ) -> Result<u32, GroupFailed> {
        let packet = self.twin.shape.at(self.channel, area) + 8 * at;
        let packet = self.twin.own().packet(packet);
        let slot = if area == DeviceArea::Counts { self.twin.count_slot(at) } else { 0 };
        self.wait(peer, slot, || open(packet.load(Acquire), self.epoch))
    }

    /// Writes a packet for this round to an area at `peer`. Release: all reads and writes by this rank
    /// before it are complete.
    pub(super) fn send_packet(&self, area: DeviceArea, at: u64, peer: u32, value: u32) {
        self.twin.jitter.point();
        let to = self.twin.shape.at(self.channel, area) + 8 * at;
        self.twin.heap(peer).packet(to).store(seal(value, self.epoch), Release);
    }
}

impl Drop for TwinCall<'_> {
    fn drop(&mut self) {
        if self.entered {
            self.state(StateWord::Left, self.phase as u64).fetch_add(1, AcqRel);
        }
    }
}
