//! Run trace for Perfetto and chrome://tracing.

use std::collections::HashMap;

use serde::Serialize;
use serde_json::{Value, json};

/// Interval of virtual time on one trace row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Span {
    /// Job number; with the rank a process in the trace.
    pub job: u32,
    /// Rank within the job.
    pub rank: u32,
    /// The rank's row, such as `compute` or `network`; a thread in the trace.
    pub row: &'static str,
    /// Operation.
    pub name: String,
    /// Begin, in seconds.
    pub begin_s: f64,
    /// End, in seconds.
    pub end_s: f64,
    /// Transferred bytes.
    pub bytes: u64,
}

/// Bounded span list.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    spans: Vec<Span>,
    most: usize,
    dropped: u64,
}

impl Trace {
    /// Trace with the first `most` spans; later ones are counted.
    pub fn new(most: usize) -> Trace {
        Trace { spans: Vec::new(), most, dropped: 0 }
    }

    /// Adds a span.
    pub fn add(&mut self, span: Span) {
        if self.spans.len() < self.most {
            self.spans.push(span);
        } else {
            self.dropped += 1;
        }
    }

    /// Kept spans in `add` order.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Trace event format, in microseconds: a process for each rank in each job, a thread for each row.
    pub fn to_json(&self) -> Value {
        let mut rows: Vec<(u32, u32, &str)> = Vec::new();
        let mut numbers = HashMap::new();
        let mut events = Vec::new();
        for span in &self.spans {
            let key = (span.job, span.rank, span.row);
            let row = *numbers.entry(key).or_insert_with(|| {
                rows.push(key);
                rows.len()
            });
            events.push(json!({
                "name": span.name, "cat": span.row, "ph": "X", "pid": process(span.job, span.rank), "tid": row,
                "ts": span.begin_s * 1e6, "dur": (span.end_s - span.begin_s) * 1e6,
                "args": {"bytes": span.bytes},
            }));
        }
        for (row, (job, rank, name)) in rows.into_iter().enumerate() {
            let pid = process(job, rank);
            let process_name =
                if job == 0 { format!("rank {rank}") } else { format!("job {job}, rank {rank}") };
            events.push(json!({
                "name": "process_name", "ph": "M", "pid": pid, "args": {"name": process_name},
            }));
            events.push(json!({
                "name": "thread_name", "ph": "M", "pid": pid, "tid": row + 1, "args": {"name": name},
            }));
        }
        json!({"traceEvents": events, "displayTimeUnit": "ns", "dropped": self.dropped})
    }
}

fn process(job: u32, rank: u32) -> u64 {
    u64::from(job) << 24 | u64::from(rank)
}
