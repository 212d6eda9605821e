//! The constants of the model: what a message, a step, a reduction and a collective cost.
//!
//! Every constant is a field here, has one meaning, and carries in [`Constants::described`] where its
//! value came from. Nothing depends on the algorithm that runs.

use serde::{Deserialize, Serialize};

use crate::check::{at_least_0, more_than_0};
use crate::error::Error;

/// What things cost beyond the bandwidth and the latency of links. Seconds and bytes per second;
/// a rate of `None` is infinite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Constants {
    /// How long a NIC is busy with posting one write; writes of one NIC queue for it.
    pub post_s: f64,
    /// What a message takes from NIC to NIC beyond the latency of links and its bytes.
    pub message_latency_s: f64,
    /// From the arrival of a write until the waiting rank goes on.
    pub wait_s: f64,
    /// Once for each rank and collective, before its first operation.
    pub launch_s: f64,
    /// Once for each reduction.
    pub reduce_launch_s: f64,
    /// Bytes of the reduced vector summed in a second.
    pub reduce_bytes_per_s: Option<f64>,
    /// Bytes of a reduction that do not overlap with their arrival: a reduction of more takes as long
    /// as one of so many. `None`: nothing overlaps.
    pub reduce_tail_bytes: Option<u64>,
    /// The longest vector that a collective works on at once: longer ones are cut into segments, one after
    /// the other, as by a library that stages them in buffers of that size. `None`: in one piece.
    pub segment_bytes: Option<u64>,
    /// Bytes copied within a rank in a second.
    pub copy_bytes_per_s: Option<f64>,
    /// The share of a link's bandwidth that carries payload.
    pub wire_efficiency: f64,
    /// The mean of an exponentially distributed delay that each message has on top.
    pub jitter_s: f64,
    /// The same, as a share of the time that the message's bytes take on the rank's own link.
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
    /// Refuses what cannot be: negative times, rates that are not positive, NaN.
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

    /// Seconds of a reduction of `bytes`.
    pub fn reduce_s(&self, bytes: u64) -> f64 {
        let exposed = self.reduce_tail_bytes.map_or(bytes, |tail| bytes.min(tail));
        self.reduce_launch_s + self.reduce_bytes_per_s.map_or(0.0, |rate| exposed as f64 / rate)
    }

    /// Seconds of a copy of `bytes` within a rank.
    pub fn copy_s(&self, bytes: u64) -> f64 {
        self.copy_bytes_per_s.map_or(0.0, |rate| bytes as f64 / rate)
    }
}

impl Constants {
    /// Bandwidth and latency alone, with a microsecond and a half for each message.
    pub fn ideal() -> Constants {
        Constants { message_latency_s: 1.5e-6, ..Constants::default() }
    }

    /// What the EFLOPS article leaves open, fitted, and the rest from public or measured figures:
    /// `data/eflops.json` says where each comes from.
    pub fn eflops() -> Constants {
        Constants {
            post_s: 0.3e-6,
            message_latency_s: 1.5e-6,
            wait_s: 3.09e-6,
            launch_s: 62e-6,
            reduce_launch_s: 0.54e-6,
            reduce_bytes_per_s: Some(250e9),
            segment_bytes: Some(10 << 20),
            wire_efficiency: 0.837,
            ..Constants::default()
        }
    }
}
