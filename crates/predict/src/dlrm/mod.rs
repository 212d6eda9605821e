//! Recommendation model on many nodes: embedding pooling, all-to-all, MLPs; fused and unfused.
//!
//! Each rank holds whole tables and pools them for all ranks' samples; an all-to-all sends each rank the vectors for
//! its own samples. Unfused, the all-to-all begins after pooling. Fused, each slice is sent once it is pooled, slices
//! for peers first and the rank's own last. In training, a second, unfused all-to-all returns gradients, and the tables
//! are updated.
//!
//! A rank computes on one stream, in order. The bottom MLP, forward and backward, overlaps with an all-to-all in
//! flight, as neither depends on the other.
//!
//! - `job.rs`: iteration sizes and rates
//! - `workload.rs`: iteration state machine

mod job;
mod workload;

pub use job::{DlrmJob, DlrmScenario, Variant};
pub use workload::DlrmWorkload;

use serde_json::json;

use crate::cpu::CpuTime;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::progress::Progress;
use crate::world::World;

/// Runs the scenario on the cluster that it names.
pub(crate) fn run(spec: &DlrmScenario, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
    let job = &spec.job;
    job.check()?;
    spec.cluster.check(job.ranks)?;
    let variants: &[bool] = match spec.variant {
        Variant::Fused => &[true],
        Variant::Unfused => &[false],
        Variant::Both => &[false, true],
    };
    let mut times = [None; 2];
    let mut last = None;
    let mut cpu_s = 0.0;
    for &fused in variants {
        let cpu = CpuTime::start();
        let mut world = World::new(&spec.cluster)?;
        if spec.trace > 0 {
            world.record(spec.trace);
        }
        let mut workload = DlrmWorkload::new(&mut world, job, &spec.cluster, fused)?;
        let time_s = world.run(&mut [&mut workload], progress)?;
        times[usize::from(fused)] = Some((time_s, workload.exchange_s));
        let outcome = world.outcome(time_s, cpu, spec.links);
        cpu_s += outcome.cpu_s;
        last = Some(outcome);
    }
    let Some(mut outcome) = last else { return Err(Error::NoWorkload) };
    outcome.cpu_s = cpu_s;
    let [unfused, fused] = times;
    let gain = match (unfused, fused) {
        (Some((unfused, _)), Some((fused, _))) => Some(1.0 - fused / unfused),
        _ => None,
    };
    outcome.results = json!({
        "unfused_s": unfused.map(|times| times.0),
        "fused_s": fused.map(|times| times.0),
        "gain": gain,
        "pooling_s": job.pooling_s(),
        "forward_exchange_s": {
            "unfused": unfused.map(|times| times.1), "fused": fused.map(|times| times.1),
        },
        "bottom_mlp_s": job.mlp_s(job.bottom_flops),
        "top_mlp_s": job.mlp_s(job.top_flops),
        "bytes_for_peer": job.bytes_for_peer(),
    });
    Ok(outcome)
}
