//! Planning time: the sender's batch plan, and the receiver's plan from all headers.
//!
//! Run `cargo bench -p weft-moe`. On a shared machine, take the minimum over several runs.

#![allow(missing_docs, reason = "what criterion_group makes has none")]

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::ops::Range;
use weft_moe::routing::Routing;
use weft_moe::{
    Area, Config, ReceivePlan, RoundCounts, Rows, RowsMut, SendPlan, Shape, header, metadata,
};

const RANKS: u32 = 64;
const EXPERTS: u32 = 256;
const TOP_K: usize = 8;
const TOKENS: usize = 4096;
const SEED: u64 = 1;

fn shape(rank: u32, max_tokens: usize) -> Shape {
    let config = Config::new(RANKS, rank, EXPERTS, TOP_K as u32).sized(max_tokens as u32, 1);
    Shape::new(config).expect("a possible shape")
}

fn ids(routing: Routing, rank: u32, tokens: usize) -> Vec<i64> {
    routing.ids(SEED, rank, tokens, TOP_K, EXPERTS)
}

fn send(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("send plan of 4096 tokens, top-8 of 256, 64 ranks");
    let shape = shape(0, TOKENS);
    let mut plan = SendPlan::new(&shape);
    let weights = Routing::weights(SEED, 0, TOKENS, TOP_K);
    for (name, routing) in [
        ("uniform", Routing::Uniform),
        ("zipf 1", Routing::Zipf { exponent: 1.0 }),
        ("incast", Routing::Incast),
    ] {
        let ids = ids(routing, 0, TOKENS);
        group.bench_function(name, |bencher| {
            bencher.iter(|| plan.build(black_box(&ids), Some(black_box(&weights))));
        });
    }
    group.finish();
}

/// A rank's receive plan from all others' headers and records.
fn receive(criterion: &mut Criterion) {
    let tokens = TOKENS / RANKS as usize;
    let shape = shape(0, tokens);
    let record = shape.sizes().extent(Area::Metadata);
    let mut records = vec![0; record.bytes() as usize];
    let mut counts = RoundCounts::new(&shape);
    let mut plans = Vec::new();
    for rank in 0..RANKS {
        let sender = self::shape(rank, tokens);
        let mut plan = SendPlan::new(&sender);
        plan.build(&ids(Routing::Uniform, rank, tokens), None).expect("possible ids");
        let mut bytes = vec![0; sender.sizes().extent(Area::SendHeader).bytes() as usize];
        header::encode(&plan, 0, &mut bytes).expect("room for a header");
        counts.accept(rank, &bytes).expect("a right header");
        plans.push(plan);
    }
    let mut receive = ReceivePlan::new(&shape);
    receive.begin(&counts).expect("all fits");
    let stride = record.stride as usize;
    for (rank, plan) in (0..).zip(&plans) {
        for (index, row) in (0..).zip(plan.rows_for(0)) {
            let at = receive.slot(rank, index) as usize * stride;
            let out = RowsMut::new(&mut records[at..at + stride], stride, stride);
            metadata::pack(plan, row..row + 1, &[], out).expect("room for a record");
        }
    }
    let run = |slots: Range<usize>| {
        Rows::new(&records[slots.start * stride..slots.end * stride], stride, stride)
    };
    let mut group = criterion.benchmark_group("receive plan of 64 tokens from each of 64 ranks");
    group.bench_function("uniform", |bencher| {
        bencher.iter_batched_ref(
            || receive.clone(),
            |receive| {
                receive.begin(&counts)?;
                for rank in 0..RANKS {
                    receive.accept(rank, receive.source_rows(rank, run))?;
                }
                Ok::<(), weft_moe::Error>(())
            },
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

criterion_group!(planners, send, receive);
criterion_main!(planners);
