//! The ways by which ranks reach each other.

use super::spec::MoeJob;
use crate::error::Error;
use crate::world::{Path, World};

/// By source and destination: the path of each NIC, or of dispatch and of combine over NVLink.
pub(crate) struct Paths {
    paths: Vec<Path>,
    ranks: u32,
    /// Paths of a pair of ranks.
    stride: usize,
}

impl Paths {
    /// Finds all paths. `first_private` is the number of the first of the world's private links that are
    /// this job's.
    pub fn find(world: &mut World, job: &MoeJob, first_private: u32) -> Result<Paths, Error> {
        let nothing = world.private_path(&[], 0.0)?;
        let pairs = (job.ranks * job.ranks) as usize;
        let stride = job.nics_per_rank.max(2) as usize;
        let mut paths = vec![nothing; pairs * stride];
        for source in 0..job.ranks {
            for nic in 0..job.nics_per_rank {
                world.attach(job.endpoint(source, nic));
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
                    let (from, to) = (job.endpoint(source, nic), job.endpoint(destination, nic));
                    let connection = u64::from(source) << 32 | u64::from(destination) << 8;
                    let path = if from == to {
                        nothing
                    } else {
                        world.path(from, to, connection | u64::from(nic))?
                    };
                    paths[first + nic as usize] = path;
                }
            }
        }
        Ok(Paths { paths, ranks: job.ranks, stride })
    }

    /// The paths from one rank to another.
    pub fn between(&self, source: u32, destination: u32) -> &[Path] {
        let first = (source * self.ranks + destination) as usize * self.stride;
        &self.paths[first..first + self.stride]
    }
}
