//! Each fault that `verify` rejects, in a minimal schedule, with its message.

mod common;

use common::executor::Executor;
use weft_collectives::{
    Algorithm, Collective, Error, Op, Options, Program, Rank, Span, build, verify,
};

fn ring(ranks: u32) -> Program {
    Program::new(
        &build(Collective::AllReduce, Algorithm::Ring, ranks, &Options::default()).unwrap(),
    )
}

fn error_of(program: &Program) -> String {
    verify(program).unwrap_err().to_string()
}

/// True if the executor fails in some order, too.
fn runs_wrong(program: &Program) -> bool {
    (0..2000).any(|seed| Executor::new(program, 2 * u64::from(program.blocks), seed).run().is_err())
}

#[test]
fn a_ring_on_one_lane_takes_one_write_for_another() {
    let mut program = ring(3);
    for op in program.ops.iter_mut().flatten() {
        match op {
            Op::Write { lane, .. } => *lane = 0,
            Op::Wait { lane, count, .. } => (*lane, *count) = (0, *lane + 1),
            _ => {}
        }
    }
    assert!(matches!(verify(&program), Err(Error::Ambiguous { .. })));
    let message = error_of(&program);
    assert!(message.contains("may also be satisfied by a later write: rank "), "{message}");
    assert!(runs_wrong(&program));
}

#[test]
fn a_slot_is_written_again_while_it_may_still_be_read() {
    let mut program = Program::new(
        &build(Collective::ReduceScatter, Algorithm::Ring, 4, &Options::default()).unwrap(),
    );
    // One slot instead of two.
    for op in program.ops.iter_mut().flatten() {
        let (Op::Write { source, target, .. } | Op::Reduce { source, target }) = op else {
            continue;
        };
        for span in [source, target] {
            if *span == Span::scratch(1, 1) {
                *span = Span::scratch(0, 1);
            }
        }
    }
    assert!(matches!(verify(&program), Err(Error::Race { .. })));
    let message = error_of(&program);
    assert!(message.contains("scratch[0] of rank "), "{message}");
    assert!(message.contains("without waiting until rank "), "{message}");
    assert!(runs_wrong(&program));
}

#[test]
fn a_chunk_without_a_wait_is_read_too_early() {
    let mut program = ring(2);
    let wait = program.ops[1].iter().position(|op| matches!(op, Op::Wait { .. })).unwrap();
    program.ops[1].remove(wait);
    let message = error_of(&program);
    assert_eq!(
        message,
        "rank 1, operation 1 (reduce in[0] into out[0]): reads out[0] of rank 1 without waiting until \
         rank 0, operation 0 (write in[0] -> rank 1 out[0], lane 0, step 0) has written it"
    );
    assert!(runs_wrong(&program));
}

#[test]
fn a_deadlock_is_named_with_both_waits() {
    let mut program = ring(2);
    program.ops[0].remove(0);
    assert_eq!(
        error_of(&program),
        "rank 0, operation 3 (wait rank 1 lane 1): never ends: 0 of 1 writes are posted, and rank 1 \
         waits itself: rank 1, operation 1 (wait rank 0 lane 0)"
    );
    assert!(runs_wrong(&program));
}

#[test]
fn other_faults() {
    let mut program = ring(2);
    program.ops[0].truncate(4);
    assert_eq!(
        error_of(&program),
        "rank 1, operation 3 (write out[0] -> rank 0 out[0], lane 1, step 1): rank 0 does not wait for it"
    );

    let mut program = ring(2);
    let reduce = program.ops[0][2];
    program.ops[0].insert(2, reduce);
    assert_eq!(
        error_of(&program),
        "rank 0, operation 3 (reduce in[1] into out[1]): adds rank 0's block 1 a second time"
    );

    let mut program = ring(2);
    program.ops[0].remove(2);
    assert_eq!(error_of(&program), "rank 0: final out[1] lacks the contribution of rank 0");

    let mut program = ring(2);
    program.ops[0][2] = Op::Reduce { source: Span::input(0, 1), target: Span::output(1, 1) };
    assert!(matches!(verify(&program), Err(Error::WrongBlock { found: 0, expected: 1, .. })));

    let mut program = ring(2);
    program.ops[1][0] = Op::Drain { to: Rank(2) };
    assert_eq!(error_of(&program), "rank 1, operation 0 (drain rank 2): there is no rank 2");

    let mut program = ring(2);
    program.ops[0].insert(0, Op::Copy { source: Span::output(0, 1), target: Span::output(1, 1) });
    assert!(matches!(verify(&program), Err(Error::Unwritten { .. })));

    let mut program = ring(3);
    if let Op::Write { step, .. } = &mut program.ops[2][3] {
        *step = 0;
    }
    assert_eq!(
        error_of(&program),
        "rank 2, operation 3 (write out[1] -> rank 0 out[1], lane 1, step 0): rank 2 has completed step 0"
    );

    let empty = Program { ops: vec![], ..ring(1) };
    assert_eq!(error_of(&empty), "the number of ranks is 0: expected 1 to 16777216");
}

#[test]
fn schedules_beyond_the_limits_of_memory_and_time_are_refused() {
    // Each rank's clock has a word for each rank.
    let broadcast = Collective::Broadcast { root: Rank(0) };
    let ranks = 1 << 15;
    let binomial = build(broadcast, Algorithm::Binomial, ranks, &Options::default()).unwrap();
    assert_eq!(
        verify(&binomial).unwrap_err().to_string(),
        "ranks of a schedule to verify: 32768, at most 16384 allowed"
    );
    // Few operations on many blocks.
    let blocks = 1 << 22;
    let copy = Op::Copy { source: Span::input(0, blocks), target: Span::output(0, blocks) };
    let program = Program { blocks, ops: vec![vec![copy; 17]], ..ring(1) };
    Program::from_json(&program.to_json()).unwrap();
    assert_eq!(
        error_of(&program),
        "blocks that all operations move: 71303168, at most 67108864 allowed"
    );
}
