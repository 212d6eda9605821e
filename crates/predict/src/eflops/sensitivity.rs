//! What becomes of the figures when a constant is half or twice as large.

use serde_json::{Value, json};

use super::bench::Bench;
use super::clusters::Net;
use super::{LARGE, RANKS, SMALL, Work};
use crate::constants::Constants;
use crate::error::Error;

/// What varying weighs, for progress.
pub(crate) const WEIGHT: f64 = 60.0;

/// The constants of the fitted column; those that were fitted come first.
const NAMES: [&str; 8] = [
    "launch_s",
    "wire_efficiency",
    "segment_bytes",
    "message_latency_s",
    "post_s",
    "wait_s",
    "reduce_launch_s",
    "reduce_bytes_per_s",
];

/// The main figures with each constant at half and at twice its value.
pub(crate) fn vary(bench: &Bench, work: &mut Work<'_, '_>) -> Result<Vec<Value>, Error> {
    let mut rows = Vec::new();
    for name in NAMES {
        for factor in [0.5, 2.0] {
            work.step(WEIGHT / 16.0, &format!("sensitivity to {name}"))?;
            let (constants, value) = varied(&bench.constants, name, factor)?;
            let varied = Bench::new(constants, bench.link_latency_s, bench.seed, 1);
            let time = |algorithm: &str, bytes| {
                Ok::<f64, Error>(varied.measure(Net::BiGraph, RANKS, algorithm, bytes)?.time_s)
            };
            let gbps = |time_s: f64| LARGE as f64 * 8e-9 / time_s;
            let (ring, hd, hdrm) = (time("ring", LARGE)?, time("hd", LARGE)?, time("hdrm", LARGE)?);
            rows.push(json!({
                "constant": name,
                "factor": factor,
                "value": value,
                "small_ring_over_hdrm": time("ring", SMALL)? / time("hdrm", SMALL)?,
                "large_hdrm_gbps": gbps(hdrm),
                "large_ring_gbps": gbps(ring),
                "large_hdrm_minus_ring_gbps": gbps(hdrm) - gbps(ring),
                "large_hd_gbps": gbps(hd),
            }));
        }
    }
    Ok(rows)
}

/// The constants with one of them changed, and its new value; an efficiency ends at 1.
fn varied(constants: &Constants, name: &str, factor: f64) -> Result<(Constants, Value), Error> {
    let mut fields = serde_json::to_value(constants)?;
    let old = fields[name].as_f64().unwrap_or(0.0);
    let most = if name == "wire_efficiency" { 1.0 } else { f64::INFINITY };
    let new = (old * factor).min(most);
    let value = if name == "segment_bytes" { json!(new as u64) } else { json!(new) };
    fields[name] = value.clone();
    Ok((serde_json::from_value(fields)?, value))
}
