//! Who is in a group.

use std::fmt;
use std::net::IpAddr;

/// A rank within its group: ranks are consecutive from zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank as an index into a table of ranks.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// One member of a group, as every member sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its rank in this generation of the group.
    pub rank: Rank,
    /// Its rank when the job started, which never changes.
    pub original_rank: Rank,
    /// Ranks with the same identity can share memory.
    pub host_id: String,
    /// Its process id, on its own host.
    pub pid: u32,
    /// Its place among the members on its host, in rank order.
    pub local_index: u32,
    /// The address at which it can be reached by the others.
    pub address: IpAddr,
}

/// What this rank knows about a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerStatus {
    /// Its connection stands and it gives signs of life.
    Alive,
    /// It said goodbye.
    Left,
    /// It is gone without a goodbye, or silent for too long, or was left out of a new group.
    Lost,
}

/// Members numbered from zero in the order given, with their place on their host.
pub(crate) fn number(members: impl IntoIterator<Item = Member>) -> Vec<Member> {
    let mut numbered: Vec<Member> = Vec::new();
    for (rank, member) in members.into_iter().enumerate() {
        let local = numbered.iter().filter(|other| other.host_id == member.host_id).count();
        numbered.push(Member { rank: Rank(rank as u32), local_index: local as u32, ..member });
    }
    numbered
}

/// "rank 3", "ranks 1, 2 and 5": for messages to people.
pub(crate) fn list(ranks: &[Rank]) -> String {
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
        assert_eq!(list(&[Rank(3)]), "rank 3");
        assert_eq!(list(&[Rank(1), Rank(2), Rank(5)]), "ranks 1, 2 and 5");
    }
}
