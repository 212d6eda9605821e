//! Processor time that a simulation takes.

use rustix::time::{ClockId, clock_gettime};

/// Stopwatch for this thread's processor time.
#[derive(Clone, Copy, Debug)]
pub struct CpuTime(f64);

impl CpuTime {
    /// Starts now.
    pub fn start() -> CpuTime {
        CpuTime(now())
    }

    /// Processor seconds since the start.
    pub fn seconds(&self) -> f64 {
        now() - self.0
    }
}

fn now() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
