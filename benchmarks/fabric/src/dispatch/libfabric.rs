//! Side `libfabric`: the same headers, queries and answers as bare libfabric writes (`benchmarks/peers/ofi_queries.c`).

use super::{Measured, Options};
use crate::Outcome;
use serde::Deserialize;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Round trips with one query.
const TRIPS: u64 = 2000;

/// Program output.
#[derive(Deserialize)]
struct Output {
    queries_per_s: f64,
    round_trips_ns: Vec<f64>,
    wrong: u64,
}

pub fn measure(options: &Options, bytes: usize, time: Duration) -> Outcome<Measured> {
    let folder =
        options.peers.as_ref().ok_or("side libfabric: give its program's folder with --peers")?;
    let program = folder.join("ofi-queries");
    let numbers =
        [bytes.to_string(), options.slots(bytes).to_string(), time.as_secs_f64().to_string()];
    let output = Command::new(&program)
        .arg(options.path.name())
        .args(numbers)
        .arg(TRIPS.to_string())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("{}: {error}", program.display()))?;
    if !output.status.success() {
        return Err(format!("{}: {}", program.display(), output.status).into());
    }
    let Output { queries_per_s, round_trips_ns, wrong } = serde_json::from_slice(&output.stdout)?;
    Ok(Measured { queries_per_s, round_trips_ns, wrong, ..Measured::default() })
}
