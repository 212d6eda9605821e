//! Occupancy budget: checks that all kernels that wait for peers fit on the GPU together.
//!
//! A waiting kernel occupies SMs. If another rank needs these to make progress here, both ranks deadlock, so all
//! launches that may be in flight concurrently must be co-resident.
//!
//! # Rule
//! An operator's largest launch has a known grid, and a known number of blocks that fit on an empty SM (CUDA's
//! occupancy: the scarcest resource among threads, registers and shared memory). So a block takes at most
//! `1 / per_sm` of an SM. All launches fit if either
//!
//! - each SM has room for its blocks from all operators, each spread evenly: the fractions add up to at most one; or
//! - there are at least as many SMs as blocks in all operators: a block that needs an SM for itself finds one,
//!   wherever the others are.
//!
//!   For example, two operators with 132 blocks each fit on 132 SMs if both have `per_sm` 2.

use crate::error::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Largest launch for an operator that waits for peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorLaunch {
    /// Operator name, for errors.
    pub name: String,
    /// Grid size in blocks.
    pub grid: u32,
    /// Maximum resident blocks on an empty SM.
    pub per_sm: u32,
    /// Threads per block.
    pub threads: u32,
    /// Registers per thread.
    pub registers: u32,
    /// Shared memory per block in bytes.
    pub shared: u32,
    /// True if it may be in flight together with other operators' launches; among the others, one at a time is
    /// counted.
    pub concurrent: bool,
}

/// Budget for all operators' launches on a GPU, or on a rank's GPU partition.
#[derive(Clone, Debug)]
pub struct OccupancyBudget {
    sms: u32,
    next: u64,
    launches: Vec<(u64, OperatorLaunch)>,
}

/// A rank's partition of a GPU that several ranks in its communicator share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GpuPartition {
    /// Partition index, from 0.
    pub number: u32,
    /// Ranks on the GPU.
    pub sharing: u32,
}

impl GpuPartition {
    /// Partition for `rank`, from all ranks' GPU UUIDs.
    pub fn of(gpus: &[Vec<u8>], rank: u32) -> GpuPartition {
        let own = &gpus[rank as usize];
        let before = gpus[..rank as usize].iter().filter(|gpu| *gpu == own).count();
        let sharing = gpus.iter().filter(|gpu| *gpu == own).count();
        GpuPartition { number: before as u32, sharing: sharing as u32 }
    }
}

type OccupancyBudgets = HashMap<([u8; 16], GpuPartition), Weak<Mutex<OccupancyBudget>>>;
static BUDGETS: Mutex<Option<OccupancyBudgets>> = Mutex::new(None);

/// Budget for a GPU partition with `sms` SMs: one per process, for all communicators.
pub(super) fn budget_of_gpu(
    gpu: [u8; 16],
    part: GpuPartition,
    sms: u32,
) -> Arc<Mutex<OccupancyBudget>> {
    let mut budgets = BUDGETS.lock().unwrap_or_else(PoisonError::into_inner);
    let budgets = budgets.get_or_insert_default();
    budgets.retain(|_, budget| budget.strong_count() != 0);
    if let Some(budget) = budgets.get(&(gpu, part)).and_then(Weak::upgrade) {
        return budget;
    }
    let budget = Arc::new(Mutex::new(OccupancyBudget::new((sms / part.sharing.max(1)).max(1))));
    budgets.insert((gpu, part), Arc::downgrade(&budget));
    budget
}

/// One SM as an integer: divisible by all block counts per SM up to 32, the hardware limit.
const WHOLE: u64 = 144_403_552_893_600;

impl OccupancyBudget {
    /// Empty budget with `sms` SMs.
    pub fn new(sms: u32) -> OccupancyBudget {
        OccupancyBudget { sms, next: 0, launches: Vec::new() }
    }

    /// Reserves a launch; returns a number for [`release`](OccupancyBudget::release).
    ///
    /// # Errors
    /// [`Error::NotResident`] if the launches do not fit together.
    pub fn reserve(&mut self, launch: OperatorLaunch) -> Result<u64> {
        let mut beside: Vec<&OperatorLaunch> =
            self.launches.iter().map(|(_, other)| other).collect();
        beside.retain(|other| other.concurrent);
        let alone: Vec<&OperatorLaunch> = std::iter::once(&launch)
            .chain(self.launches.iter().map(|(_, other)| other))
            .filter(|each| !each.concurrent)
            .collect();
        if launch.concurrent {
            beside.push(&launch);
        }
        let fits = if alone.is_empty() {
            fit(&beside, self.sms)
        } else {
            alone.iter().all(|one| fit(&[&beside[..], &[*one]].concat(), self.sms))
        };
        if !fits {
            let others = self.launches.iter().map(|(_, other)| describe(other));
            let others = others.collect::<Vec<_>>().join("; ");
            return Err(Error::NotResident {
                wanted: describe(&launch),
                beside: if others.is_empty() { "no other operator".to_owned() } else { others },
                sms: self.sms,
            });
        }
        self.next += 1;
        self.launches.push((self.next, launch));
        Ok(self.next)
    }

    /// Releases a launch.
    pub fn release(&mut self, number: u64) {
        self.launches.retain(|(own, _)| *own != number);
    }
}

/// True if all blocks fit, wherever the others are placed.
fn fit(launches: &[&OperatorLaunch], sms: u32) -> bool {
    let parts: Option<u64> = launches.iter().map(|each| part(each, sms.into())).sum();
    let blocks: u64 = launches.iter().map(|each| u64::from(each.grid)).sum();
    parts.is_some_and(|parts| parts <= WHOLE || blocks <= sms.into())
}

/// Fraction of each SM that a launch takes when it is spread evenly over `sms` SMs, in units of 1 / [`WHOLE`].
fn part(launch: &OperatorLaunch, sms: u64) -> Option<u64> {
    let each = u64::from(launch.grid).div_ceil(Some(sms).filter(|&sms| sms > 0)?);
    WHOLE.checked_div(launch.per_sm.into())?.checked_mul(each)
}

fn describe(launch: &OperatorLaunch) -> String {
    let OperatorLaunch { name, grid, per_sm, threads, registers, shared, concurrent } = launch;
    let how = if *concurrent { "" } else { ", one at a time" };
    format!(
        "{name}: {grid} blocks of {threads} threads, {registers} registers each and {shared} bytes of \
         shared memory, {per_sm} to a multiprocessor{how}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(name: &str, grid: u32, per_sm: u32) -> OperatorLaunch {
        let (threads, registers, shared) = (512, 64, 100_000);
        OperatorLaunch {
            name: name.into(),
            grid,
            per_sm,
            threads,
            registers,
            shared,
            concurrent: true,
        }
    }

    fn fits(launches: &[OperatorLaunch]) -> bool {
        let mut budget = OccupancyBudget::new(132);
        launches.iter().all(|each| budget.reserve(each.clone()).is_ok())
    }

    #[test]
    fn two_halves_of_a_multiprocessor_fit_and_a_third_does_not() {
        let half = || launch("decode", 132, 2);
        assert!(fits(&[half(), half()]));
        assert!(!fits(&[half(), half(), half()]));
        let third = || launch("decode", 132, 3);
        assert!(fits(&[third(), third(), third()]));
        assert!(!fits(&[third(), third(), half()]));
    }

    #[test]
    fn blocks_of_more_than_half_need_multiprocessors_of_their_own() {
        assert!(!fits(&[launch("hidden 12288", 132, 1), launch("decode", 132, 2)]));
        assert!(fits(&[launch("prefill", 64, 1), launch("another", 64, 1)]));
        assert!(!fits(&[launch("prefill", 64, 1), launch("another", 69, 1)]));
        // Decode has a block on each SM if it starts first.
        assert!(!fits(&[launch("prefill", 64, 1), launch("decode", 132, 2)]));
        assert!(fits(&[launch("prefill", 64, 1), launch("decode", 68, 2)]));
    }

    #[test]
    fn a_launch_must_fit_by_itself() {
        assert!(fits(&[launch("all", 264, 2)]));
        assert!(!fits(&[launch("more", 265, 2)]));
        assert!(!fits(&[launch("none", 1, 0)]));
        assert!(OccupancyBudget::new(66).reserve(launch("shared by two ranks", 132, 1)).is_err());
    }

    #[test]
    fn of_operators_that_never_run_at_once_the_largest_counts() {
        let alone = |grid| OperatorLaunch { concurrent: false, ..launch("alone", grid, 1) };
        assert!(fits(&[alone(132), alone(132)]));
        assert!(!fits(&[alone(132), launch("beside", 1, 1)]));
        assert!(!fits(&[launch("beside", 32, 1), alone(60), alone(101)]));
        assert!(fits(&[launch("beside", 32, 1), alone(60), alone(100)]));
    }

    #[test]
    fn communicators_of_a_process_share_the_budget_of_a_gpu() {
        let gpus = [vec![1], vec![2], vec![1]];
        let parts: Vec<GpuPartition> = (0..3).map(|rank| GpuPartition::of(&gpus, rank)).collect();
        assert_eq!(parts[0], GpuPartition { number: 0, sharing: 2 });
        assert_eq!(parts[1], GpuPartition { number: 0, sharing: 1 });
        assert_eq!(parts[2], GpuPartition { number: 1, sharing: 2 });

        let of = |part| budget_of_gpu(*b"a GPU of this te", part, 132);
        let first = of(parts[1]);
        let number = first.lock().unwrap().reserve(launch("one", 132, 1)).unwrap();
        let second = of(parts[1]);
        assert!(Arc::ptr_eq(&first, &second));
        second.lock().unwrap().reserve(launch("another", 1, 1)).unwrap_err();
        // Two ranks that share it have half each.
        let half = of(parts[0]);
        assert!(!Arc::ptr_eq(&half, &of(parts[2])));
        half.lock().unwrap().reserve(launch("of two thirds", 88, 1)).unwrap_err();
        half.lock().unwrap().reserve(launch("of a half", 66, 1)).unwrap();
        first.lock().unwrap().release(number);
        second.lock().unwrap().reserve(launch("another", 1, 1)).unwrap();
        drop((first, second));
        of(parts[1]).lock().unwrap().reserve(launch("all, after its end", 132, 1)).unwrap();
    }

    #[test]
    fn the_error_names_the_other_operators_and_a_release_makes_room() {
        let mut budget = OccupancyBudget::new(132);
        let first = budget.reserve(launch("all-to-all of hidden 12288", 132, 1)).unwrap();
        let error = budget.reserve(launch("all-to-all", 132, 2)).unwrap_err().to_string();
        for part in
            ["all-to-all: 132 blocks of 512 threads", "hidden 12288", "num_sms", "132 multi"]
        {
            assert!(error.contains(part), "{error}");
        }
        budget.release(first);
        budget.reserve(launch("all-to-all", 132, 2)).unwrap();
    }
}
