//! Links: bandwidth, latency and ends.

use crate::error::{Error, Result};
use crate::ids::{LinkId, NodeId};

/// Cable bandwidth and latency, in each direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSpec {
    /// Bytes per second: finite, above 0.
    pub bandwidth: f64,
    /// Seconds until the first byte arrives: finite, at least 0.
    pub latency: f64,
}

impl LinkSpec {
    /// From data sheet units: 10^9 bits per second and microseconds.
    pub fn new(gbps: f64, latency_us: f64) -> LinkSpec {
        LinkSpec { bandwidth: gbps * BYTES_PER_GIGABIT, latency: latency_us * 1e-6 }
    }

    /// The same values, checked. Within the bounds, sums over paths and quotients with sizes stay finite.
    pub(crate) fn checked(self, at: impl Fn() -> String) -> Result<LinkSpec> {
        if !(self.bandwidth.is_finite() && self.bandwidth > 0.0) {
            let must = "a finite number above 0 bytes/s";
            return Err(Error::Number { at: at(), what: "bandwidth", value: self.bandwidth, must });
        }
        if !(1e-30..=1e30).contains(&self.bandwidth) {
            let must = "a number of bytes/s from 1e-30 to 1e30";
            return Err(Error::Number { at: at(), what: "bandwidth", value: self.bandwidth, must });
        }
        if !(self.latency.is_finite() && self.latency >= 0.0) {
            let must = "a finite number of seconds, not negative";
            return Err(Error::Number { at: at(), what: "latency", value: self.latency, must });
        }
        if self.latency > 1e30 {
            let must = "a number of seconds from 0 to 1e30";
            return Err(Error::Number { at: at(), what: "latency", value: self.latency, must });
        }
        Ok(self)
    }
}

impl Default for LinkSpec {
    /// 100 Gb/s and half a microsecond.
    fn default() -> LinkSpec {
        LinkSpec::new(100.0, 0.5)
    }
}

/// Bytes per second in 1 Gb/s.
pub(crate) const BYTES_PER_GIGABIT: f64 = 1.25e8;

/// A directed link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkInfo {
    /// The node that sends on it.
    pub from: NodeId,
    /// The node that receives.
    pub to: NodeId,
    /// Bytes per second.
    pub bandwidth: f64,
    /// Seconds.
    pub latency: f64,
    /// The same cable's other direction, unless the link is one-way.
    pub reverse: Option<LinkId>,
}
