//! Barrier across all ranks in a group.

use super::{EngineAccess, WaitOptions, wait, wait_for_credit, wait_for_request};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::types::RequestId;
use weft_control::Rank;

/// Guard for a thread inside a barrier; dropping it, also by a panic, admits another thread.
struct BarrierGuard<'a, H: EngineAccess>(&'a mut H);

impl<H: EngineAccess> Drop for BarrierGuard<'_, H> {
    fn drop(&mut self) {
        self.0.with(|engine| engine.barrier_state().is_entered = false);
    }
}

/// [`Engine::barrier`] over any access. Two concurrent barriers from two threads have no order that is
/// the same at all ranks, so the second is refused.
pub(crate) fn barrier(access: &mut impl EngineAccess, options: &mut WaitOptions<'_>) -> Result<()> {
    let entered =
        |engine: &mut Engine| std::mem::replace(&mut engine.barrier_state().is_entered, true);
    if access.with(entered) {
        return Err(Error::InProgress { call: "barrier" });
    }
    let guard = BarrierGuard(access);
    pass_barrier(&mut *guard.0, options)
}

fn pass_barrier(access: &mut impl EngineAccess, options: &mut WaitOptions<'_>) -> Result<()> {
    let (peers, counter) = access.with(|engine| {
        let peers: Vec<Rank> = engine.peers().collect();
        engine.barrier_counter().map(|counter| (peers, counter))
    })?;
    loop {
        let next = access.with(|engine| -> Result<Option<(Rank, u64)>> {
            let signalled = engine.barrier_state().signalled;
            let Some(&peer) = peers.get(signalled) else { return Ok(None) };
            Ok(Some((peer, engine.next_round(counter, peer)?)))
        })?;
        let Some((peer, round)) = next else { break };
        wait_for_credit(access, counter, peer, round, options)?;
        access.with(|engine| {
            let signal = engine.signal(peer, counter, round)?;
            let state = engine.barrier_state();
            state.signalled += 1;
            if signal != RequestId::DONE {
                state.signals_in_flight.push(signal);
            }
            Ok::<(), Error>(())
        })?;
    }
    let expected: Vec<(Rank, u64)> = peers.iter().map(|&peer| (peer, 1)).collect();
    wait(access, counter, None, &expected, options)?;
    // Signals leave this process before the program computes on.
    while let Some(signal) =
        access.with(|engine| engine.barrier_state().signals_in_flight.last().copied())
    {
        wait_for_request(access, signal, options)?;
        access.with(|engine| engine.barrier_state().signals_in_flight.pop());
    }
    access.with(|engine| {
        engine.barrier_state().signalled = 0;
        for peer in peers {
            engine.credit(peer, counter)?;
        }
        engine.flush();
        Ok(())
    })
}
