//! View changes among many ranks on a simulated network: links are FIFO, and a seed decides which link delivers
//! next and when a rank dies or the death is detected.

use super::*;
use crate::random::SplitMix64;
use proptest::prelude::*;
use std::collections::VecDeque;

/// Generator: a run is a function of the seed.
struct Dice(SplitMix64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        (self.0.bits() % limit as u64) as usize
    }
}

enum Packet {
    View(View),
    /// The other end is dead: a link's last packet.
    Closed,
}

struct Network {
    ranks: Vec<Option<ViewChange>>,
    finished: Vec<Option<View>>,
    /// Losses detected by each rank, also after it finished.
    losses: Vec<BTreeSet<Rank>>,
    links: BTreeMap<(usize, usize), VecDeque<Packet>>,
}

impl Network {
    /// Ranks that propose different generations, on which they have to settle, too.
    fn new(size: usize, dice: &mut Dice) -> Network {
        let all: BTreeSet<Rank> = (0..size as u32).map(Rank).collect();
        let ranks = all
            .iter()
            .map(|me| Some(ViewChange::new(*me, all.clone(), 1 + dice.below(3) as u32)))
            .collect();
        Network {
            ranks,
            finished: vec![None; size],
            losses: vec![BTreeSet::new(); size],
            links: BTreeMap::new(),
        }
    }

    fn announce(&mut self, rank: usize) {
        if self.finished[rank].is_some() {
            return;
        }
        let Some(change) = &mut self.ranks[rank] else { return };
        if let Some(view) = change.announcement() {
            for other in (0..self.finished.len()).filter(|other| *other != rank) {
                let link = self.links.entry((rank, other)).or_default();
                link.push_back(Packet::View(view.clone()));
            }
        }
        match change.outcome() {
            ViewOutcome::Agreed(view) => self.finished[rank] = Some(view),
            ViewOutcome::Pending(_) => {}
            ViewOutcome::Excluded(by) => {
                panic!("{by} excluded rank {rank}, which no rank suspects")
            }
        }
    }

    /// Kills a rank: each link may lose some last packets.
    fn kill(&mut self, rank: usize, dice: &mut Dice) {
        self.ranks[rank] = None;
        for other in (0..self.finished.len()).filter(|other| *other != rank) {
            let link = self.links.entry((rank, other)).or_default();
            link.truncate(dice.below(link.len() + 1));
            link.push_back(Packet::Closed);
        }
    }

    fn deliver(&mut self, from: usize, to: usize) {
        let packet = self.links.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        let (Some(packet), Some(change)) = (packet, &mut self.ranks[to]) else { return };
        let peer = Rank(from as u32);
        match packet {
            Packet::View(view) => change.receive(peer, view),
            Packet::Closed => {
                change.lost(peer);
                self.losses[to].insert(peer);
            }
        }
        self.announce(to);
    }

    fn run(&mut self, mut deaths: Vec<usize>, dice: &mut Dice) {
        (0..self.ranks.len()).for_each(|rank| self.announce(rank));
        loop {
            let busy: Vec<(usize, usize)> = self
                .links
                .iter()
                .filter(|(_, packets)| !packets.is_empty())
                .map(|(ends, _)| *ends)
                .collect();
            if !deaths.is_empty() && (busy.is_empty() || dice.below(8) == 0) {
                let dead = deaths.remove(0);
                if self.ranks[dead].is_some() {
                    self.kill(dead, dice);
                }
            } else if busy.is_empty() {
                return;
            } else {
                let (from, to) = busy[dice.below(busy.len())];
                self.deliver(from, to);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn finished_ranks_agree_or_have_detected_a_further_loss(
        size in 1usize..8,
        seed in any::<u64>(),
        deaths in prop::collection::vec(0usize..8, 0..4),
    ) {
        let mut dice = Dice(SplitMix64::new(seed));
        let mut network = Network::new(size, &mut dice);
        let deaths: Vec<usize> = deaths.into_iter().filter(|rank| *rank < size).collect();
        network.run(deaths, &mut dice);
        let alive: Vec<usize> = (0..size).filter(|rank| network.ranks[*rank].is_some()).collect();
        let detected_a_loss = |rank: usize, view: &View| {
            network.losses[rank].iter().any(|lost| view.members.contains(lost))
        };
        for &rank in &alive {
            let Some(view) = &network.finished[rank] else { continue };
            for &other in &alive {
                match &network.finished[other] {
                    // Ranks with different views are never both members in one live group.
                    Some(theirs) if theirs != view => prop_assert!(
                        theirs.generation != view.generation
                            || detected_a_loss(rank, view) || detected_a_loss(other, theirs)
                    ),
                    Some(_) => {}
                    // A rank that never finishes waits for one that finished before a further loss.
                    None => prop_assert!(detected_a_loss(rank, view)),
                }
            }
        }
        // If no rank has finished, no rank is alive.
        if alive.iter().all(|rank| network.finished[*rank].is_none()) {
            prop_assert!(alive.is_empty(), "{alive:?} wait for each other");
        }
    }
}

fn view(generation: u32, members: &[u32]) -> View {
    View { generation, members: members.iter().copied().map(Rank).collect() }
}

#[test]
fn a_rank_outside_of_a_peers_view_is_excluded() {
    let mut change = ViewChange::new(Rank(1), view(0, &[0, 1, 2]).members, 1);
    change.receive(Rank(0), view(1, &[0, 2]));
    assert_eq!(change.outcome(), ViewOutcome::Excluded(Rank(0)));
    assert_eq!(change.announcement(), None);
}

#[test]
fn a_withdrawn_view_does_not_count() {
    let mut change = ViewChange::new(Rank(1), view(0, &[0, 1]).members, 1);
    assert_eq!(change.announcement(), Some(view(1, &[0, 1])));
    change.receive(Rank(0), view(1, &[0, 1]));
    assert_eq!(change.outcome(), ViewOutcome::Agreed(view(1, &[0, 1])));
    change.receive(Rank(0), view(1, &[]));
    assert_eq!(change.outcome(), ViewOutcome::Pending(vec![Rank(0)]));
}
