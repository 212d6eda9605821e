//! What happened when, for Perfetto and chrome://tracing.

use std::collections::HashMap;

use serde::Serialize;
use serde_json::{Value, json};

/// A stretch of virtual time on one row of the picture.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Span {
    /// The workload's number: a process of the picture.
    pub job: u32,
    /// The rank: a thread of the picture.
    pub rank: u32,
    /// Which of the rank's rows, such as `compute` or `network`.
    pub row: &'static str,
    /// What was done.
    pub name: String,
    /// From when, in seconds.
    pub begin_s: f64,
    /// Until when.
    pub end_s: f64,
    /// Bytes that it moved, if it moved any.
    pub bytes: u64,
}

/// Spans, no more than a given number of them.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    spans: Vec<Span>,
    most: usize,
    dropped: u64,
}

impl Trace {
    /// Keeps the first `most` spans and counts the others.
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

    /// The spans that were kept, in the order in which they were added.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The trace event format, in microseconds: a process for each rank of each job, a thread for each row.
    pub fn to_json(&self) -> Value {
        let mut rows: Vec<(u32, u32, &str)> = Vec::new();
        let mut places = HashMap::new();
        let mut events = Vec::new();
        for span in &self.spans {
            let key = (span.job, span.rank, span.row);
            let row = *places.entry(key).or_insert_with(|| {
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
            let whose =
                if job == 0 { format!("rank {rank}") } else { format!("job {job}, rank {rank}") };
            events.push(json!({
                "name": "process_name", "ph": "M", "pid": pid, "args": {"name": whose},
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
