//! What happened when, for Perfetto and chrome://tracing.

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

    /// The trace event format, in microseconds.
    pub fn to_json(&self) -> Value {
        let mut events = Vec::new();
        for span in &self.spans {
            let thread = format!("rank {} {}", span.rank, span.row);
            events.push(json!({
                "name": span.name, "cat": span.row, "ph": "X", "pid": span.job, "tid": thread,
                "ts": span.begin_s * 1e6, "dur": (span.end_s - span.begin_s) * 1e6,
                "args": {"bytes": span.bytes},
            }));
        }
        json!({"traceEvents": events, "displayTimeUnit": "ns", "dropped": self.dropped})
    }
}
