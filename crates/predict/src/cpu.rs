//! How long the simulation itself took.

use rustix::time::{ClockId, clock_gettime};

/// Processor time of this thread since it was made.
#[derive(Clone, Copy, Debug)]
pub struct CpuTime(f64);

impl CpuTime {
    /// From now on.
    pub fn start() -> CpuTime {
        CpuTime(now())
    }

    /// Seconds of processor time since.
    pub fn seconds(&self) -> f64 {
        now() - self.0
    }
}

fn now() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
