//! Reference for the twin: weft-moe's own planner and sums, which are independent from devices.

use weft_moe::device::{DeviceConfig, DeviceLayout};
use weft_moe::{
    Area, Config, DType, Float8, Layout, ReceivePlan, RoundCounts, Rows, RowsMut, ScaleType,
    SendPlan, Shape, TokenType, Weighting, combine, header, metadata, reply,
};

use crate::common::Batch;

/// The same all-to-all over the fabric, with physical experts. With every row private, slots are numbered as on
/// devices.
pub fn config(config: &DeviceConfig) -> Config {
    Config {
        ranks: config.ranks,
        rank: config.rank,
        token_type: config.wire,
        combine_dtype: config.combine_dtype,
        reply_dtype: config.reply_dtype,
        output_dtype: config.output_dtype,
        private_rows: config.max_tokens,
        layout: match config.layout {
            DeviceLayout::Contiguous { pad_to } => Layout::Contiguous { pad_to },
            DeviceLayout::Indexed | DeviceLayout::Padded { .. } | DeviceLayout::Dense => {
                Layout::Indexed
            }
        },
        placement: Some(config.placement()),
        ..Config::new(config.ranks, config.rank, config.placement().experts(), config.top_k)
            .sized(config.max_tokens, config.hidden)
    }
}

/// One rank's plans for a round.
pub struct Plans {
    pub send: SendPlan,
    pub receive: ReceivePlan,
}

/// Every rank's plans.
pub fn plan(device: &DeviceConfig, batches: &[Batch]) -> Vec<Plans> {
    let shapes: Vec<Shape> = (0..device.ranks)
        .map(|rank| Shape::new(config(&DeviceConfig { rank, ..device.clone() })).unwrap())
        .collect();
    let sends: Vec<SendPlan> = shapes
        .iter()
        .zip(batches)
        .map(|(shape, batch)| {
            let mut send = SendPlan::new(shape);
            send.build(&batch.ids, batch.weights.as_deref()).unwrap();
            send
        })
        .collect();
    let receive = |shape: &Shape| {
        let mut counts = RoundCounts::new(shape);
        counts.begin(0);
        for (source, send) in (0..).zip(&sends) {
            let mut bytes = vec![0; shape.sizes().extent(Area::SendHeader).stride as usize];
            header::encode(send, 0, &mut bytes).unwrap();
            counts.accept(source, &bytes).unwrap();
        }
        let mut plan = ReceivePlan::new(shape);
        plan.begin(&counts).unwrap();
        let stride = shape.sizes().extent(Area::SendMetadata).stride as usize;
        for (source, (send, batch)) in (0..).zip(sends.iter().zip(batches)) {
            let rows = send.rows_for(shape.config().rank);
            let mut records = vec![0; rows.len() * stride];
            let out = RowsMut::new(&mut records, stride, stride);
            metadata::pack(send, rows, &batch.scales, out).unwrap();
            let first = plan.slot(source, 0) as usize;
            let all = plan.source_rows(source, |slots| {
                // There is no remainder: what lies behind the private rows is empty.
                let bytes = slots.len() * stride;
                let begin = if bytes > 0 { (slots.start - first) * stride } else { 0 };
                Rows::new(&records[begin..begin + bytes], stride, stride)
            });
            plan.accept(source, all).unwrap();
        }
        plan
    };
    let receives: Vec<ReceivePlan> = shapes.iter().map(receive).collect();
    sends.into_iter().zip(receives).map(|(send, receive)| Plans { send, receive }).collect()
}

/// The device's number for a row whose slot the host's plan names: sources are `max_tokens` rows apart, without room
/// for records between them.
pub fn device_row(plan: &ReceivePlan, slot: u32) -> i32 {
    let private_slots = plan.shape().sizes().private_slots();
    let (source, row) = (slot / private_slots, slot % private_slots);
    (source * plan.shape().config().max_tokens + row) as i32
}

/// Every rank's result, by replies and their sums, given every rank's expert outputs by [`ReceivePlan`] position.
pub fn combined(plans: &mut [Plans], weighting: Weighting, outputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let shape = plans[0].send.shape().clone();
    let (output, reply_bytes) =
        (shape.area_row_bytes(Area::ExpertOutput), shape.area_row_bytes(Area::Replies));
    let replies: Vec<Vec<u8>> = (0..plans.len())
        .map(|source| {
            let mut replies = Vec::new();
            for (rank, outputs) in plans.iter().zip(outputs) {
                let rows = rank.receive.replies_to(source as u32).len();
                let mut out = vec![0; rows * reply_bytes];
                let outputs = Rows::new(outputs, output, output);
                let into = RowsMut::new(&mut out, reply_bytes, reply_bytes);
                reply(&rank.receive, source as u32, weighting, outputs, into).unwrap();
                replies.extend(out);
            }
            replies
        })
        .collect();
    let row = shape.area_row_bytes(Area::Output);
    plans
        .iter_mut()
        .zip(&replies)
        .map(|(plans, replies)| {
            let tokens = plans.send.tokens();
            let mut out = vec![0; tokens * row];
            let into = RowsMut::new(&mut out, row, row);
            let replies = Rows::new(replies, reply_bytes, reply_bytes);
            combine(&mut plans.send, 0..tokens, weighting, replies, into).unwrap();
            out
        })
        .collect()
}

/// Casts one token to e4m3 as the kernels do it, written a second time.
pub fn cast(from: DType, token: &[u8], scale: ScaleType, block: u32) -> (Vec<u8>, Vec<u8>) {
    let mut values = vec![0f32; token.len() / from.bytes()];
    TokenType::Plain(from).load(token, &[], &mut values);
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for values in values.chunks(block as usize) {
        let mut largest = 0f32;
        for value in values {
            largest = if value.abs() > largest { value.abs() } else { largest };
        }
        let step = match scale {
            _ if largest == f32::INFINITY => f32::INFINITY,
            _ if largest == 0.0 => 1.0,
            ScaleType::F32 => (largest / 448.0).max(f32::MIN_POSITIVE),
            ScaleType::Ue8m0 => {
                // From 2^-127 upwards; 448 times a power of two is a float64 without rounding.
                let mut power = f32::MIN_POSITIVE / 2.0;
                while 448.0 * f64::from(power) < f64::from(largest) {
                    power *= 2.0;
                }
                power
            }
        };
        match scale {
            ScaleType::F32 => scales.extend(step.to_le_bytes()),
            // The exponent bits; for an infinity they equal NaN's here.
            ScaleType::Ue8m0 => scales.push((step.to_bits() >> 23) as u8),
        }
        let inverse = 1.0 / step;
        for value in values {
            let scaled = value * inverse;
            codes.push(match scaled {
                scaled if scaled.is_nan() => 0x7F,
                scaled if scaled > 448.0 => 0x7E,
                scaled if scaled < -448.0 => 0xFE,
                scaled => Float8::E4M3.encode(scaled),
            });
        }
    }
    (codes, scales)
}
