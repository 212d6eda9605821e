//! GPU and NIC pairs.

use super::model::{Distance, Host};
use serde::Serialize;

/// A GPU and a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// GPU, an index into [`Host::devices`].
    pub gpu: usize,
    /// The NIC.
    pub nic: usize,
    /// Distance between the two.
    pub distance: Distance,
    /// GPUs that this NIC serves, this one included.
    pub gpus_on_nic: u32,
}

/// All GPUs with NICs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pairing {
    /// Each GPU's first NIC, in GPU address order; empty without NICs.
    pub pairs: Vec<Pair>,
    /// Additional NICs near a GPU that already has one.
    pub further: Vec<Pair>,
    /// NICs near no GPU: for storage, or for the host.
    pub spare: Vec<usize>,
}

/// Greedy pairing of all GPUs with these NICs by closest common ancestor, which is optimal for distances in a
/// tree. GPUs left without a NIC share the nearest, evenly.
pub(super) fn pairing(host: &Host, nics: &[usize]) -> Pairing {
    let gpus = host.gpus();
    let mut all = Vec::with_capacity(gpus.len() * nics.len());
    for (row, &gpu) in gpus.iter().enumerate() {
        let near = |(column, &nic)| (closeness(host, gpu, nic), row, column);
        all.extend(nics.iter().enumerate().map(near));
    }
    all.sort_unstable();
    let mut served = vec![None; host.devices.len()];
    let mut users = vec![0u32; host.devices.len()];
    for (near, row, column) in all {
        let (gpu, nic) = (gpus[row], nics[column]);
        if served[gpu].is_none() && users[nic] == 0 {
            served[gpu] = Some((nic, near.0));
            users[nic] = 1;
        }
    }
    for &gpu in gpus.iter().filter(|&&gpu| served[gpu].is_none()).collect::<Vec<_>>() {
        let nearest = |&&nic: &&usize| (host.distance(gpu, nic), users[nic]);
        if let Some(&nic) = nics.iter().min_by_key(nearest) {
            served[gpu] = Some((nic, host.distance(gpu, nic)));
            users[nic] += 1;
        }
    }
    let mut pairing = Pairing::default();
    let pair = |gpu: usize, (nic, distance): (usize, Distance)| Pair {
        gpu,
        nic,
        distance,
        gpus_on_nic: users[nic].max(1),
    };
    pairing.pairs = gpus.iter().filter_map(|&gpu| Some(pair(gpu, served[gpu]?))).collect();
    let mut held = vec![1u32; host.devices.len()];
    for &nic in nics.iter().filter(|&&nic| users[nic] == 0) {
        let beside = |&&gpu: &&usize| host.distance(gpu, nic).is_switched();
        let near = gpus.iter().filter(beside);
        match near.min_by_key(|&&gpu| (host.distance(gpu, nic), held[gpu])) {
            Some(&gpu) => {
                held[gpu] += 1;
                pairing.further.push(pair(gpu, (nic, host.distance(gpu, nic))));
            }
            None => pairing.spare.push(nic),
        }
    }
    pairing
}

/// Sort key, smaller for closer pairs. Under cascaded switches, the pair joined by the lower switch is closer.
fn closeness(host: &Host, one: usize, other: usize) -> (Distance, usize) {
    let common = host.common(one, other);
    let depth = common.map_or(0, |bridge| host.above(bridge).len() + 1);
    (host.distance(one, other), usize::MAX - depth)
}
