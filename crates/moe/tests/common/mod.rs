//! Batches, a toy expert, and the replies that one process would get.

use std::collections::{BTreeMap, HashSet};
use weft_fabric::random::SplitMix64 as Random;
use weft_moe::reference::{Reference, toy_expert};
use weft_moe::routing::Routing;
use weft_moe::{
    BlockScaled, CombineMode, Config, DType, Float8, Rows, ScaleType, Shape, TokenType, Weighting,
};

/// One rank's batch.
#[derive(Clone, Debug)]
pub struct Batch {
    pub ids: Vec<i64>,
    pub weights: Option<Vec<f32>>,
    pub tokens: Vec<u8>,
    /// Token scales, if there are any.
    pub scales: Vec<u8>,
}

impl Batch {
    /// One token's codes and scales.
    pub fn token(&self, config: &Config, token: usize) -> (&[u8], &[u8]) {
        let hidden = config.hidden as usize;
        let (bytes, scales) =
            (hidden * config.token_type.bytes(), config.token_type.scale_bytes(hidden));
        (&self.tokens[token * bytes..][..bytes], &self.scales[token * scales..][..scales])
    }
}

/// Plain tokens in every element type, and 8-bit ones with both scale types in blocks with `block`
/// elements.
pub fn token_types(block: u32) -> Vec<TokenType> {
    let mut types: Vec<TokenType> = DType::ALL.into_iter().map(TokenType::Plain).collect();
    for format in Float8::ALL {
        for scale in ScaleType::ALL {
            types.push(TokenType::Scaled(BlockScaled { format, scale, block }));
        }
    }
    types
}

/// A batch for each rank: some empty, some full. Without a routing everything goes to the last expert.
pub fn batches(config: &Config, routing: Option<Routing>, masked: u64, seed: u64) -> Vec<Batch> {
    let mut random = Random::new(seed);
    (0..config.ranks)
        .map(|rank| {
            // Half the batches are empty or full, where things break.
            let tokens = match random.below(4) {
                0 => 0,
                1 => u64::from(config.max_tokens),
                _ => random.below(u64::from(config.max_tokens) + 1),
            } as usize;
            let top_k = config.top_k as usize;
            let mut ids = match routing {
                Some(routing) => routing.ids(seed, rank, tokens, top_k, config.experts),
                // Everything to the last expert.
                None => (0..tokens * top_k)
                    .map(|at| if at % top_k == 0 { i64::from(config.experts) - 1 } else { -1 })
                    .collect(),
            };
            for id in &mut ids {
                if random.below(8) < masked {
                    *id = -1 - random.below(5) as i64;
                }
            }
            let elements: Vec<f32> = (0..tokens * config.hidden as usize)
                .map(|_| {
                    let scale = 2f32.powi(random.below(24) as i32 - 20);
                    (random.unit() as f32 * 2.0 - 1.0) * scale
                })
                .collect();
            let hidden = config.hidden as usize;
            let token_type = config.token_type;
            let (token, scale) = (hidden * token_type.bytes(), token_type.scale_bytes(hidden));
            let (mut bytes, mut scales) = (vec![0; tokens * token], vec![0; tokens * scale]);
            for (row, elements) in elements.chunks_exact(hidden).enumerate() {
                let token = &mut bytes[row * token..][..token];
                token_type.store(elements, token, &mut scales[row * scale..][..scale]);
            }
            let weights =
                (random.below(4) > 0).then(|| Routing::weights(random.bits(), rank, tokens, top_k));
            Batch { ids, weights, tokens: bytes, scales }
        })
        .collect()
}

/// The most rows that any rank receives, counted the slow way.
pub fn busiest(shape: &Shape, batches: &[Batch]) -> u32 {
    let mut rows = vec![0; shape.config().ranks as usize];
    for batch in batches {
        for ids in batch.ids.chunks_exact(shape.config().top_k as usize) {
            let named = ids.iter().filter(|id| **id >= 0);
            let owners: HashSet<u32> =
                named.map(|id| shape.placement().owner(*id as u32)).collect();
            owners.iter().for_each(|owner| rows[*owner as usize] += 1);
        }
    }
    rows.into_iter().max().unwrap_or(0)
}

/// Runs the toy expert on one row.
pub fn run_expert(
    config: &Config,
    expert: u32,
    weight: f32,
    (token, scales): (&[u8], &[u8]),
    output: &mut [u8],
) {
    let hidden = config.hidden as usize;
    let (mut x, mut y) = (vec![0f32; hidden], vec![0f32; hidden]);
    config.token_type.load(token, scales, &mut x);
    toy_expert(expert, &x, &mut y);
    y.iter_mut().for_each(|y| *y *= weight);
    config.combine_dtype.store(&y, output);
}

/// The result in the documented order, bit by bit: sums in float32 from +0, each product rounded first.
///
/// With a reply per expert, each rounded to the reply type, in top-k order, as one process would.
/// Reduced at the experts, in top-k order within each rank, rounded to the reply type, and then in
/// rank order.
fn in_documented_order(shape: &Shape, batch: &Batch, weighting: Weighting) -> Vec<u8> {
    let config = shape.config();
    let (top_k, hidden) = (config.top_k as usize, config.hidden as usize);
    let mut row = vec![0; hidden * config.combine_dtype.bytes()];
    let mut reply = vec![0; hidden * config.reply_dtype.bytes()];
    let mut y = vec![0f32; hidden];
    let mut output = Vec::new();
    for (token, ids) in batch.ids.chunks_exact(top_k).enumerate() {
        let mut partials: BTreeMap<u32, Vec<f32>> = BTreeMap::new();
        for (slot, &id) in ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
            let weight = batch.weights.as_ref().map_or(1.0, |w| w[token * top_k + slot]);
            let (early, late) = match weighting {
                Weighting::AtExpert => (weight, 1.0),
                Weighting::AtCombine => (1.0, weight),
            };
            run_expert(config, id as u32, early, batch.token(config, token), &mut row);
            config.combine_dtype.load(&row, &mut y);
            if config.combine == CombineMode::PerExpert {
                config.reply_dtype.store(&y, &mut reply);
                config.reply_dtype.load(&reply, &mut y);
            }
            let partial = match config.combine {
                CombineMode::ReduceAtExpert => shape.placement().owner(id as u32),
                CombineMode::PerExpert => 0,
            };
            let sum = partials.entry(partial).or_insert_with(|| vec![0f32; hidden]);
            for (sum, y) in sum.iter_mut().zip(&y) {
                *sum += late * y;
            }
        }
        let mut total = vec![0f32; hidden];
        for mut partial in partials.into_values() {
            if config.combine == CombineMode::ReduceAtExpert {
                config.reply_dtype.store(&partial, &mut reply);
                config.reply_dtype.load(&reply, &mut partial);
            }
            for (sum, y) in total.iter_mut().zip(&partial) {
                *sum += y;
            }
        }
        let mut rounded = vec![0; hidden * config.output_dtype.bytes()];
        config.output_dtype.store(&total, &mut rounded);
        output.extend(rounded);
    }
    output
}

/// Compares a rank's result with the dense reference, and bit by bit with the documented order.
pub fn check_output(shape: &Shape, batch: &Batch, weighting: Weighting, output: &[u8]) {
    let config = shape.config();
    let at_combine = weighting == Weighting::AtCombine;
    let weights = batch.weights.as_deref().filter(|_| at_combine);
    let top_k = config.top_k as usize;
    let reference = Reference::new(shape, &batch.ids, weights, |token, expert, y| {
        let mut x = vec![0f32; y.len()];
        let (codes, scales) = batch.token(config, token);
        config.token_type.load(codes, scales, &mut x);
        toy_expert(expert, &x, y);
        if let (false, Some(weights)) = (at_combine, &batch.weights) {
            let ids = &batch.ids[token * top_k..][..top_k];
            let slot = ids.iter().position(|id| *id == i64::from(expert)).unwrap();
            y.iter_mut().for_each(|y| *y *= weights[token * top_k + slot]);
        }
    });
    let bytes = shape.row_bytes(config.output_dtype);
    if let Err(mismatch) = reference.check(Rows::new(output, bytes, bytes)).unwrap() {
        panic!("{mismatch}");
    }
    assert!(output == in_documented_order(shape, batch, weighting), "bits differ");
}
