//! Group members and ranks.

use std::fmt;
use std::net::IpAddr;

/// Rank within a group: consecutive from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank as an index into a rank table.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// Group member; equal at every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Rank in this group generation.
    pub rank: Rank,
    /// Rank at job start, constant over generations.
    pub original_rank: Rank,
    /// Host identity: ranks with equal ones can share memory.
    pub host_id: String,
    /// Process id on the host.
    pub pid: u32,
    /// Index among members on the host, in rank order.
    pub local_index: u32,
    /// Address at which peers reach it.
    pub address: IpAddr,
}

/// Peer status as this rank sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerStatus {
    /// Connected, with heartbeats.
    Alive,
    /// Left in order.
    Left,
    /// Connection lost, silent for the silence timeout, or excluded from a new group.
    Lost,
}

/// Members numbered from 0 in iteration order, with an index on each host.
pub(crate) fn number_members(members: impl IntoIterator<Item = Member>) -> Vec<Member> {
    let mut numbered: Vec<Member> = Vec::new();
    for (rank, member) in members.into_iter().enumerate() {
        let local = numbered.iter().filter(|other| other.host_id == member.host_id).count();
        numbered.push(Member { rank: Rank(rank as u32), local_index: local as u32, ..member });
    }
    numbered
}

/// Rank list for messages, for example "rank 3" or "ranks 1, 2 and 5".
pub(crate) fn list_ranks(ranks: &[Rank]) -> String {
    match ranks {
        [] => "no rank".to_string(),
        [only] => only.to_string(),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(|rank| rank.0.to_string()).collect();
            format!("ranks {} and {}", first.join(", "), last.0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_read_as_a_sentence() {
        assert_eq!(list_ranks(&[Rank(3)]), "rank 3");
        assert_eq!(list_ranks(&[Rank(1), Rank(2), Rank(5)]), "ranks 1, 2 and 5");
    }
}
