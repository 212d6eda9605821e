//! Conditions that a thread waits for: counters, credits, requests, empty queues.

use super::access::EngineAccess;
use super::options::WaitOptions;
use super::run::run;
use crate::engine::Engine;
use crate::error::{MissingPeer, Result};
use crate::types::{CounterId, RequestId};
use weft_control::Rank;

/// [`Engine::wait_in`] over any access; without a round, [`Engine::wait`].
#[inline]
pub(crate) fn wait(
    access: &mut impl EngineAccess,
    counter: CounterId,
    round: Option<u64>,
    expected: &[(Rank, u64)],
    options: &mut WaitOptions<'_>,
) -> Result<()> {
    let count = |engine: &mut Engine, rank| match round {
        Some(round) => engine.count_in(counter, rank, round),
        None => engine.count(counter, rank),
    };
    run(
        access,
        "a wait on a counter",
        0,
        options,
        |engine, _| {
            for &(rank, expected) in expected {
                if count(engine, rank)? < expected {
                    return Ok(None);
                }
            }
            for &(rank, _) in expected {
                let is_oldest = match round {
                    Some(round) => engine.open_round(counter, rank)? == round,
                    None => true,
                };
                if is_oldest {
                    engine.unlist(counter, rank);
                }
            }
            Ok(Some(()))
        },
        |engine| {
            let short = |&(rank, expected): &(Rank, u64)| {
                let seen = count(engine, rank).unwrap_or_default();
                (seen < expected).then_some(MissingPeer { rank, expected, seen })
            };
            expected.iter().filter_map(short).collect()
        },
    )
}

/// Waits until peers have raised counters to these totals since they were linked.
pub(crate) fn wait_for_totals(
    access: &mut impl EngineAccess,
    expected: &[(CounterId, Rank, u64)],
    options: &mut WaitOptions<'_>,
) -> Result<()> {
    let lacking = |engine: &mut Engine| -> Result<Vec<MissingPeer>> {
        let mut missing = Vec::new();
        for &(counter, rank, expected) in expected {
            let seen = engine.count_in_all(counter, rank)?;
            if seen < expected {
                missing.push(MissingPeer { rank, expected, seen });
            }
        }
        Ok(missing)
    };
    run(
        access,
        "a wait for all writes",
        0,
        options,
        |engine, _| Ok(lacking(engine)?.is_empty().then_some(())),
        |engine| lacking(engine).unwrap_or_default(),
    )
}

/// [`Engine::wait_for_credit`] over any access.
pub(crate) fn wait_for_credit(
    access: &mut impl EngineAccess,
    counter: CounterId,
    peer: Rank,
    round: u64,
    options: &mut WaitOptions<'_>,
) -> Result<()> {
    run(
        access,
        "a wait for credit",
        0,
        options,
        |engine, _| Ok(engine.has_credit(counter, peer, round)?.then_some(())),
        |engine| {
            let seen = engine.credits(counter, peer).unwrap_or_default();
            let expected = engine.credits_for(counter, peer, round).unwrap_or(round);
            vec![MissingPeer { rank: peer, expected, seen }]
        },
    )
}

/// [`Engine::wait_for_request`] over any access.
pub(crate) fn wait_for_request(
    access: &mut impl EngineAccess,
    request: RequestId,
    options: &mut WaitOptions<'_>,
) -> Result<()> {
    run(
        access,
        "a request",
        0,
        options,
        |engine, _| {
            if !engine.is_drained(request) {
                return Ok(None);
            }
            if engine.has_failed(request) {
                engine.check()?;
            }
            Ok(Some(()))
        },
        |engine| engine.missing_of(request),
    )
}

/// [`Engine::drain_queues`] over any access.
pub(super) fn drain_queues(
    access: &mut impl EngineAccess,
    options: &mut WaitOptions<'_>,
) -> Result<()> {
    run(
        access,
        "draining queues",
        0,
        options,
        |engine, _| Ok((!engine.has_queued()).then_some(())),
        |engine| engine.missing_of_queues(),
    )
}
