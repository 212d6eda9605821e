//! Paths between ranks.

use weft_topology::EndpointId;

use super::job::MoeJob;
use crate::error::Error;
use crate::world::{Path, World};

/// Paths by source and destination: one for each NIC, or for dispatch and for combine over NVLink.
pub(crate) struct PathTable {
    paths: Vec<Path>,
    /// Each rank's first NIC.
    nics: Vec<EndpointId>,
    ranks: u32,
    /// Number of paths per rank pair.
    stride: usize,
}

impl PathTable {
    /// Routes all paths. `first_private` is the index of the job's first private link.
    pub fn find(world: &mut World, job: &MoeJob, first_private: u32) -> Result<PathTable, Error> {
        let places = world.places(job.nics())?;
        let nic_of = |rank: u32, nic: u32| places[job.place(rank, nic)];
        let local = world.private_path(&[], 0.0)?;
        let pairs = (job.ranks * job.ranks) as usize;
        let stride = job.nics_per_rank.max(2) as usize;
        let mut paths = vec![local; pairs * stride];
        for source in 0..job.ranks {
            for nic in 0..job.nics_per_rank {
                world.attach(nic_of(source, nic));
            }
            for destination in (0..job.ranks).filter(|rank| *rank != source) {
                let first = (source * job.ranks + destination) as usize * stride;
                if let Some(nvlink) = &job.nvlink
                    && job.same_domain(source, destination)
                {
                    for phase in 0..2 {
                        let side = |rank: u32, side: u32| first_private + 4 * rank + side;
                        let links = [side(source, 2 * phase), side(destination, 2 * phase + 1)];
                        let path = world.private_path(&links, nvlink.latency_s)?;
                        paths[first + phase as usize] = path;
                    }
                    continue;
                }
                for nic in 0..job.nics_per_rank {
                    let (from, to) = (nic_of(source, nic), nic_of(destination, nic));
                    let connection = u64::from(source) << 32 | u64::from(destination) << 8;
                    let path = if from == to {
                        local
                    } else {
                        world.path(from, to, connection | u64::from(nic))?
                    };
                    paths[first + nic as usize] = path;
                }
            }
        }
        let nics = (0..job.ranks).map(|rank| nic_of(rank, 0)).collect();
        Ok(PathTable { paths, nics, ranks: job.ranks, stride })
    }

    /// A rank's first NIC, at which its writes are posted.
    pub fn first_nic(&self, rank: u32) -> EndpointId {
        self.nics[rank as usize]
    }

    /// Paths from one rank to another.
    pub fn between(&self, source: u32, destination: u32) -> &[Path] {
        let first = (source * self.ranks + destination) as usize * self.stride;
        &self.paths[first..first + self.stride]
    }
}
