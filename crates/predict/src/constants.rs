//! Constants of the model: costs of a message, a step, a reduction and a collective.
//!
//! No constant depends on the algorithm, the size or the network.

use serde::{Deserialize, Serialize};

use crate::check::{at_least_0, more_than_0};
use crate::error::Error;

/// Costs beyond the bandwidth and the latency of links, in seconds and bytes per second. A rate of `None` is
/// infinite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Constants {
    /// Time for which posting one write occupies the NIC; posts of one NIC queue.
    pub post_s: f64,
    /// Time of a message from NIC to NIC beyond the latency of links and the transfer of its bytes.
    pub message_latency_s: f64,
    /// Time from the arrival of a write to the next operation of the waiting rank.
    pub wait_s: f64,
    /// Time of each rank before the first operation of a collective.
    pub launch_s: f64,
    /// Fixed time of a reduction.
    pub reduce_launch_s: f64,
    /// Rate of reductions, in bytes of the reduced vector.
    pub reduce_bytes_per_s: Option<f64>,
    /// Bytes of a reduction that do not overlap with their arrival: a longer reduction takes as long as one of
    /// this length. `None`: no overlap.
    pub reduce_tail_bytes: Option<u64>,
    /// Segment size: longer vectors are cut into segments, processed one after the other, as by a library with
    /// staging buffers of this size. `None`: one segment.
    pub segment_bytes: Option<u64>,
    /// Rate of copies within a rank.
    pub copy_bytes_per_s: Option<f64>,
    /// Payload share of a link's bandwidth.
    pub wire_efficiency: f64,
    /// Mean of an exponentially distributed extra delay of each message.
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
    /// Rejects negative times, rates of 0 or less, and NaN.
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

    /// Time of a reduction of `bytes`.
    pub fn reduce_s(&self, bytes: u64) -> f64 {
        let exposed = self.reduce_tail_bytes.map_or(bytes, |tail| bytes.min(tail));
        self.reduce_launch_s + self.reduce_bytes_per_s.map_or(0.0, |rate| exposed as f64 / rate)
    }

    /// Time of a copy of `bytes` within a rank.
    pub fn copy_s(&self, bytes: u64) -> f64 {
        self.copy_bytes_per_s.map_or(0.0, |rate| bytes as f64 / rate)
    }
}

impl Constants {
    /// Bandwidth and latency alone, with 1.5 us for each message.
    pub fn ideal() -> Constants {
        Constants { message_latency_s: 1.5e-6, ..Constants::default() }
    }
}
