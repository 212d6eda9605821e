//! Sets of cores on which ranks may run, and how they are assigned to ranks.

use rustix::thread::{CpuSet, sched_getaffinity};

/// Maximum cores in a set. Core numbers come from the host's kernel and are the same in all containers.
const MAX_CORES: usize = 8192;

/// Cores on which a rank may run, a bit each. Empty where the kernel does not return them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CoreSet(Vec<u8>);

impl CoreSet {
    /// Cores on which the calling thread, and threads that it starts, may run.
    pub fn of_thread() -> CoreSet {
        let Ok(allowed) = sched_getaffinity(None) else { return CoreSet::default() };
        CoreSet::new((0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)))
    }

    /// These cores.
    pub fn new(cores: impl IntoIterator<Item = usize>) -> CoreSet {
        let mut bits = Vec::new();
        for core in cores {
            let byte = core / 8;
            bits.resize(bits.len().max(byte + 1), 0);
            bits[byte] |= 1 << (core % 8);
        }
        CoreSet(bits)
    }

    /// Encoded bytes.
    pub fn encode(&self) -> &[u8] {
        &self.0
    }

    /// Decodes a peer's bytes.
    pub fn decode(bytes: &[u8]) -> CoreSet {
        CoreSet(bytes[..bytes.len().min(MAX_CORES / 8)].to_vec())
    }

    /// Reads a kernel's list, such as `0-47,96-143`; `None` if it is malformed or too long.
    pub fn parse(list: &str) -> Option<CoreSet> {
        let mut cores = Vec::new();
        for range in list.trim().split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            if last >= MAX_CORES {
                return None;
            }
            cores.extend(first..=last);
        }
        Some(CoreSet::new(cores))
    }

    /// Cores in both sets.
    pub fn intersection(&self, other: &CoreSet) -> CoreSet {
        CoreSet::new(self.cores().filter(|core| other.contains(*core)))
    }

    /// Gives as many sets as possible a separate core each, one with a high number where there is a choice: the kernel
    /// prefers low ones for interrupts. For example, two ranks on cores 0 to 3 get 3 and 2.
    pub fn assign(sets: &[&CoreSet]) -> Vec<Option<usize>> {
        let mut assignment = Assignment::new(sets);
        for rank in 0..sets.len() {
            assignment.assign_once(rank);
        }
        let core_of = |rank| assignment.ranks.iter().position(|holder| *holder == Some(rank));
        (0..sets.len()).map(core_of).collect()
    }

    /// Cores, ascending.
    pub fn cores(&self) -> impl Iterator<Item = usize> {
        (0..self.0.len() * 8).filter(|core| self.0[core / 8] >> (core % 8) & 1 != 0)
    }

    /// True if the kernel returned no cores.
    pub fn is_unknown(&self) -> bool {
        self.cores().next().is_none()
    }

    /// True if each rank can have a separate core.
    pub(crate) fn suffice(ranks: &[&CoreSet]) -> bool {
        Assignment::is_possible(ranks)
    }

    /// Share of this set among `ranks` that have these, itself included: each core is divided by the
    /// ranks that may run on it. For example, two ranks on the same two cores get 1.0 each.
    pub(crate) fn share_among(&self, ranks: &[&CoreSet]) -> f64 {
        let users = |core| ranks.iter().filter(|set| set.contains(core)).count();
        self.cores().map(|core| 1.0 / users(core).max(1) as f64).sum()
    }

    /// True if a core is in the set.
    pub fn contains(&self, core: usize) -> bool {
        self.0.get(core / 8).is_some_and(|byte| byte >> (core % 8) & 1 != 0)
    }
}

/// Assigns cores to ranks: a bipartite matching by augmenting paths (Kuhn's algorithm).
struct Assignment {
    cores_of: Vec<Vec<usize>>,
    /// Rank on each core.
    ranks: Vec<Option<usize>>,
}

impl Assignment {
    /// No rank has a core. The highest is preferred.
    fn new(sets: &[&CoreSet]) -> Assignment {
        let descending = |set: &&CoreSet| {
            let mut cores: Vec<usize> = set.cores().collect();
            cores.reverse();
            cores
        };
        let cores_of: Vec<Vec<usize>> = sets.iter().map(descending).collect();
        let cores = cores_of.iter().flatten().max().map_or(0, |core| core + 1);
        Assignment { cores_of, ranks: vec![None; cores] }
    }

    /// True if each set can have a separate core.
    fn is_possible(sets: &[&CoreSet]) -> bool {
        let mut assignment = Assignment::new(sets);
        (0..sets.len()).all(|rank| assignment.assign_once(rank))
    }

    /// Assigns a core to one more rank, if that is possible.
    fn assign_once(&mut self, rank: usize) -> bool {
        let mut tried = vec![false; self.ranks.len()];
        self.assign(rank, &mut tried)
    }

    /// Assigns a free core to a rank, or one whose rank can have another that is not `tried`.
    fn assign(&mut self, rank: usize, tried: &mut [bool]) -> bool {
        let find_free = |core: &&usize| self.ranks[**core].is_none();
        if let Some(&core) = self.cores_of[rank].iter().find(find_free) {
            self.ranks[core] = Some(rank);
            return true;
        }
        for at in 0..self.cores_of[rank].len() {
            let core = self.cores_of[rank][at];
            if std::mem::replace(&mut tried[core], true) {
                continue;
            }
            if self.ranks[core].is_none_or(|other| self.assign(other, tried)) {
                self.ranks[core] = Some(rank);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(cores: &[usize]) -> CoreSet {
        CoreSet::new(cores.iter().copied())
    }

    fn are_shared(ranks: &[&[usize]]) -> bool {
        let sets: Vec<CoreSet> = ranks.iter().map(|cores| set(cores)).collect();
        !CoreSet::suffice(&sets.iter().collect::<Vec<_>>())
    }

    #[test]
    fn each_rank_gets_another_core_in_its_set() {
        let assigned = |ranks: &[&[usize]]| {
            let sets: Vec<CoreSet> = ranks.iter().map(|cores| set(cores)).collect();
            CoreSet::assign(&sets.iter().collect::<Vec<_>>())
        };
        assert_eq!(assigned(&[&[0, 1, 2, 3], &[0, 1, 2, 3]]), [Some(3), Some(2)]);
        assert_eq!(assigned(&[&[0, 1], &[8, 9]]), [Some(1), Some(9)]);
        // The first rank gives way to one that has no other.
        assert_eq!(assigned(&[&[0, 1], &[1], &[]]), [Some(0), Some(1), None]);
        let crowded = assigned(&[&[0, 1], &[0, 1], &[0, 1]]);
        assert_eq!(crowded.iter().flatten().count(), 2);
        assert_eq!(assigned(&[]), []);
    }

    #[test]
    fn a_kernel_s_list_is_a_set() {
        assert_eq!(CoreSet::parse("0-2,8\n"), Some(set(&[0, 1, 2, 8])));
        assert_eq!(CoreSet::parse("7"), Some(set(&[7])));
        for malformed in ["", "a", "1-", "0-99999999", "1,,2", "-1"] {
            assert_eq!(CoreSet::parse(malformed), None, "{malformed:?}");
        }
        let both = set(&[0, 1, 64]).intersection(&set(&[1, 64, 65]));
        assert_eq!(both.cores().collect::<Vec<_>>(), [1, 64]);
    }

    #[test]
    fn ranks_pinned_to_a_core_each_have_their_own() {
        assert!(!are_shared(&[&[0], &[1]]));
        assert!(!are_shared(&[&[3], &[200], &[64], &[63]]));
        assert!(are_shared(&[&[1], &[1]]));
    }

    #[test]
    fn ranks_that_are_not_pinned_share_cores_if_they_are_more() {
        assert!(!are_shared(&[&[0, 1], &[0, 1]]));
        assert!(are_shared(&[&[0, 1], &[0, 1], &[0, 1]]));
    }

    #[test]
    fn cores_that_other_ranks_alone_may_use_do_not_help() {
        assert!(are_shared(&[&[0], &[0], &[0, 1, 2, 3]]));
        assert!(are_shared(&[&[0, 1], &[0, 1], &[0, 1], &[2, 3, 4, 5]]));
    }

    #[test]
    fn a_rank_makes_room_for_one_with_fewer_cores() {
        assert!(!are_shared(&[&[0, 1, 2], &[0, 1], &[0]]));
        assert!(!are_shared(&[&[0, 1], &[1, 2], &[2, 3], &[0]]));
    }

    #[test]
    fn a_core_is_divided_among_the_ranks_that_may_run_on_it() {
        let (own, all, other) = (set(&[0, 1]), set(&[0, 1, 2, 3]), set(&[2]));
        let ranks = [&own, &all, &other];
        assert_eq!(own.share_among(&ranks), 1.0);
        assert_eq!(all.share_among(&ranks), 2.5);
        assert_eq!(other.share_among(&ranks), 0.5);
        assert_eq!(all.share_among(&[&all]), 4.0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "isolated miri has no affinities")]
    fn the_set_of_a_thread_is_not_empty_and_round_trips() {
        let own = CoreSet::of_thread();
        assert!(own.cores().next().is_some());
        assert_eq!(CoreSet::decode(own.encode()), own);
    }
}
