//! The applications: communication and whole iterations, by algorithm, and with a single NIC for each node.

use serde_json::{Value, json};

use super::bench::Bench;
use super::clusters::{Net, Order};
use super::published::DATA;
use super::{RANKS, Work};
use crate::error::Error;
use crate::train::{TrainJob, communication_s};
use crate::world::World;

/// What running them weighs, for progress.
pub(crate) const WEIGHT: f64 = 40.0;

/// Applications, as the data name them.
pub(crate) const MODELS: [&str; 3] = ["resnet50", "million-class", "bert"];

/// An iteration's time.
#[derive(Clone, Debug)]
pub(crate) struct Trained {
    pub model: &'static str,
    pub net: Net,
    pub order: Order,
    pub algorithm: &'static str,
    pub overlap: bool,
    pub iteration_s: f64,
    pub communication_s: f64,
}

/// Trains everything on the cluster of the article, and the classifier with single NICs. The second half of the
/// result is what single NICs cost, for each baseline that it may have been.
pub(crate) fn run(
    column: &str,
    bench: &Bench,
    work: &mut Work<'_, '_>,
) -> Result<(Vec<Trained>, Vec<Value>), Error> {
    let mut all = Vec::new();
    for model in MODELS {
        for algorithm in ["ring", "hdrm"] {
            for overlap in [false, true] {
                work.step(2.0, &format!("{column}, {model}, {algorithm}"))?;
                all.push(train(bench, model, Net::BiGraph, Order::ByNode, algorithm, overlap)?);
            }
        }
    }
    let ours = all
        .iter()
        .find(|one| one.model == "million-class" && one.algorithm == "hdrm" && !one.overlap)
        .cloned();
    let mut singles = Vec::new();
    for algorithm in ["ring", "tree", "hd"] {
        for order in [Order::ByNode, Order::InTurn] {
            work.step(2.0, &format!("{column}, single NIC, {algorithm}"))?;
            let single = train(bench, "million-class", Net::SingleNic, order, algorithm, false)?;
            if let Some(ours) = &ours {
                singles.push(json!({
                    "column": column,
                    "algorithm": algorithm,
                    "order": if order == Order::ByNode { "node by node" } else { "in turn" },
                    "communication_s": single.communication_s,
                    "iteration_s": single.iteration_s,
                    "communication_ratio": single.communication_s / ours.communication_s,
                    "end_to_end_gain": single.iteration_s / ours.iteration_s - 1.0,
                    "published_ratio": DATA.figure("million_class_single_nic_communication"),
                    "published_gain": DATA.figure("million_class_single_nic_end_to_end_gain"),
                }));
            }
            all.push(single);
        }
    }
    Ok((all, singles))
}

fn train(
    bench: &Bench,
    model: &'static str,
    net: Net,
    order: Order,
    algorithm: &'static str,
    overlap: bool,
) -> Result<Trained, Error> {
    let mut world = World::new(&net.cluster(RANKS, bench, bench.seed)?)?;
    let segment = bench.constants.segment_bytes.unwrap_or(32 << 20);
    let job = TrainJob {
        model: DATA.model(model, RANKS, algorithm),
        reduction: bench.job(net, RANKS, algorithm, segment, order),
        bucket_bytes: if overlap { 25 << 20 } else { u64::MAX },
        overlap,
        iterations: 2,
    };
    let mut training = job.workload(&mut world, &[], 0)?;
    world.run(&mut [&mut training], &mut |_, _| true)?;
    let (iteration_s, communication_s) = communication_s(&training);
    Ok(Trained { model, net, order, algorithm, overlap, iteration_s, communication_s })
}

/// The iteration of a model by an algorithm on the article's cluster.
pub(crate) fn find<'a>(
    all: &'a [Trained],
    model: &str,
    algorithm: &str,
    overlap: bool,
) -> Option<&'a Trained> {
    all.iter().find(|one| {
        one.net == Net::BiGraph
            && (one.model, one.algorithm, one.overlap) == (model, algorithm, overlap)
    })
}

/// One row for each application and column: what HDRM gains over ring.
pub(crate) fn rows(columns: &[(&str, Vec<Trained>)]) -> Vec<Value> {
    let mut rows = Vec::new();
    for (column, all) in columns {
        for model in MODELS {
            for overlap in [false, true] {
                let pair = (find(all, model, "ring", overlap), find(all, model, "hdrm", overlap));
                let (Some(ring), Some(hdrm)) = pair else { continue };
                let published = |what: &str| {
                    let name = format!("{}_{what}", model.replace('-', "_"));
                    (!overlap).then(|| DATA.figure(&name)).flatten()
                };
                rows.push(json!({
                    "column": column,
                    "model": model,
                    "from": DATA.model_source(model),
                    "overlap": overlap,
                    "ring_iteration_s": ring.iteration_s,
                    "hdrm_iteration_s": hdrm.iteration_s,
                    "ring_communication_s": ring.communication_s,
                    "hdrm_communication_s": hdrm.communication_s,
                    "communication_gain": ring.communication_s / hdrm.communication_s - 1.0,
                    "end_to_end_gain": ring.iteration_s / hdrm.iteration_s - 1.0,
                    "published_communication_gain": published("communication_gain"),
                    "published_end_to_end_gain": published("end_to_end_gain"),
                }));
            }
        }
    }
    rows
}
