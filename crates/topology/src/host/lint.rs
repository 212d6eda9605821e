//! Server lint by the EFLOPS criteria (HPCA 2020): findings that cost bandwidth, with the cost.

use super::device::DeviceKind;
use super::model::{Distance, Host};
use super::nvlink::NvLinkMap;
use super::pairs::{Pair, Pairing};
use super::shares::{Assumptions, BandwidthShares, DeviceFlow, payload};
use serde::Serialize;
use std::collections::BTreeMap;

/// Finding severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Information.
    Note,
    /// Bandwidth lost that software can recover.
    Advice,
    /// Bandwidth lost that only other slots or other parts recover.
    Warning,
}

/// Lint finding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Rule name.
    pub rule: &'static str,
    /// Severity.
    pub severity: Severity,
    /// Description.
    pub what: String,
    /// Devices concerned.
    pub devices: Vec<String>,
    /// Present GB/s, by the formula.
    pub have_gb_per_s: Option<f64>,
    /// Possible GB/s, by the formula.
    pub could_gb_per_s: Option<f64>,
    /// Formula for both, with the numbers.
    pub formula: String,
}

/// Findings, worst first.
pub(super) fn lint(host: &Host, assumptions: &Assumptions) -> Vec<Finding> {
    let (pairing, nvlinked) = (host.pairing(), host.nvlinked());
    let lint = Lint { host, assumptions, pairing, nvlinked };
    let mut findings = Vec::new();
    lint.pairs(&mut findings);
    lint.root_ports(&mut findings);
    lint.counts(&mut findings);
    lint.gpu_to_gpu(&mut findings);
    lint.widths(&mut findings);
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings
}

struct Lint<'a> {
    host: &'a Host,
    assumptions: &'a Assumptions,
    pairing: Pairing,
    nvlinked: NvLinkMap,
}

impl Lint<'_> {
    /// NIC rate in one direction, in GB/s.
    fn nic_rate(&self, nic: usize) -> f64 {
        let rate = self.host.devices[nic].network_gb_per_s();
        rate.unwrap_or(self.assumptions.nic_gbps / 8.0)
    }

    /// Possible GB/s between a GPU and its NIC: minimum of the NIC rate and the two PCIe links.
    fn best(&self, pair: &Pair) -> f64 {
        let link = |device: usize| payload(&self.host.devices[device], self.assumptions);
        [link(pair.gpu), link(pair.nic)]
            .into_iter()
            .flatten()
            .fold(self.nic_rate(pair.nic), f64::min)
    }

    /// GB/s for each pair when all send concurrently.
    fn pair_rates(&self) -> Vec<f64> {
        let flows: Vec<DeviceFlow> = self
            .pairing
            .pairs
            .iter()
            .map(|pair| DeviceFlow { from: pair.gpu, to: pair.nic })
            .collect();
        let shares = BandwidthShares::new(self.host, self.assumptions, &flows);
        let rate = |(pair, &flow): (&Pair, &DeviceFlow)| {
            let wire = self.nic_rate(pair.nic) / f64::from(pair.gpus_on_nic);
            shares.of(flow).map_or(wire, |rate| rate.min(wire))
        };
        self.pairing.pairs.iter().zip(&flows).map(rate).collect()
    }

    /// True if NVLink joins the two GPUs.
    fn joined(&self, one: usize, other: usize) -> bool {
        let devices = &self.host.devices;
        self.nvlinked.joins(devices[one].bus_id, devices[other].bus_id)
    }

    fn names(&self, devices: &[usize]) -> Vec<String> {
        devices.iter().map(|&device| self.host.label(device)).collect()
    }

    /// Pairs not joined by a PCIe switch.
    fn pairs(&self, findings: &mut Vec<Finding>) {
        let rates = self.pair_rates();
        for (pair, rate) in self.pairing.pairs.iter().zip(rates) {
            if pair.distance.is_switched() {
                continue;
            }
            let (gpu, nic) = (self.host.label(pair.gpu), self.host.label(pair.nic));
            let slowdown = self.assumptions.root_complex_slowdown;
            let (rule, what, term) = match pair.distance {
                Distance::System => (
                    "pair-across-numa",
                    format!(
                        "{gpu} and its NIC {nic} are on different NUMA nodes: every byte crosses the \
                         link between the CPUs"
                    ),
                    format!(
                        ", {} GB/s between NUMA nodes / pairs that cross",
                        self.assumptions.numa_gb_per_s
                    ),
                ),
                _ => (
                    "pair-not-under-one-switch",
                    format!(
                        "{gpu} and its NIC {nic} are not under one PCIe switch: every byte passes the \
                         CPU's root complex"
                    ),
                    String::new(),
                ),
            };
            let best = self.best(pair);
            let bare = |device: usize| self.host.devices[device].parent.is_none();
            // A virtual machine hides the bridges.
            let hidden = self.host.lists_ports && bare(pair.gpu) && bare(pair.nic);
            findings.push(Finding {
                rule,
                severity: if hidden { Severity::Note } else { Severity::Warning },
                what,
                devices: vec![gpu, nic],
                have_gb_per_s: Some(rate),
                could_gb_per_s: Some(best),
                formula: format!(
                    "have = min(NIC {:.1} GB/s / {} GPUs on it, PCIe links / pairs that cross them / \
                     {slowdown} for the root complex{term}); could = min(NIC, PCIe links of the two)",
                    self.nic_rate(pair.nic),
                    pair.gpus_on_nic
                ),
            });
        }
    }

    /// Root ports above several pairs.
    fn root_ports(&self, findings: &mut Vec<Finding>) {
        let mut under: BTreeMap<usize, Vec<Pair>> = BTreeMap::new();
        for &pair in &self.pairing.pairs {
            if let Some(port) = self.host.root_port(pair.gpu) {
                under.entry(port).or_default().push(pair);
            }
        }
        for (port, pairs) in under.into_iter().filter(|(_, pairs)| pairs.len() > 1) {
            let count = pairs.len();
            let gpus: Vec<usize> = pairs.iter().map(|pair| pair.gpu).collect();
            let uplink = self.uplink(port, gpus[0]);
            let joined = |&one: &usize| gpus.iter().all(|&o| o == one || self.joined(one, o));
            let nvlink = gpus.iter().all(joined);
            findings.push(Finding {
                rule: "pairs-share-root-port",
                severity: if nvlink { Severity::Note } else { Severity::Warning },
                what: format!(
                    "{count} GPUs share root port {}: traffic to host memory, and to GPUs and NICs under \
                     other ports, shares one link{}",
                    self.host.devices[port].bus_id,
                    if nvlink { " (traffic between GPUs uses NVLink)" } else { "" }
                ),
                devices: self.names(&gpus),
                have_gb_per_s: uplink.map(|rate| rate / count as f64),
                could_gb_per_s: uplink,
                formula: format!(
                    "have = root port's link / {count} GPUs; could = root port's link"
                ),
            });
        }
    }

    /// GB/s on the slowest link between a device's switch and the CPU.
    fn uplink(&self, port: usize, device: usize) -> Option<f64> {
        let above = self.host.above(device);
        // Upstream port of the switch below the root port, and the root port.
        let near = above.iter().rev().take(if self.host.lists_ports { 2 } else { 1 });
        let rates = near.filter_map(|&d| payload(&self.host.devices[d], self.assumptions));
        rates.reduce(f64::min).or_else(|| payload(&self.host.devices[port], self.assumptions))
    }

    /// Unequal GPU and NIC counts.
    fn counts(&self, findings: &mut Vec<Finding>) {
        let gpus = self.host.gpus();
        let nics = self.host.nics();
        if gpus.is_empty() {
            return;
        }
        if nics.is_empty() {
            findings.push(Finding {
                rule: "no-nic",
                severity: Severity::Note,
                what: format!("{} GPUs and no NIC: other hosts are unreachable", gpus.len()),
                devices: self.names(&gpus),
                have_gb_per_s: None,
                could_gb_per_s: None,
                formula: String::new(),
            });
            return;
        }
        let mut most: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for pair in &self.pairing.pairs {
            most.entry(pair.nic).or_default().push(pair.gpu);
        }
        for (nic, gpus) in most.iter().filter(|(_, gpus)| gpus.len() > 1) {
            let rate = self.nic_rate(*nic);
            let best = self.pairing.pairs.iter().find(|pair| pair.nic == *nic);
            let best = best.map_or(rate, |pair| self.best(pair));
            findings.push(Finding {
                rule: "gpus-share-nic",
                severity: Severity::Warning,
                what: format!(
                    "{} GPUs share the NIC {}: one NIC per GPU would give each its full rate",
                    gpus.len(),
                    self.host.label(*nic)
                ),
                devices: self.names(gpus),
                have_gb_per_s: Some((rate / gpus.len() as f64).min(best)),
                could_gb_per_s: Some(best),
                formula: format!(
                    "have = NIC {rate:.1} GB/s / {} GPUs; could = min(NIC, PCIe links of the two)",
                    gpus.len()
                ),
            });
        }
        let mut held: BTreeMap<usize, usize> =
            self.pairing.pairs.iter().map(|pair| (pair.gpu, 1)).collect();
        for pair in &self.pairing.further {
            *held.entry(pair.gpu).or_insert(0) += 1;
        }
        let (least, largest) = (held.values().min(), held.values().max());
        if least != largest {
            let fewest = least.copied().unwrap_or(0);
            let poor: Vec<usize> =
                held.iter().filter(|(_, nics)| **nics == fewest).map(|(gpu, _)| *gpu).collect();
            findings.push(Finding {
                rule: "unequal-nics",
                severity: Severity::Warning,
                what: format!(
                    "{} GPUs and {} NICs: some GPUs have {} NICs, others {fewest}; a step of all GPUs runs at \
                     the rate of the latter",
                    gpus.len(),
                    gpus.len() * fewest + self.pairing.further.len(),
                    largest.copied().unwrap_or(0),
                ),
                devices: self.names(&poor),
                have_gb_per_s: None,
                could_gb_per_s: None,
                formula: String::new(),
            });
        }
        if !self.pairing.spare.is_empty() {
            findings.push(Finding {
                rule: "spare-nics",
                severity: Severity::Note,
                what: format!(
                    "{} NICs are near no GPU (assumed to be for storage or the host)",
                    self.pairing.spare.len()
                ),
                devices: self.names(&self.pairing.spare),
                have_gb_per_s: None,
                could_gb_per_s: None,
                formula: String::new(),
            });
        }
    }

    /// Compares a ring over all GPUs through the NICs with one over PCIe.
    fn gpu_to_gpu(&self, findings: &mut Vec<Finding>) {
        let pairs = &self.pairing.pairs;
        if pairs.len() < 2 {
            return;
        }
        let next = |index: usize| (index + 1) % pairs.len();
        let flows: Vec<DeviceFlow> = (0..pairs.len())
            .map(|index| DeviceFlow { from: pairs[index].gpu, to: pairs[next(index)].gpu })
            .filter(|flow| !self.joined(flow.from, flow.to))
            .collect();
        let shares = BandwidthShares::new(self.host, self.assumptions, &flows);
        let rates = flows.iter().filter_map(|&flow| Some((shares.of(flow)?, flow)));
        let Some((direct, slowest)) = rates.min_by(|one, other| one.0.total_cmp(&other.0)) else {
            return;
        };
        let through = self.pair_rates().into_iter().fold(f64::INFINITY, f64::min);
        let distance = self.host.distance(slowest.from, slowest.to);
        let better = through > direct;
        findings.push(Finding {
            rule: "gpu-to-gpu",
            severity: if better { Severity::Advice } else { Severity::Note },
            what: format!(
                "a ring of all GPUs runs at {direct:.1} GB/s over PCIe (slowest from {} to {}, {}) and at \
                 {through:.1} GB/s through the NICs: {}",
                self.host.label(slowest.from),
                self.host.label(slowest.to),
                distance.short(),
                if better { "GPU-to-GPU traffic is faster through the NICs" } else { "PCIe is faster" }
            ),
            devices: self.names(&pairs.iter().map(|pair| pair.gpu).collect::<Vec<_>>()),
            have_gb_per_s: Some(direct),
            could_gb_per_s: Some(through.max(direct)),
            formula: format!(
                "PCIe: min over hops of (links / hops that cross them, / {} through the root complex, {} GB/s \
                 / hops that cross NUMA nodes); NICs: min of all pair rates",
                self.assumptions.root_complex_slowdown, self.assumptions.numa_gb_per_s
            ),
        });
    }

    /// Links that use fewer lanes than possible.
    fn widths(&self, findings: &mut Vec<Finding>) {
        for (index, device) in self.host.devices.iter().enumerate() {
            let leaf = matches!(device.kind, DeviceKind::Gpu | DeviceKind::Nic);
            let (most, now) = (device.link.width, device.link_now.width);
            if !leaf || now == 0 || now >= most {
                continue;
            }
            let best = payload(device, self.assumptions);
            findings.push(Finding {
                rule: "narrow-link",
                severity: Severity::Warning,
                what: format!(
                    "{} runs on {now} of its {most} PCIe lanes; check its slot and seating",
                    self.host.label(index)
                ),
                devices: self.names(&[index]),
                have_gb_per_s: best.map(|rate| rate * f64::from(now) / f64::from(most)),
                could_gb_per_s: best,
                formula: format!("have = link x {now}/{most}; could = link"),
            });
        }
    }
}
