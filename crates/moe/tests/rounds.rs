//! All ranks in a group in one process: the plans copy rows, and the results are compared with the
//! reference.

mod common;

use common::{Batch, batches, busiest, check_output, run_expert, token_types};
use proptest::prelude::*;
use std::collections::HashSet;
use std::ops::Range;
use weft_moe::routing::Routing;
use weft_moe::{
    Area, CombineMode, Config, DType, Error, Layout, PADDING, ReceivePlan, RoundCounts, Rows,
    RowsMut, SendPlan, Shape, Weighting, combine, header, metadata, reply,
};

/// One rank: plans and one channel.
struct Member {
    shape: Shape,
    send: SendPlan,
    counts: RoundCounts,
    receive: ReceivePlan,
    memory: Vec<u8>,
    /// Arrival area rows that a peer has written in this round.
    written: HashSet<(Area, u32)>,
    /// Tokens as they leave: a row each, at the token area's stride.
    leaving: Vec<u8>,
}

impl Member {
    fn new(config: &Config, rank: u32) -> Member {
        let shape = Shape::new(Config { rank, ..config.clone() }).unwrap();
        Member {
            send: SendPlan::new(&shape),
            counts: RoundCounts::new(&shape),
            receive: ReceivePlan::new(&shape),
            memory: vec![0xAA; shape.sizes().channel_bytes() as usize],
            written: HashSet::new(),
            leaving: Vec::new(),
            shape,
        }
    }

    fn span(&self, area: Area, rows: Range<usize>) -> Range<usize> {
        span(&self.shape, area, rows)
    }

    fn whole(&self, area: Area) -> Range<usize> {
        self.span(area, 0..self.shape.sizes().extent(area).rows as usize)
    }

    fn stride(&self, area: Area) -> usize {
        self.shape.sizes().extent(area).stride as usize
    }

    fn row_bytes(&self, area: Area) -> usize {
        self.shape.area_row_bytes(area)
    }

    fn rows(&self, area: Area, rows: Range<usize>) -> Rows<'_> {
        area_rows(&self.shape, &self.memory, area, rows)
    }

    fn row(&self, area: Area, row: usize) -> &[u8] {
        self.rows(area, row..row + 1).row(0)
    }
}

fn span(shape: &Shape, area: Area, rows: Range<usize>) -> Range<usize> {
    let extent = shape.sizes().extent(area);
    assert!(rows.end <= extent.rows as usize, "{area}: {rows:?} of {}", extent.rows);
    let (offset, stride) = (extent.offset as usize, extent.stride as usize);
    offset + rows.start * stride..offset + rows.end * stride
}

fn area_rows<'a>(shape: &Shape, memory: &'a [u8], area: Area, rows: Range<usize>) -> Rows<'a> {
    let stride = shape.sizes().extent(area).stride as usize;
    Rows::new(&memory[span(shape, area, rows)], shape.area_row_bytes(area), stride)
}

/// Writes rows from one member's area into another's; each arrival row is written at most once a round.
fn write(
    members: &mut [Member],
    (from, area, rows): (u32, Area, Range<usize>),
    (to, arrival, first): (u32, Area, u32),
) {
    if rows.is_empty() {
        return;
    }
    let first_row = first as usize;
    let source = &members[from as usize];
    let bytes = source.memory[source.span(area, rows.clone())].to_vec();
    let target = &mut members[to as usize];
    for row in first..first + rows.len() as u32 {
        assert!(target.written.insert((arrival, row)), "{arrival} row {row} written twice");
    }
    let span = target.span(arrival, first_row..first_row + rows.len());
    target.memory[span].copy_from_slice(&bytes);
}

/// Writes tokens from one member into another's slots.
fn write_tokens(
    members: &mut [Member],
    (from, rows): (u32, Range<usize>),
    (to, first): (u32, u32),
) {
    let stride = members[from as usize].stride(Area::Tokens);
    let bytes = members[from as usize].leaving[rows.start * stride..rows.end * stride].to_vec();
    let target = &mut members[to as usize];
    for row in first..first + rows.len() as u32 {
        assert!(target.written.insert((Area::Tokens, row)), "token slot {row} written twice");
    }
    let span = target.span(Area::Tokens, first as usize..first as usize + rows.len());
    target.memory[span].copy_from_slice(&bytes);
}

/// One round: dispatch, experts and combine. Gives each rank's output, or the first error.
fn run_round(
    members: &mut [Member],
    batches: &[Batch],
    weighting: Weighting,
    round: u64,
) -> Result<Vec<Vec<u8>>, Error> {
    let ranks = members.len() as u32;
    let private = members[0].shape.config().private_rows;
    let private_slots = members[0].shape.sizes().private_slots();
    for (member, batch) in members.iter_mut().zip(batches) {
        member.written.clear();
        member.send.build(&batch.ids, batch.weights.as_deref())?;
        let token_bytes = member.row_bytes(Area::Tokens);
        let stride = member.stride(Area::Tokens);
        let all = 0..member.send.row_count();
        member.leaving = vec![0; all.len() * stride];
        for row in all.clone() {
            let token = member.send.token_of(row) * token_bytes;
            let token = &batch.tokens[token..token + token_bytes];
            member.leaving[row * stride..][..token_bytes].copy_from_slice(token);
        }
        let span = member.span(Area::SendMetadata, all.clone());
        let stride = member.stride(Area::SendMetadata);
        let records = RowsMut::new(&mut member.memory[span], stride, stride);
        metadata::pack(&member.send, all, &batch.scales, records)?;
        let span = member.whole(Area::SendHeader);
        header::encode(&member.send, round, &mut member.memory[span])?;
    }

    // The headers and the private rows.
    for source in 0..ranks {
        for to in 0..ranks {
            write(members, (source, Area::SendHeader, 0..1), (to, Area::Headers, source));
            let rows = members[source as usize].send.rows_for(to);
            let rows = rows.start..rows.end.min(rows.start + private as usize);
            let slot = source * private_slots;
            write_tokens(members, (source, rows.clone()), (to, slot));
            write(members, (source, Area::SendMetadata, rows), (to, Area::Metadata, slot));
        }
    }
    let mut capacity = HashSet::new();
    for member in members.iter_mut() {
        member.counts.begin(round);
        for source in (0..ranks).rev() {
            let header = member.span(Area::Headers, source as usize..source as usize + 1);
            member.counts.accept(source, &member.memory[header])?;
        }
        capacity.insert(member.counts.check_capacity().map_err(|error| error.to_string()));
    }
    assert_eq!(capacity.len(), 1, "ranks disagree: {capacity:?}");
    members[0].counts.check_capacity()?;

    // The remainder.
    for source in 0..ranks {
        for to in 0..ranks {
            let rows = members[source as usize].send.rows_for(to);
            let rows = rows.end.min(rows.start + private as usize)..rows.end;
            let offset = members[source as usize].counts.remainder_offset(source, to);
            let slot = ranks * private_slots + offset;
            write_tokens(members, (source, rows.clone()), (to, slot));
            write(members, (source, Area::SendMetadata, rows), (to, Area::Metadata, slot));
        }
    }
    for member in members.iter_mut() {
        compute(member, weighting)?;
    }

    // The replies.
    for rank in 0..ranks {
        for source in 0..ranks {
            let rows = members[rank as usize].receive.replies_to(source);
            let first = members[rank as usize].counts.reply_offset(source, rank);
            let expected = members[source as usize].send.replies_from(rank);
            assert_eq!(expected, first as usize..first as usize + rows.len());
            write(members, (rank, Area::SendReplies, rows), (source, Area::Replies, first));
        }
    }
    let mut outputs = Vec::new();
    for member in members.iter_mut() {
        let bytes = member.shape.row_bytes(member.shape.config().output_dtype);
        let tokens = member.send.tokens();
        let mut output = vec![0xAA; tokens * bytes];
        let (span, stride) = (member.whole(Area::Replies), member.stride(Area::Replies));
        let replies = Rows::new(&member.memory[span], member.row_bytes(Area::Replies), stride);
        // In two halves, as a driver may.
        for tokens in [0..tokens / 2, tokens / 2..tokens] {
            let out = RowsMut::new(&mut output, bytes, bytes);
            combine(&mut member.send, tokens, weighting, replies, out)?;
        }
        outputs.push(output);
    }
    Ok(outputs)
}

/// A rank's work between the halves: places tokens, runs experts, writes replies.
fn compute(member: &mut Member, weighting: Weighting) -> Result<(), Error> {
    let config = member.shape.config().clone();
    member.receive.begin(&member.counts)?;
    for source in (0..config.ranks).rev() {
        assert!(!member.receive.is_complete());
        let Member { shape, receive, memory, .. } = &mut *member;
        let records =
            receive.source_rows(source, |slots| area_rows(shape, memory, Area::Metadata, slots));
        receive.accept(source, records)?;
    }
    assert!(member.receive.is_complete());

    let positions = member.receive.positions();
    let token_bytes = member.row_bytes(Area::Tokens);
    let scale_bytes = member.shape.scale_bytes();
    let in_record = member.shape.scales_in_record();
    let mut input = vec![0xAA; positions * token_bytes];
    let mut scales = vec![0xAA; positions * scale_bytes];
    if let Layout::Contiguous { .. } = config.layout {
        assert!(positions <= member.shape.sizes().extent(Area::Expert).rows as usize);
        for source in 0..config.ranks {
            let out = RowsMut::new(&mut input, token_bytes, token_bytes);
            let run = |slots| member.rows(Area::Tokens, slots);
            let tokens = member.receive.source_rows(source, run);
            member.receive.lay_out(Area::Expert, source, tokens, out)?;
            if scale_bytes > 0 {
                let run = |slots| member.rows(Area::Metadata, slots);
                let records = member.receive.source_rows(source, run);
                let out = RowsMut::new(&mut scales, scale_bytes, scale_bytes);
                let from = records.columns(in_record.clone());
                member.receive.lay_out(Area::ExpertScales, source, from, out)?;
            }
        }
        let out = RowsMut::new(&mut input, token_bytes, token_bytes);
        member.receive.clear_padding(Area::Expert, out)?;
        if scale_bytes > 0 {
            let out = RowsMut::new(&mut scales, scale_bytes, scale_bytes);
            member.receive.clear_padding(Area::ExpertScales, out)?;
        }
    } else {
        let rows = input.chunks_exact_mut(token_bytes);
        for (row, &slot) in rows.zip(member.receive.slots()) {
            row.copy_from_slice(member.row(Area::Tokens, slot as usize));
        }
        for (position, &slot) in member.receive.slots().iter().enumerate() {
            let record = member.row(Area::Metadata, slot as usize);
            scales[position * scale_bytes..][..scale_bytes]
                .copy_from_slice(&record[in_record.clone()]);
        }
    }

    let reply_bytes = member.row_bytes(Area::SendReplies);
    let output_bytes = member.row_bytes(Area::ExpertOutput);
    let mut output = vec![0xAA; positions * output_bytes];
    let first = member.shape.placement().experts_of(config.rank).start;
    let offsets = member.receive.expert_offsets();
    for (local, count) in member.receive.expert_counts().iter().enumerate() {
        assert_eq!(offsets[local] % config.layout.pad_to(), 0);
        for position in offsets[local] as usize..(offsets[local] + count) as usize {
            let weight = member.receive.weights()[position];
            let weight = if weighting == Weighting::AtExpert { weight } else { 1.0 };
            let input = &input[position * token_bytes..][..token_bytes];
            let scales = &scales[position * scale_bytes..][..scale_bytes];
            let output = &mut output[position * output_bytes..][..output_bytes];
            run_expert(&config, first + local as u32, weight, (input, scales), output);
        }
        for position in offsets[local] + count..offsets[local + 1] {
            let row = &input[position as usize * token_bytes..][..token_bytes];
            let scales = &scales[position as usize * scale_bytes..][..scale_bytes];
            assert!(row.iter().chain(scales).all(|byte| *byte == 0), "padding is zeros");
            assert_eq!(member.receive.slots()[position as usize], PADDING);
            assert_eq!(member.receive.weights()[position as usize], 0.0);
        }
    }

    for source in 0..config.ranks {
        let (stride, rows) = (member.stride(Area::SendReplies), member.receive.replies_to(source));
        let span = member.span(Area::SendReplies, rows);
        if !span.is_empty() {
            let out = RowsMut::new(&mut member.memory[span], reply_bytes, stride);
            let outputs = Rows::new(&output, output_bytes, output_bytes);
            reply(&member.receive, source, weighting, outputs, out)?;
        }
    }
    Ok(())
}

/// Compares each rank's groups with lists made the slow way.
fn check_layout(members: &[Member], batches: &[Batch]) {
    for member in members {
        let config = member.shape.config();
        let top_k = config.top_k as usize;
        let experts = member.shape.placement().experts_of(config.rank);
        for (local, expert) in experts.enumerate() {
            let mut position = member.receive.expert_offsets()[local] as usize;
            for batch in batches {
                for (at, _) in
                    batch.ids.iter().enumerate().filter(|(_, id)| **id == i64::from(expert))
                {
                    let slot = member.receive.slots()[position] as usize;
                    let (token, scales) = batch.token(config, at / top_k);
                    assert_eq!(member.row(Area::Tokens, slot), token);
                    let record = member.row(Area::Metadata, slot);
                    assert_eq!(&record[member.shape.scales_in_record()], scales);
                    let weight = batch.weights.as_ref().map_or(1.0, |weights| weights[at]);
                    assert_eq!(member.receive.weights()[position], weight);
                    position += 1;
                }
            }
            let end =
                member.receive.expert_offsets()[local] + member.receive.expert_counts()[local];
            assert_eq!(position, end as usize);
        }
    }
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop::sample::select(&DType::ALL)
}

prop_compose! {
    fn configs()(
        (ranks, experts, top_k) in (1u32..7, 1u32..14, 1u32..6),
        (hidden, max_tokens) in (prop_oneof![1u32..40, 250u32..300], 1u32..14),
        private_rows in 0u32..8,
        max_receive_rows in prop::option::weighted(0.3, 0u32..40),
        token_type in (1u32..50).prop_flat_map(|block| prop::sample::select(token_types(block))),
        (combine_dtype, reply_dtype, output_dtype) in (dtypes(), dtypes(), dtypes()),
        layout in prop_oneof![
            Just(Layout::Indexed),
            (1u32..9).prop_map(|pad_to| Layout::Contiguous { pad_to }),
        ],
        combine in prop::sample::select(&[CombineMode::ReduceAtExpert, CombineMode::PerExpert]),
    ) -> Config {
        Config {
            private_rows, max_receive_rows, token_type, combine_dtype, reply_dtype, output_dtype,
            layout, combine,
            ..Config::new(ranks, 0, experts, top_k).sized(max_tokens, hidden)
        }
    }
}

fn routings() -> impl Strategy<Value = Option<Routing>> {
    prop::sample::select(&[
        Some(Routing::Uniform),
        Some(Routing::Zipf { exponent: 1.2 }),
        Some(Routing::Incast),
        None,
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn dispatch_and_combine_equal_the_dense_reference(
        config in configs(),
        rounds in prop::collection::vec((routings(), 0u64..9, any::<u64>()), 1..3),
        weighting in prop::sample::select(&[Weighting::AtCombine, Weighting::AtExpert]),
    ) {
        let mut members: Vec<Member> =
            (0..config.ranks).map(|rank| Member::new(&config, rank)).collect();
        for (round, (routing, masked, seed)) in rounds.into_iter().enumerate() {
            let batches = batches(&config, routing, masked, seed);
            let busiest = busiest(&members[0].shape, &batches);
            let result = run_round(&mut members, &batches, weighting, round as u64);
            if busiest > config.max_receive_rows.unwrap_or(u32::MAX) {
                let rows = match result {
                    Err(Error::Capacity { rows, .. }) => rows,
                    other => panic!("{other:?}"),
                };
                prop_assert!(rows <= u64::from(busiest));
                break;
            }
            let outputs = result.unwrap();
            check_layout(&members, &batches);
            for ((member, batch), output) in members.iter().zip(&batches).zip(&outputs) {
                check_output(&member.shape, batch, weighting, output);
            }
        }
    }
}
