//! A rank's processors: cores and quotas, and the rank's share in them among the ranks on the host.
//!
//! A host's ranks include all groups in this process: the ranks in a small group compete with other ranks
//! that are split from the same group.

use crate::cores::CoreSet;
use crate::cpu_quota::CpuQuota;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use weft_control::{Member, Rank};

/// Cores and quotas for a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processors {
    /// Cores on which the rank may run; empty where unknown.
    pub cores: CoreSet,
    /// Processor time quotas.
    pub quotas: Vec<CpuQuota>,
}

impl Processors {
    /// Processors that the calling thread may use.
    pub fn of_thread() -> Processors {
        Processors { cores: CoreSet::of_thread(), quotas: CpuQuota::of_process() }
    }

    /// Ranks, itself included, that run on one group's quota.
    fn users(quota: &CpuQuota, ranks: &[&Processors]) -> usize {
        let uses = |each: &&&Processors| each.quotas.iter().any(|its| its.group == quota.group);
        ranks.iter().filter(uses).count().max(1)
    }

    /// A rank's share among `ranks` on the host, itself included. `parallelism` is measured in this
    /// process, for ranks whose cores are unknown.
    pub fn share_among(&self, ranks: &[&Processors], parallelism: usize) -> ProcessorShare {
        let sets: Vec<&CoreSet> = ranks.iter().map(|each| &each.cores).collect();
        let (mut is_shared, mut cores) = match sets.iter().any(|set| set.is_unknown()) {
            true => (ranks.len() > parallelism, parallelism as f64 / ranks.len().max(1) as f64),
            false => (!CoreSet::suffice(&sets), self.cores.share_among(&sets)),
        };
        for quota in &self.quotas {
            let each = f64::from(quota.millicores) / 1000.0 / Self::users(quota, ranks) as f64;
            is_shared |= each < 1.0;
            cores = cores.min(each);
        }
        ProcessorShare { is_shared, cores: (cores as usize).max(1) }
    }
}

/// A rank's share in the host's processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessorShare {
    /// The rank has less than a whole core.
    pub is_shared: bool,
    /// Whole cores for the rank, at least one.
    pub cores: usize,
}

/// Process by host identity and process id. Several ranks may be threads in one process.
type Process = (String, u32);

/// This host's ranks in a group, by process.
type LocalRanks = BTreeMap<Process, Vec<Processors>>;

/// Groups in this process, with numbers.
static GROUPS: Mutex<Groups> = Mutex::new(Groups { next: 0, groups: Vec::new() });

struct Groups {
    next: u64,
    groups: Vec<(u64, LocalRanks)>,
}

impl Groups {
    /// Adds a group; returns a number for it, and the ranks on the host in all groups.
    fn add(&mut self, host: &str, own: LocalRanks) -> (u64, Vec<Processors>) {
        let mut all = own.clone();
        for (process, ranks) in self.groups.iter().flat_map(|(_, ranks)| ranks) {
            let counted = all.entry(process.clone()).or_default();
            if process.0 == host && counted.len() < ranks.len() {
                counted.clone_from(ranks);
            }
        }
        let number = self.next;
        self.next += 1;
        self.groups.push((number, own));
        (number, all.into_values().flatten().collect())
    }
}

/// A group's entry among the groups in this process, removed on drop.
pub(crate) struct GroupProcessors {
    number: u64,
    /// This rank's share when the group formed.
    pub share: ProcessorShare,
}

impl GroupProcessors {
    /// Adds a group with these members, and each member's processors.
    pub fn of(members: &[Member], rank: Rank, processors: &[&Processors]) -> GroupProcessors {
        let host = &members[rank.index()].host_id;
        let mut own = LocalRanks::new();
        for (member, &processors) in members.iter().zip(processors) {
            if member.host_id == *host {
                let process = (member.host_id.clone(), member.pid);
                own.entry(process).or_default().push(processors.clone());
            }
        }
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, all) = groups.add(host, own);
        drop(groups);
        let parallelism = std::thread::available_parallelism().map_or(1, usize::from);
        let ranks: Vec<&Processors> = all.iter().collect();
        let share = processors[rank.index()].share_among(&ranks, parallelism);
        GroupProcessors { number, share }
    }
}

impl Drop for GroupProcessors {
    fn drop(&mut self) {
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        groups.groups.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(cores: &[usize], quotas: &[(u64, u32)]) -> Processors {
        let quota = |&(group, millicores): &(u64, u32)| CpuQuota { group, millicores };
        Processors {
            cores: CoreSet::new(cores.iter().copied()),
            quotas: quotas.iter().map(quota).collect(),
        }
    }

    /// Share for the first rank.
    fn share(ranks: &[Processors]) -> (bool, usize) {
        let share = ranks[0].share_among(&ranks.iter().collect::<Vec<_>>(), 4);
        (share.is_shared, share.cores)
    }

    #[test]
    fn a_pinned_rank_has_its_own_cores() {
        let pinned = |cores| on(cores, &[]);
        assert_eq!(share(&[pinned(&[0, 1, 2, 3]), pinned(&[4, 5, 6, 7])]), (false, 4));
        assert_eq!(share(&[pinned(&[0]), pinned(&[1])]), (false, 1));
        assert_eq!(share(&[pinned(&[0]), pinned(&[0])]), (true, 1));
    }

    #[test]
    fn ranks_that_are_not_pinned_divide_the_cores() {
        let any = || on(&[0, 1, 2, 3, 4, 5, 6, 7], &[]);
        assert_eq!(share(&[any(), any()]), (false, 4));
        assert_eq!(share(&[any(), any(), any()]), (false, 2));
        assert_eq!(share(&vec![any(); 9]), (true, 1));
    }

    #[test]
    fn a_quota_limits_the_ranks_of_its_group_also_if_they_are_pinned() {
        let (first, second) = (on(&[0], &[(7, 1500)]), on(&[1], &[(7, 1500)]));
        assert_eq!(share(&[first.clone(), second.clone()]), (true, 1));
        assert_eq!(share(&[on(&[0], &[(7, 2000)]), on(&[1], &[(7, 2000)])]), (false, 1));
        // The peer is in a separate container.
        assert_eq!(share(&[first, on(&[1], &[(8, 1500)])]), (false, 1));
        let nested = |own| on(&[0, 1, 2, 3], &[(own, 3000), (1, 4000)]);
        assert_eq!(share(&[nested(2), nested(3)]), (false, 2));
        assert_eq!(share(&[nested(2), nested(3), nested(4), nested(5)]), (false, 1));
        assert_eq!(share(&[on(&[0, 1, 2, 3], &[(1, 900)])]), (true, 1));
    }

    #[test]
    fn unknown_cores_leave_the_count_of_ranks() {
        let (known, unknown) = (on(&[0, 1], &[]), Processors::default());
        assert_eq!(share(&[unknown.clone(), known.clone()]), (false, 2));
        assert_eq!(share(&[known, unknown.clone()]), (false, 2));
        assert_eq!(share(&vec![unknown; 5]), (true, 1));
    }

    /// Ranks on one host by process id, on cores 0 and 1.
    fn local(processes: &[u32]) -> LocalRanks {
        let mut ranks = LocalRanks::new();
        for &process in processes {
            let entry = ranks.entry(("here".to_owned(), process)).or_default();
            entry.push(on(&[0, 1], &[]));
        }
        ranks
    }

    #[test]
    fn a_part_of_a_group_counts_the_ranks_of_all_of_it() {
        let mut groups = Groups { next: 0, groups: Vec::new() };
        assert_eq!(groups.add("here", local(&[1, 2, 3, 4])).1.len(), 4);
        let (number, part) = groups.add("here", local(&[1, 2]));
        assert_eq!(part.len(), 4);
        // Another group whose processes partly differ; processes known under another host name do not
        // count.
        assert_eq!(groups.add("here", local(&[1, 5])).1.len(), 5);
        groups.groups.push((9, LocalRanks::from([(("there".to_owned(), 6), vec![on(&[0], &[])])])));
        assert_eq!(groups.add("here", local(&[1])).1.len(), 5);
        // Ranks that are threads in one process.
        assert_eq!(groups.add("here", local(&[8, 8, 8])).1.len(), 8);
        assert_eq!(groups.add("here", local(&[8])).1.len(), 8);
        assert!(groups.groups.iter().any(|(each, _)| *each == number));
    }

    #[test]
    fn a_group_that_is_gone_is_not_counted() {
        let members: Vec<Member> = (0..3)
            .map(|rank| Member {
                rank: Rank(rank),
                original_rank: Rank(rank),
                host_id: "of this test".to_owned(),
                pid: 100 + rank,
                local_index: rank,
                address: std::net::Ipv4Addr::LOCALHOST.into(),
            })
            .collect();
        let processors = on(&[0, 1], &[]);
        let processors = [&processors; 3];
        let group =
            |ranks: usize| GroupProcessors::of(&members[..ranks], Rank(0), &processors[..ranks]);
        let whole = group(3);
        assert!(whole.share.is_shared);
        assert!(group(2).share.is_shared);
        drop(whole);
        assert!(!group(2).share.is_shared);
    }
}
