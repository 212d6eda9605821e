//! The EFLOPS article (HPCA 2020), figure by figure, beside what it published.
//!
//! Everything is run twice: with constants of bandwidth and latency alone (`ideal`), and with those that the
//! article leaves open fitted (`fitted`). No constant depends on the algorithm, the size or the network.
//! `docs/eflops.md` shows the outcome.

mod applications;
mod bench;
mod clusters;
mod compare;
mod named;
mod published;
mod sensitivity;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::check::from_1_to;
use crate::constants::Constants;
use crate::cpu::CpuTime;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::run::Progress;
use bench::{Bench, Measured};
use clusters::{Layout, Net};
pub(crate) use named::name_models;

/// What of the article to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EflopsSpec {
    /// Of ECMP's hash; with `seeds` more from there on, of whose times the median counts.
    #[serde(default = "one")]
    pub seed: u64,
    /// How many seeds, where routes are hashed.
    #[serde(default = "default_seeds")]
    pub seeds: u64,
    /// Sizes of the sweep, in bytes.
    #[serde(default = "default_sizes")]
    pub sizes: Vec<u64>,
    /// Numbers of GPUs of the scaling sweep.
    #[serde(default = "default_ranks")]
    pub ranks: Vec<u32>,
    /// Vary each constant.
    #[serde(default = "yes")]
    pub sensitivity: bool,
    /// Constants of the fitted column that differ from ours.
    #[serde(default)]
    pub set: serde_json::Map<String, Value>,
}

fn one() -> u64 {
    1
}

fn yes() -> bool {
    true
}

fn default_seeds() -> u64 {
    3
}

fn default_sizes() -> Vec<u64> {
    (10..=28).step_by(2).map(|power| 1 << power).collect()
}

fn default_ranks() -> Vec<u32> {
    vec![16, 32, 64, 128, 256, 512]
}

impl EflopsSpec {
    /// Everything, as published.
    pub fn all() -> EflopsSpec {
        EflopsSpec {
            seed: one(),
            seeds: default_seeds(),
            sizes: default_sizes(),
            ranks: default_ranks(),
            sensitivity: true,
            set: serde_json::Map::new(),
        }
    }

    fn check(&self) -> Result<(), Error> {
        from_1_to(1000, "seeds", self.seeds)?;
        if let Some(ranks) = self.ranks.iter().find(|ranks| clusters::layout(**ranks).is_none()) {
            return Err(Error::field("ranks", ranks, "a power of two from 8 to 4096"));
        }
        Ok(())
    }
}

/// The algorithms compared, as the article names them.
pub(crate) const ALGORITHMS: [&str; 4] = ["ring", "tree", "hd", "hdrm"];
/// The size of the cluster that was built.
pub(crate) const RANKS: u32 = 64;
/// The sizes that the article's figures are quoted at.
pub(crate) const SMALL: u64 = 1 << 10;
pub(crate) const LARGE: u64 = 1 << 28;

/// Runs the article.
pub(crate) fn run(spec: &EflopsSpec, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
    spec.check()?;
    let cpu = CpuTime::start();
    let fitted =
        crate::spec::ConstantsSpec { preset: crate::Preset::Eflops, set: spec.set.clone() };
    // The same time for every message, over three links or two: alpha and beta, and nothing else.
    let ideal = Constants { message_latency_s: 3e-6, ..Constants::default() };
    let columns = [("ideal", ideal, 0.0), ("fitted", fitted.resolve()?, 0.5e-6)];
    let mut work = Work { done: 0.0, all: weight(spec), progress };
    let mut sizes = Vec::new();
    let mut scaling = Vec::new();
    let mut applications = Vec::new();
    let mut nics = Vec::new();
    let mut benches = Vec::new();
    for (column, constants, link_latency_s) in &columns {
        constants.check()?;
        let bench = Bench::new(constants.clone(), *link_latency_s, spec.seed, spec.seeds);
        sizes.extend(sweep_sizes(column, &bench, &spec.sizes, &mut work)?);
        scaling.extend(sweep_ranks(column, &bench, &spec.ranks, &mut work)?);
        let (trained, single) = applications::run(column, &bench, &mut work)?;
        applications.push((*column, trained));
        nics.extend(single);
        benches.push(bench);
    }
    let comparison = compare::figures(&benches, &applications, &mut work)?;
    let sensitivity = match spec.sensitivity {
        true => sensitivity::vary(&benches[1], &mut work)?,
        false => Vec::new(),
    };
    let headline = benches[1].measure(Net::BiGraph, RANKS, "hdrm", LARGE)?;
    Ok(Outcome {
        time_s: headline.time_s,
        max_link_load: headline.max_link_load,
        cpu_s: cpu.seconds(),
        constants: columns[1].1.clone(),
        flows: benches.iter().map(Bench::flows).sum(),
        links: Vec::new(),
        results: json!({
            "source": published::DATA.source(),
            "cluster": published::DATA.cluster(),
            "columns": {"ideal": columns[0].1, "fitted": columns[1].1},
            "constants": published::DATA.constants(),
            "comparison": comparison,
            "sizes": sizes,
            "scaling": scaling,
            "single_nic": nics,
            "applications": applications::rows(&applications),
            "sensitivity": sensitivity,
        }),
        trace: None,
    })
}

/// How far the article has come, in about equal pieces of work.
pub(crate) struct Work<'a, 'b> {
    done: f64,
    all: f64,
    progress: &'a mut Progress<'b>,
}

impl Work<'_, '_> {
    /// A piece of that weight begins; an error if the caller wants to stop.
    pub fn step(&mut self, weight: f64, doing: &str) -> Result<(), Error> {
        let share = (self.done / self.all).min(1.0);
        self.done += weight;
        if (self.progress)(share, doing) { Ok(()) } else { Err(Error::Cancelled { time_s: 0.0 }) }
    }
}

fn weight(spec: &EflopsSpec) -> f64 {
    let sweeps =
        spec.sizes.len() as f64 * 8.0 + spec.ranks.iter().map(|n| ranks_weight(*n)).sum::<f64>();
    2.0 * (sweeps + applications::WEIGHT)
        + compare::WEIGHT
        + if spec.sensitivity { sensitivity::WEIGHT } else { 0.0 }
}

fn ranks_weight(ranks: u32) -> f64 {
    (f64::from(ranks) / 32.0).powi(2) + 8.0
}

fn sweep_sizes(
    column: &str,
    bench: &Bench,
    sizes: &[u64],
    work: &mut Work<'_, '_>,
) -> Result<Vec<Value>, Error> {
    let mut rows = Vec::new();
    for net in [Net::BiGraph, Net::FatTree] {
        for bytes in sizes {
            for algorithm in ALGORITHMS {
                work.step(1.0, &format!("{column}, {}, {algorithm}", net.name()))?;
                if net == Net::FatTree && algorithm == "hdrm" {
                    // Without a BiGraph to map to, HDRM is halving-doubling.
                    continue;
                }
                let measured = bench.measure(net, RANKS, algorithm, *bytes)?;
                rows.push(row(column, net, RANKS, algorithm, *bytes, measured));
            }
        }
    }
    Ok(rows)
}

fn sweep_ranks(
    column: &str,
    bench: &Bench,
    all: &[u32],
    work: &mut Work<'_, '_>,
) -> Result<Vec<Value>, Error> {
    let mut rows = Vec::new();
    for ranks in all {
        for algorithm in ALGORITHMS {
            work.step(ranks_weight(*ranks) / 4.0, &format!("{column}, {ranks} GPUs, {algorithm}"))?;
            for bytes in [SMALL, LARGE] {
                let net = if algorithm == "hdrm" { Net::BiGraph } else { Net::FatTree };
                let measured = bench.measure(net, *ranks, algorithm, bytes)?;
                rows.push(row(column, net, *ranks, algorithm, bytes, measured));
            }
        }
    }
    Ok(rows)
}

fn row(
    column: &str,
    net: Net,
    ranks: u32,
    algorithm: &str,
    bytes: u64,
    measured: Measured,
) -> Value {
    json!({
        "column": column,
        "network": net.name(),
        "ranks": ranks,
        "algorithm": algorithm,
        "bytes": bytes,
        "time_s": measured.time_s,
        "algorithm_bandwidth_gbps": bytes as f64 * 8e-9 / measured.time_s,
        "max_link_load": measured.max_link_load,
    })
}

/// The shape of a BiGraph for a number of GPUs, for whoever draws it.
pub fn shape(ranks: u32) -> Option<(u32, u32)> {
    clusters::layout(ranks).map(|Layout { half, ports }| (2 * half, ports))
}
