//! Residency account: whether all kernels that wait for peers can be on the GPU at once.
//!
//! A kernel that waits holds its place. If it holds the place that another rank's progress needs here, both
//! ranks wait for ever, so the launches that may be under way at once must all fit at once.
//!
//! # The rule
//! Of an operator's largest launch it is known how many blocks there are, and how many of them fit on an empty
//! multiprocessor (CUDA's occupancy: threads, registers and shared memory, whichever is scarcest). So a
//! block takes at most `1 / per_sm` of whatever is scarce. All launches fit if either
//!
//! - one multiprocessor has room for the blocks of all operators that come to lie on it when each is spread
//!   evenly: their parts add up to at most one; or
//! - there are as many multiprocessors as blocks of all operators together: a block that wants one to itself
//!   finds one, wherever the others are.

use crate::error::{Error, Result};

/// The largest launch of an operator that waits for peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resident {
    /// The operator's name, for errors.
    pub name: String,
    /// Blocks of the launch.
    pub grid: u32,
    /// Blocks of it that fit on a multiprocessor which has nothing else.
    pub per_sm: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of shared memory of a block.
    pub shared: u32,
    /// Whether it may be under way together with launches of other operators. Of those that are not, one at a
    /// time is counted.
    pub concurrent: bool,
}

/// Launches of all operators of a domain.
#[derive(Clone, Debug)]
pub struct Account {
    sms: u32,
    next: u64,
    residents: Vec<(u64, Resident)>,
}

/// Divisible by every number of blocks per multiprocessor up to 32, the most that GPUs have.
const WHOLE: u64 = 144_403_552_893_600;

impl Account {
    /// Of a GPU, or of a rank's part of it, with so many multiprocessors.
    pub fn new(sms: u32) -> Account {
        Account { sms, next: 0, residents: Vec::new() }
    }

    /// Enters an operator; returns the number by which it leaves.
    ///
    /// # Errors
    /// [`Error::NotResident`] if the launches of all cannot be on the GPU at once.
    pub fn enter(&mut self, resident: Resident) -> Result<u64> {
        let mut beside: Vec<&Resident> = self.residents.iter().map(|(_, other)| other).collect();
        beside.retain(|other| other.concurrent);
        let alone: Vec<&Resident> = std::iter::once(&resident)
            .chain(self.residents.iter().map(|(_, other)| other))
            .filter(|each| !each.concurrent)
            .collect();
        if resident.concurrent {
            beside.push(&resident);
        }
        let fits = if alone.is_empty() {
            fit(&beside, self.sms)
        } else {
            alone.iter().all(|one| fit(&[&beside[..], &[*one]].concat(), self.sms))
        };
        if !fits {
            let others = self.residents.iter().map(|(_, other)| describe(other));
            let others = others.collect::<Vec<_>>().join("; ");
            return Err(Error::NotResident {
                wanted: describe(&resident),
                beside: if others.is_empty() { "nothing else".to_owned() } else { others },
                sms: self.sms,
            });
        }
        self.next += 1;
        self.residents.push((self.next, resident));
        Ok(self.next)
    }

    /// Takes an operator out.
    pub fn leave(&mut self, number: u64) {
        self.residents.retain(|(own, _)| *own != number);
    }
}

/// Whether all blocks find a place, wherever those of the others are.
fn fit(residents: &[&Resident], sms: u32) -> bool {
    let parts: Option<u64> = residents.iter().map(|each| part(each, sms.into())).sum();
    let blocks: u64 = residents.iter().map(|each| u64::from(each.grid)).sum();
    parts.is_some_and(|parts| parts <= WHOLE || blocks <= sms.into())
}

/// The part of each of `sms` multiprocessors that a launch takes, spread evenly.
fn part(resident: &Resident, sms: u64) -> Option<u64> {
    let each = u64::from(resident.grid).div_ceil(Some(sms).filter(|&sms| sms > 0)?);
    WHOLE.checked_div(resident.per_sm.into())?.checked_mul(each)
}

fn describe(resident: &Resident) -> String {
    let Resident { name, grid, per_sm, threads, registers, shared, concurrent } = resident;
    let how = if *concurrent { "" } else { ", one at a time" };
    format!(
        "{name}: {grid} blocks of {threads} threads, {registers} registers each and {shared} bytes of \
         shared memory, {per_sm} to a multiprocessor{how}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(name: &str, grid: u32, per_sm: u32) -> Resident {
        let (threads, registers, shared) = (512, 64, 100_000);
        Resident { name: name.into(), grid, per_sm, threads, registers, shared, concurrent: true }
    }

    fn fits(residents: &[Resident]) -> bool {
        let mut account = Account::new(132);
        residents.iter().all(|each| account.enter(each.clone()).is_ok())
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
    fn what_needs_more_than_half_needs_multiprocessors_of_its_own() {
        assert!(!fits(&[launch("hidden 12288", 132, 1), launch("decode", 132, 2)]));
        assert!(fits(&[launch("prefill", 64, 1), launch("another", 64, 1)]));
        assert!(!fits(&[launch("prefill", 64, 1), launch("another", 69, 1)]));
        // Decode has a block on every multiprocessor, if it begins first.
        assert!(!fits(&[launch("prefill", 64, 1), launch("decode", 132, 2)]));
        assert!(fits(&[launch("prefill", 64, 1), launch("decode", 68, 2)]));
    }

    #[test]
    fn a_launch_must_fit_by_itself() {
        assert!(fits(&[launch("all", 264, 2)]));
        assert!(!fits(&[launch("more", 265, 2)]));
        assert!(!fits(&[launch("none", 1, 0)]));
        assert!(Account::new(66).enter(launch("shared by two ranks", 132, 1)).is_err());
    }

    #[test]
    fn of_operators_that_never_run_at_once_the_largest_counts() {
        let alone = |grid| Resident { concurrent: false, ..launch("alone", grid, 1) };
        assert!(fits(&[alone(132), alone(132)]));
        assert!(!fits(&[alone(132), launch("beside", 1, 1)]));
        assert!(!fits(&[launch("beside", 32, 1), alone(60), alone(101)]));
        assert!(fits(&[launch("beside", 32, 1), alone(60), alone(100)]));
    }

    #[test]
    fn who_does_not_fit_is_told_beside_what_and_may_come_when_that_is_gone() {
        let mut account = Account::new(132);
        let first = account.enter(launch("all-to-all of hidden 12288", 132, 1)).unwrap();
        let error = account.enter(launch("all-to-all", 132, 2)).unwrap_err().to_string();
        for part in
            ["all-to-all: 132 blocks of 512 threads", "hidden 12288", "num_sms", "132 multi"]
        {
            assert!(error.contains(part), "{error}");
        }
        account.leave(first);
        account.enter(launch("all-to-all", 132, 2)).unwrap();
    }
}
