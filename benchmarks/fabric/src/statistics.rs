//! Percentiles, and summaries over samples from all rounds.

use crate::Path;
use crate::transfer::{Pattern, Sample};
use serde::Serialize;

/// Summary for one pattern, size and side.
#[derive(Serialize)]
pub struct TransferSummary {
    benchmark: &'static str,
    path: &'static str,
    pattern: Pattern,
    side: String,
    bytes: usize,
    rounds: usize,
    messages: usize,
    /// One-way microseconds over all messages at the slowest rank.
    p50_us: f64,
    p99_us: f64,
    /// Rank with the larger median.
    slowest_rank: usize,
    /// Median over rounds, from each round's median.
    median_us: f64,
    round_medians_us: Vec<f64>,
    /// Bytes / `median_us`, in GB/s.
    gb_per_s: f64,
    /// This side's time / Weft's time, median over rounds; `None` for Weft itself.
    ratio: Option<f64>,
    wrong: usize,
}

impl TransferSummary {
    /// Table headers.
    pub const HEADERS: [&'static str; 8] =
        ["pattern", "bytes", "side", "p50 us", "p99 us", "GB/s", "ratio", "wrong"];

    /// Table row.
    pub fn row(&self) -> Vec<String> {
        let pattern = match self.pattern {
            Pattern::PingPong => "ping-pong",
            Pattern::Stream => "stream",
        };
        vec![
            pattern.into(),
            self.bytes.to_string(),
            self.side.clone(),
            format!("{:.3}", self.p50_us),
            format!("{:.3}", self.p99_us),
            format!("{:.3}", self.gb_per_s),
            self.ratio.map_or(String::new(), |ratio| format!("{ratio:.2}")),
            self.wrong.to_string(),
        ]
    }
}

/// Summarises both ranks' samples, which are in the same order.
pub fn summarise(path: Path, ranks: &[Vec<Sample>]) -> Vec<TransferSummary> {
    let key = |sample: &Sample| (sample.pattern, sample.bytes, sample.side.clone());
    let mut keys = Vec::new();
    for sample in &ranks[0] {
        if !keys.contains(&key(sample)) {
            keys.push(key(sample));
        }
    }
    keys.sort_by_key(|(pattern, bytes, side)| {
        (*pattern != Pattern::PingPong, *bytes, side != "weft")
    });
    let of = |rank: usize, wanted: &(Pattern, usize, String)| -> Vec<&Sample> {
        ranks[rank].iter().filter(|sample| key(sample) == *wanted).collect()
    };
    let summary = keys.iter().map(|wanted| {
        let median = |rank: usize| percentile(&pooled(&of(rank, wanted)), 50.0);
        let slowest_rank = usize::from(median(1) > median(0));
        let samples = of(slowest_rank, wanted);
        let rounds = medians(&samples);
        let weft = medians(&of(slowest_rank, &(wanted.0, wanted.1, "weft".into())));
        let ratios: Vec<f64> = rounds.iter().zip(&weft).map(|(bare, weft)| bare / weft).collect();
        let (all, median) = (pooled(&samples), percentile(&rounds, 50.0));
        TransferSummary {
            benchmark: "transfer",
            path: path.name(),
            pattern: wanted.0,
            side: wanted.2.clone(),
            bytes: wanted.1,
            rounds: rounds.len(),
            messages: all.len(),
            p50_us: percentile(&all, 50.0) / 1000.0,
            p99_us: percentile(&all, 99.0) / 1000.0,
            slowest_rank,
            median_us: median / 1000.0,
            round_medians_us: rounds.iter().map(|ns| ns / 1000.0).collect(),
            gb_per_s: wanted.1 as f64 / median,
            ratio: (wanted.2 != "weft").then(|| percentile(&ratios, 50.0)),
            wrong: (0..2).flat_map(|rank| of(rank, wanted)).map(|sample| sample.wrong).sum(),
        }
    });
    summary.collect()
}

fn pooled(samples: &[&Sample]) -> Vec<f64> {
    samples.iter().flat_map(|sample| sample.one_way_ns.iter().copied()).collect()
}

fn medians(samples: &[&Sample]) -> Vec<f64> {
    samples.iter().map(|sample| percentile(&sample.one_way_ns, 50.0)).collect()
}

/// Percentile, interpolated between the two nearest values; NaN for an empty list.
pub fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let place = percent / 100.0 * last as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    below + (above - below) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_lie_between_their_neighbours() {
        assert_eq!(percentile(&[3.0, 1.0, 2.0], 50.0), 2.0);
        assert_eq!(percentile(&[1.0, 2.0], 50.0), 1.5);
        assert_eq!(percentile(&[0.0, 100.0], 99.0), 99.0);
        assert!(percentile(&[], 50.0).is_nan());
    }
}
