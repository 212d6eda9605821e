//! Rejected arguments from the caller, and rejected data from a peer, without a panic or a partial
//! effect.

use proptest::prelude::*;
use std::ops::Range;
use weft_fabric::random::SplitMix64 as Random;
use weft_moe::routing::Routing;
use weft_moe::{
    Area, Config, Error, Layout, PADDING, ReceivePlan, RoundCounts, Rows, RowsMut, SendPlan, Shape,
    header, metadata,
};

fn shape(config: Config) -> Shape {
    Shape::new(config).unwrap()
}

#[test]
fn the_planner_names_what_is_wrong_and_then_plans_nothing() {
    let shape = shape(Config::new(2, 0, 4, 2).sized(3, 8));
    let mut plan = SendPlan::new(&shape);
    type Refusal<'a> = (&'a [i32], Option<&'a [f32]>, Error);
    let refusals: [Refusal; 5] = [
        (&[0, 1, 2], None, Error::WrongLength { what: "expert ids", expected: 4, given: 3 }),
        (&[0; 8], None, Error::TooManyTokens { tokens: 4, max_tokens: 3 }),
        (&[0, 1], Some(&[0.5]), Error::WrongLength { what: "weights", expected: 2, given: 1 }),
        (&[0, 1, 2, 4], None, Error::ExpertOutOfRange { token: 1, slot: 1, expert: 4, experts: 4 }),
        (&[0, 1, 3, 3], None, Error::ExpertTwice { token: 1, expert: 3 }),
    ];
    for (ids, weights, expected) in refusals {
        plan.build(&[0, 2, 1, 3, -1, 0], None).unwrap();
        assert_eq!((plan.tokens(), plan.row_count(), plan.pair_count()), (3, 5, 5));
        let error = plan.build(ids, weights).unwrap_err();
        assert_eq!(error.to_string(), expected.to_string());
        assert_eq!((plan.tokens(), plan.row_count(), plan.pair_count()), (0, 0, 0));
        assert_eq!(plan.rows_of_expert(), [0; 4]);
    }
    let error = plan.build(&[i64::MAX, 0], None).unwrap_err();
    assert!(matches!(error, Error::ExpertOutOfRange { token: 0, slot: 0, expert: i64::MAX, .. }));
}

#[test]
fn a_token_goes_once_to_each_rank() {
    let shape = shape(Config::new(2, 0, 4, 3).sized(4, 8));
    let mut plan = SendPlan::new(&shape);
    // Ranks own experts 0 and 1, 2 and 3.
    plan.build(&[3, 0, 1, 2, 3, -1, -1, -1, -1, 1, 2, 0], None).unwrap();
    assert_eq!(plan.rows_to_rank(), [2, 3]);
    assert_eq!(plan.rows_of_expert(), [2, 2, 2, 2]);
    let tokens = |rank| plan.rows_for(rank).map(|row| plan.token_of(row)).collect::<Vec<_>>();
    assert_eq!((tokens(0), tokens(1)), (vec![0, 3], vec![0, 1, 3]));
}

#[test]
fn arrays_that_do_not_fit_are_refused() {
    let shape = shape(Config::new(1, 0, 2, 1).sized(2, 8));
    let stride = shape.sizes().extent(Area::SendMetadata).stride as usize;
    let mut plan = SendPlan::new(&shape);
    plan.build(&[0, 1], None).unwrap();
    let pack = |bytes: usize, row_bytes| {
        let mut out = vec![0; bytes];
        metadata::pack(&plan, 0..2, &[], RowsMut::new(&mut out, row_bytes, stride))
    };
    assert!(pack(2 * stride, stride).is_ok());
    assert!(matches!(
        pack(2 * stride - 1, stride),
        Err(Error::TooFewRows { what: Area::SendMetadata, needed: 2, given: 1 })
    ));
    let needed = stride;
    assert!(matches!(
        pack(2 * stride, stride - 4),
        Err(Error::RowLength { what: Area::SendMetadata, needed: n, .. }) if n == needed
    ));
}

/// A group in which rank 0 receives: what every rank sends it, in rank 0's areas.
struct Arrivals {
    shape: Shape,
    headers: Vec<Vec<u8>>,
    metadata: Vec<u8>,
}

impl Arrivals {
    fn new(config: &Config, seed: u64) -> Arrivals {
        let shapes: Vec<Shape> =
            (0..config.ranks).map(|rank| shape(Config { rank, ..config.clone() })).collect();
        let extent = shapes[0].sizes().extent(Area::Metadata);
        let stride = extent.stride as usize;
        let mut arrivals = Arrivals {
            shape: shapes[0].clone(),
            headers: vec![],
            metadata: vec![0xAA; extent.bytes() as usize],
        };
        let mut plans = Vec::new();
        let mut counts = RoundCounts::new(&shapes[0]);
        for (rank, shape) in shapes.iter().enumerate() {
            let mut plan = SendPlan::new(shape);
            let tokens = Random::new(seed ^ rank as u64).below(u64::from(config.max_tokens) + 1);
            let top_k = config.top_k as usize;
            let ids =
                Routing::Uniform.ids(seed, rank as u32, tokens as usize, top_k, config.experts);
            plan.build(&ids, None).unwrap();
            let mut header = vec![0; shape.sizes().extent(Area::SendHeader).bytes() as usize];
            header::encode(&plan, 0, &mut header).unwrap();
            counts.accept(rank as u32, &header).unwrap();
            arrivals.headers.push(header);
            plans.push(plan);
        }
        let mut receive = ReceivePlan::new(&shapes[0]);
        receive.begin(&counts).unwrap();
        for (rank, plan) in plans.iter().enumerate() {
            for (index, row) in plan.rows_for(0).enumerate() {
                let slot = receive.slot(rank as u32, index as u32) as usize;
                let record = &mut arrivals.metadata[slot * stride..][..stride];
                metadata::pack(plan, row..row + 1, &[], RowsMut::new(record, stride, stride))
                    .unwrap();
            }
        }
        arrivals
    }

    /// Takes everything; if all was accepted, every position must have been filled once.
    fn take(&self) -> Result<(), Error> {
        let mut counts = RoundCounts::new(&self.shape);
        for (peer, header) in self.headers.iter().enumerate() {
            counts.accept(peer as u32, header)?;
        }
        let mut receive = ReceivePlan::new(&self.shape);
        receive.begin(&counts)?;
        let stride = self.shape.sizes().extent(Area::Metadata).stride as usize;
        for peer in 0..self.shape.config().ranks {
            let run = |slots: Range<usize>| {
                let bytes = &self.metadata[slots.start * stride..slots.end * stride];
                Rows::new(bytes, stride, stride)
            };
            receive.accept(peer, receive.source_rows(peer, run))?;
        }
        let slots = self.shape.sizes().extent(Area::Tokens).rows;
        for (local, count) in receive.expert_counts().iter().enumerate() {
            let begin = receive.expert_offsets()[local] as usize;
            let group = &receive.slots()[begin..receive.expert_offsets()[local + 1] as usize];
            let (filled, padding) = group.split_at(*count as usize);
            assert!(filled.iter().all(|slot| *slot < slots));
            assert!(padding.iter().all(|slot| *slot == PADDING));
            let mut distinct = filled.to_vec();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), filled.len());
        }
        Ok(())
    }
}

prop_compose! {
    fn configs()(
        (ranks, experts, top_k) in (1u32..5, 1u32..9, 1u32..5),
        (max_tokens, private_rows) in (1u32..8, 0u32..5),
        pad_to in 1u32..5,
    ) -> Config {
        let layout = Layout::Contiguous { pad_to };
        Config { private_rows, layout, ..Config::new(ranks, 0, experts, top_k).sized(max_tokens, 4) }
    }
}

/// True unless the error is another than a violation by a peer, which Python raises as `ProtocolError`.
fn is_believed_or_refused(taken: Result<(), Error>) -> bool {
    matches!(
        taken,
        Ok(())
            | Err(Error::Header { .. }
                | Error::Metadata { .. }
                | Error::Overrun { .. }
                | Error::Capacity { .. })
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn garbage_for_a_header_is_an_error(config in configs(), header in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut counts = RoundCounts::new(&shape(config));
        let refused = matches!(counts.accept(0, &header), Err(Error::Header { peer: 0, .. }));
        prop_assert!(refused && !counts.has(0));
    }

    #[test]
    fn damaged_headers_never_panic(
        config in configs(),
        seed in any::<u64>(),
        damage in prop::collection::vec((any::<u64>(), prop_oneof![0u32..9, any::<u32>()]), 1..4),
    ) {
        let mut arrivals = Arrivals::new(&config, seed);
        arrivals.take().unwrap();
        for (at, value) in damage {
            let mut random = Random::new(at);
            let which = random.below(arrivals.headers.len() as u64) as usize;
            let words = arrivals.headers[which].as_chunks_mut::<4>().0;
            let word = random.below(words.len() as u64) as usize;
            words[word] = value.to_le_bytes();
        }
        prop_assert!(is_believed_or_refused(arrivals.take()));
    }

    #[test]
    fn damaged_metadata_never_panic(
        config in configs(),
        seed in any::<u64>(),
        damage in prop::collection::vec((any::<u64>(), prop_oneof![0u16..6, any::<u16>()]), 1..6),
    ) {
        let mut arrivals = Arrivals::new(&config, seed);
        for (at, value) in damage {
            let words = arrivals.metadata.as_chunks_mut::<2>().0;
            let word = (at % words.len() as u64) as usize;
            words[word] = value.to_le_bytes();
        }
        prop_assert!(is_believed_or_refused(arrivals.take()));
    }

    #[test]
    fn a_header_of_another_rank_or_round_is_refused(config in configs(), seed in any::<u64>()) {
        let arrivals = Arrivals::new(&config, seed);
        let mut counts = RoundCounts::new(&arrivals.shape);
        counts.begin(7);
        let wrong = matches!(
            counts.accept(0, &arrivals.headers[0]),
            Err(Error::Header { what: "round", expected: 7, seen: 0, .. })
        );
        prop_assert!(wrong);
        if config.ranks > 1 {
            counts.begin(0);
            let wrong = matches!(
                counts.accept(1, &arrivals.headers[0]),
                Err(Error::Header { peer: 1, what: "rank", expected: 1, seen: 0 })
            );
            prop_assert!(wrong);
        }
    }
}
