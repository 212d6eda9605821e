//! Time percentiles.

use serde::Serialize;

/// Nearest-rank percentiles; zeros for an empty sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Sample size.
    pub count: u64,
    /// Mean.
    pub mean_s: f64,
    /// Minimum.
    pub min_s: f64,
    /// Median.
    pub p50_s: f64,
    /// 90th percentile.
    pub p90_s: f64,
    /// 99th percentile.
    pub p99_s: f64,
    /// 99.9th percentile.
    pub p999_s: f64,
    /// Maximum.
    pub max_s: f64,
}

impl Summary {
    /// Summary of `times`, in any order.
    pub fn of(times: &[f64]) -> Summary {
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (Some(&min_s), Some(&max_s)) = (sorted.first(), sorted.last()) else {
            return Summary::default();
        };
        let at = |share: f64| {
            let rank = (share * sorted.len() as f64).ceil() as usize;
            sorted[rank.clamp(1, sorted.len()) - 1]
        };
        Summary {
            count: sorted.len() as u64,
            mean_s: sorted.iter().sum::<f64>() / sorted.len() as f64,
            min_s,
            p50_s: at(0.5),
            p90_s: at(0.9),
            p99_s: at(0.99),
            p999_s: at(0.999),
            max_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_seen() {
        let times: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let summary = Summary::of(&times);
        assert_eq!((summary.min_s, summary.p50_s, summary.p99_s), (1.0, 50.0, 99.0));
        assert_eq!((summary.p90_s, summary.p999_s, summary.max_s), (90.0, 100.0, 100.0));
        assert_eq!((summary.mean_s, summary.count), (50.5, 100));
        assert_eq!(Summary::of(&[]), Summary::default());
        assert_eq!(Summary::of(&[3.0]).p50_s, 3.0);
    }
}
