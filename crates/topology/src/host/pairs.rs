//! Which NIC serves which GPU.

use super::model::{DeviceKind, Distance, Host};
use serde::Serialize;

/// A GPU and a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// The GPU, an index into [`Host::devices`].
    pub gpu: usize,
    /// The NIC.
    pub nic: usize,
    /// How far they are from each other.
    pub distance: Distance,
    /// GPUs that this NIC serves, this one included.
    pub gpus_on_nic: u32,
}

/// All GPUs with their NICs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pairing {
    /// For each GPU, in the order of their addresses, its first NIC; none if there are no NICs.
    pub pairs: Vec<Pair>,
    /// Further NICs beside a GPU that has one already.
    pub further: Vec<Pair>,
    /// NICs that are beside no GPU: for storage, or for the host.
    pub spare: Vec<usize>,
}

impl Host {
    /// The GPUs, in the order of their addresses.
    pub fn gpus(&self) -> Vec<usize> {
        self.by_address(DeviceKind::Gpu)
    }

    fn by_address(&self, kind: DeviceKind) -> Vec<usize> {
        let mut found: Vec<usize> = self.of_kind(kind).collect();
        found.sort_by_key(|&device| self.devices[device].bus_id);
        found
    }

    /// Smaller for what is nearer, to the very bridge: of two pairs under cascaded switches, that is nearer
    /// which the lower switch joins.
    fn closeness(&self, one: usize, other: usize) -> (Distance, usize) {
        let common = self.common(one, other);
        let depth = common.map_or(0, |bridge| self.above(bridge).len() + 1);
        (self.distance(one, other), usize::MAX - depth)
    }

    /// The NICs that GPUs can use: those that do RDMA, if any does, else all.
    pub fn nics(&self) -> Vec<usize> {
        let nics = self.by_address(DeviceKind::Nic);
        let rdma: Vec<usize> =
            nics.iter().copied().filter(|&nic| self.devices[nic].is_rdma()).collect();
        if rdma.is_empty() { nics } else { rdma }
    }

    /// Pairs GPUs with NICs by the closest common ancestor. Distances in a tree are such that taking the closest
    /// free pair again and again is the best that can be had; GPUs that then have no NIC share the nearest,
    /// evenly.
    pub fn pairing(&self) -> Pairing {
        let (gpus, nics) = (self.gpus(), self.nics());
        let mut all = Vec::with_capacity(gpus.len() * nics.len());
        for (row, &gpu) in gpus.iter().enumerate() {
            let near = |(column, &nic)| (self.closeness(gpu, nic), row, column);
            all.extend(nics.iter().enumerate().map(near));
        }
        all.sort_unstable();
        let mut served = vec![None; self.devices.len()];
        let mut users = vec![0u32; self.devices.len()];
        for (near, row, column) in all {
            let (gpu, nic) = (gpus[row], nics[column]);
            if served[gpu].is_none() && users[nic] == 0 {
                served[gpu] = Some((nic, near.0));
                users[nic] = 1;
            }
        }
        for &gpu in gpus.iter().filter(|&&gpu| served[gpu].is_none()).collect::<Vec<_>>() {
            let nearest = |&&nic: &&usize| (self.distance(gpu, nic), users[nic]);
            if let Some(&nic) = nics.iter().min_by_key(nearest) {
                served[gpu] = Some((nic, self.distance(gpu, nic)));
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
        let mut held = vec![1u32; self.devices.len()];
        for &nic in nics.iter().filter(|&&nic| users[nic] == 0) {
            let beside = |&&gpu: &&usize| self.distance(gpu, nic).is_switched();
            let near = gpus.iter().filter(beside);
            match near.min_by_key(|&&gpu| (self.distance(gpu, nic), held[gpu])) {
                Some(&gpu) => {
                    held[gpu] += 1;
                    pairing.further.push(pair(gpu, (nic, self.distance(gpu, nic))));
                }
                None => pairing.spare.push(nic),
            }
        }
        pairing
    }
}
