//! Event loop for a world: runs workloads until they end.

use weft_netsim::{Event, Tag};

use crate::error::Error;
use crate::progress::Progress;
use crate::workload::Workload;
use crate::world::{TAG_BITS, World};

/// Job number for faults.
const FAULTS: u64 = (1 << (64 - TAG_BITS)) - 1;
/// Events between two progress reports.
const REPORT_EVENTS: u64 = 1 << 16;
/// Instants between two reports: one with thousands of unequal flows takes milliseconds.
const REPORT_INSTANTS: u32 = 512;

impl World {
    /// Runs workloads until they end; returns the virtual time at which the last one ended.
    pub fn run(
        &mut self,
        workloads: &mut [&mut dyn Workload],
        progress: &mut Progress<'_>,
    ) -> Result<f64, Error> {
        if !progress(0.0, "simulating") {
            return Err(Error::Cancelled { time_s: 0.0 });
        }
        self.job = FAULTS;
        for (at_s, tag) in self.faults.times() {
            self.engine.timer(at_s, Tag(FAULTS << TAG_BITS | tag))?;
        }
        for (job, workload) in workloads.iter_mut().enumerate() {
            self.job = job as u64;
            workload.start(self)?;
        }
        let mut events: Vec<Event> = Vec::new();
        let (mut reported, mut instants) = (0, 0);
        loop {
            if workloads.iter().all(|workload| workload.finished().is_some()) {
                break;
            }
            events.clear();
            match self.engine.next(&mut events) {
                Ok(Some(_)) => {}
                Ok(None) => {
                    let unfinished =
                        workloads.iter().find(|workload| workload.finished().is_none());
                    return Err(
                        unfinished.map_or(Error::NoWorkload, |workload| workload.deadlock())
                    );
                }
                Err(weft_netsim::Error::Stalled { tag, link, flows, time }) => {
                    let job = (tag.0 >> TAG_BITS) as usize;
                    let flow = workloads[job].flow_name(tag.0 & ((1 << TAG_BITS) - 1));
                    let link = self.network.link_name(weft_topology::LinkId(link.0));
                    return Err(Error::Stalled { flow, link, flows, time });
                }
                Err(error) => return Err(error.into()),
            }
            self.events += events.len() as u64;
            for event in &events {
                self.job = event.tag.0 >> TAG_BITS;
                let tag = event.tag.0 & ((1 << TAG_BITS) - 1);
                if self.job == FAULTS {
                    self.faults.apply(tag, &mut self.engine)?;
                } else {
                    workloads[self.job as usize].event(self, tag)?;
                }
            }
            instants += 1;
            if self.events - reported >= REPORT_EVENTS || instants == REPORT_INSTANTS {
                (reported, instants) = (self.events, 0);
                let done: f64 = workloads.iter().map(|workload| workload.progress()).sum();
                if !progress(done / workloads.len() as f64, "simulating") {
                    return Err(Error::Cancelled { time_s: self.now() });
                }
            }
        }
        Ok(workloads.iter().filter_map(|workload| workload.finished()).fold(0.0, f64::max))
    }
}
