//! Every figure beside the published one.

use serde_json::{Value, json};

use super::applications::{Trained, find};
use super::bench::Bench;
use super::clusters::{Net, Order};
use super::published::DATA;
use super::{ALGORITHMS, LARGE, RANKS, SMALL, Work};
use crate::error::Error;

/// What comparing weighs, for progress.
pub(crate) const WEIGHT: f64 = 12.0;

/// A figure in both columns.
struct Figure {
    name: &'static str,
    key: &'static str,
    values: Vec<f64>,
}

/// The figures of the article, and those of which it says how they stand to each other.
pub(crate) fn figures(
    benches: &[Bench],
    applications: &[(&str, Vec<Trained>)],
    work: &mut Work<'_, '_>,
) -> Result<Vec<Value>, Error> {
    let mut times = Vec::new();
    for bench in benches {
        work.step(6.0, "the figures of the article")?;
        times.push(Times::of(bench)?);
    }
    let each = |of: fn(&Times) -> f64| times.iter().map(of).collect::<Vec<f64>>();
    let gain = |model: &str, of: fn(&Trained) -> f64| {
        let one = |(_, all): &(&str, Vec<Trained>)| {
            let pair = (find(all, model, "ring", false), find(all, model, "hdrm", false));
            pair.0.zip(pair.1).map_or(f64::NAN, |(ring, hdrm)| of(ring) / of(hdrm) - 1.0)
        };
        applications.iter().map(one).collect::<Vec<f64>>()
    };
    let single = |of: fn(&Trained) -> f64, less: f64| {
        let one = |(_, all): &(&str, Vec<Trained>)| {
            let single = all.iter().find(|one| {
                one.net == Net::SingleNic && one.order == Order::InTurn && one.algorithm == "hd"
            });
            let ours = find(all, "million-class", "hdrm", false);
            single.zip(ours).map_or(f64::NAN, |(single, ours)| of(single) / of(ours) - less)
        };
        applications.iter().map(one).collect::<Vec<f64>>()
    };
    let communication: fn(&Trained) -> f64 = |one| one.communication_s;
    let iteration: fn(&Trained) -> f64 = |one| one.iteration_s;
    let figures = [
        Figure {
            name: "1 KiB: time of ring / HDRM",
            key: "small_hdrm_over_ring",
            values: each(|t| t.small[0] / t.small[3]),
        },
        Figure {
            name: "256 MiB: HDRM, Gb/s",
            key: "large_hdrm_gbps",
            values: each(|t| gbps(t.large[3])),
        },
        Figure { name: "256 MiB: ring, Gb/s", key: "", values: each(|t| gbps(t.large[0])) },
        Figure { name: "256 MiB: tree, Gb/s", key: "", values: each(|t| gbps(t.large[1])) },
        Figure { name: "256 MiB: HD, ECMP, Gb/s", key: "", values: each(|t| gbps(t.large[2])) },
        Figure {
            name: "256 MiB: HDRM minus ring, Gb/s",
            key: "large_hdrm_minus_ring_gbps",
            values: each(|t| gbps(t.large[3]) - gbps(t.large[0])),
        },
        Figure {
            name: "256 MiB: HDRM, share of the bandwidth bound",
            key: "",
            values: each(|t| gbps(t.large[3]) / bound_gbps()),
        },
        Figure {
            name: "1 KiB: HDRM, 4096 GPUs / 64, beyond the extra steps",
            key: "",
            values: each(|t| t.huge / (t.small[3] + t.step * 12.0)),
        },
        Figure {
            name: "million-class: communication gain of HDRM",
            key: "million_class_communication_gain",
            values: gain("million-class", communication),
        },
        Figure {
            name: "million-class: end-to-end gain of HDRM",
            key: "million_class_end_to_end_gain",
            values: gain("million-class", iteration),
        },
        Figure {
            name: "BERT: communication gain of HDRM",
            key: "bert_communication_gain",
            values: gain("bert", communication),
        },
        Figure {
            name: "BERT: end-to-end gain of HDRM",
            key: "bert_end_to_end_gain",
            values: gain("bert", iteration),
        },
        Figure {
            name: "ResNet-50: communication gain of HDRM",
            key: "",
            values: gain("resnet50", communication),
        },
        Figure {
            name: "ResNet-50: end-to-end gain of HDRM",
            key: "",
            values: gain("resnet50", iteration),
        },
        Figure {
            name: "million-class: communication, single NIC / EFLOPS",
            key: "million_class_single_nic_communication",
            values: single(communication, 0.0),
        },
        Figure {
            name: "million-class: end-to-end gain over single NIC",
            key: "million_class_single_nic_end_to_end_gain",
            values: single(iteration, 1.0),
        },
    ];
    let mut rows: Vec<Value> = figures.iter().map(Figure::row).collect();
    rows.push(order("1 KiB: from fast to slow", &times, |t| t.small));
    rows.push(order("256 MiB: from fast to slow", &times, |t| t.large));
    Ok(rows)
}

impl Figure {
    fn row(&self) -> Value {
        let published = DATA.figure(self.key);
        let off = |value: f64| published.map(|published| value / published - 1.0);
        json!({
            "figure": self.name,
            "published": published,
            "ideal": self.values[0],
            "fitted": self.values[1],
            "ideal_deviation": off(self.values[0]),
            "fitted_deviation": off(self.values[1]),
        })
    }
}

/// What the figures are made of. By algorithm, on the BiGraph.
struct Times {
    small: [f64; 4],
    large: [f64; 4],
    /// 1 KiB by HDRM on 4096 GPUs.
    huge: f64,
    /// What a step of HDRM costs beyond its bytes.
    step: f64,
}

impl Times {
    fn of(bench: &Bench) -> Result<Times, Error> {
        let time = |ranks, algorithm: &str, bytes| {
            Ok::<f64, Error>(bench.measure(Net::BiGraph, ranks, algorithm, bytes)?.time_s)
        };
        let (mut small, mut large) = ([0.0; 4], [0.0; 4]);
        for (place, algorithm) in ALGORITHMS.into_iter().enumerate() {
            small[place] = time(RANKS, algorithm, SMALL)?;
            large[place] = time(RANKS, algorithm, LARGE)?;
        }
        // Two more levels of the smallest vector: four steps, without bytes to speak of.
        let step = (time(128, "hdrm", SMALL)? - time(32, "hdrm", SMALL)?) / 4.0;
        Ok(Times { small, large, huge: time(4096, "hdrm", SMALL)?, step })
    }
}

/// The most that an all-reduce of 64 ranks can have on links of 100 Gb/s: 50.8 Gb/s.
fn bound_gbps() -> f64 {
    100.0 / 2.0 * f64::from(RANKS) / f64::from(RANKS - 1)
}

fn gbps(time_s: f64) -> f64 {
    LARGE as f64 * 8e-9 / time_s
}

fn order(figure: &str, times: &[Times], of: fn(&Times) -> [f64; 4]) -> Value {
    let names = |times: &Times| {
        let mut all: Vec<(f64, &str)> = of(times).into_iter().zip(ALGORITHMS).collect();
        all.sort_by(|one, other| one.0.total_cmp(&other.0));
        all.into_iter().map(|(_, name)| name).collect::<Vec<_>>().join(" < ")
    };
    json!({"figure": figure, "published": null, "ideal": names(&times[0]), "fitted": names(&times[1])})
}
