//! Model constants: message, step, reduction and collective costs.
//!
//! No constant depends on the algorithm, the size or the network.

use serde::{Deserialize, Serialize};

use crate::check::{at_least_0, more_than_0};
use crate::error::Error;

/// Costs beyond link bandwidth and latency, in seconds and bytes per second. A `None` rate is infinite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Constants {
    /// Time for which posting one write occupies the NIC; posts at one NIC queue.
    pub post_s: f64,
    /// Time per message from NIC to NIC beyond link latency and byte transfer.
    pub message_latency_s: f64,
    /// Time from when a write arrives until the waiting rank's next operation.
    pub wait_s: f64,
    /// Time on each rank before the first operation in a collective.
    pub launch_s: f64,
    /// Fixed time per reduction.
    pub reduce_launch_s: f64,
    /// Reduction rate, in bytes of the reduced vector.
    pub reduce_bytes_per_s: Option<f64>,
    /// Bytes in a reduction that do not overlap with their arrival: a longer reduction takes as long as one with this
    /// length. `None`: no overlap.
    pub reduce_tail_bytes: Option<u64>,
    /// Segment size: longer vectors are cut into segments, processed one after the other, as in a library with staging
    /// buffers that have this size. `None`: one segment.
    pub segment_bytes: Option<u64>,
    /// Copy rate within a rank.
    pub copy_bytes_per_s: Option<f64>,
    /// Payload share in a link's bandwidth.
    pub wire_efficiency: f64,
    /// Mean for each message's exponentially distributed extra delay.
    pub jitter_s: f64,
    /// The same mean, as a share of the message's transfer time on the rank's own link.
    pub jitter_share: f64,
}

impl Default for Constants {
    fn default() -> Self {
        Constants {
            post_s: 0.0,
            message_latency_s: 0.0,
            wait_s: 0.0,
            launch_s: 0.0,
            reduce_launch_s: 0.0,
            reduce_bytes_per_s: None,
            reduce_tail_bytes: None,
            segment_bytes: None,
            copy_bytes_per_s: None,
            wire_efficiency: 1.0,
            jitter_s: 0.0,
            jitter_share: 0.0,
        }
    }
}

impl Constants {
    /// Rejects negative times, rates up to 0, and NaN.
    pub fn check(&self) -> Result<(), Error> {
        let times = [
            ("post_s", self.post_s),
            ("message_latency_s", self.message_latency_s),
            ("wait_s", self.wait_s),
            ("launch_s", self.launch_s),
            ("reduce_launch_s", self.reduce_launch_s),
            ("jitter_s", self.jitter_s),
            ("jitter_share", self.jitter_share),
        ];
        for (field, value) in times {
            at_least_0(format!("constants.{field}"), value)?;
        }
        let rates = [
            ("reduce_bytes_per_s", self.reduce_bytes_per_s),
            ("copy_bytes_per_s", self.copy_bytes_per_s),
        ];
        for (field, value) in rates {
            if let Some(value) = value {
                more_than_0(format!("constants.{field}"), value)?;
            }
        }
        if let Some(bytes @ 0) = self.segment_bytes {
            return Err(Error::field("constants.segment_bytes", bytes, "more than 0"));
        }
        if !(self.wire_efficiency > 0.0 && self.wire_efficiency <= 1.0) {
            let must = "more than 0 and at most 1";
            return Err(Error::field("constants.wire_efficiency", self.wire_efficiency, must));
        }
        Ok(())
    }

    /// Time to reduce `bytes`.
    pub fn reduce_s(&self, bytes: u64) -> f64 {
        let exposed = self.reduce_tail_bytes.map_or(bytes, |tail| bytes.min(tail));
        self.reduce_launch_s + self.reduce_bytes_per_s.map_or(0.0, |rate| exposed as f64 / rate)
    }

    /// Time to copy `bytes` within a rank.
    pub fn copy_s(&self, bytes: u64) -> f64 {
        self.copy_bytes_per_s.map_or(0.0, |rate| bytes as f64 / rate)
    }
}

impl Constants {
    /// Only bandwidth and latency, with 1.5 us for each message.
    pub fn ideal() -> Constants {
        Constants { message_latency_s: 1.5e-6, ..Constants::default() }
    }
}
