//! Broadcast by a binomial tree, by a pipelined chain, and by a pipelined double tree.

use crate::op::{Collective, Op, Rank, Span};
use crate::pipeline::Pipeline;
use crate::ring::copy_all;
use crate::schedule::Schedule;
use crate::tree::nodes;

/// Broadcast by a binomial tree: in step `k` all who have the vector send it `2^k` ranks further.
///
/// Cost, with the letters of [`ring`](crate::ring): `ceil(log2 N) (a + nb)`; the best for small vectors.
/// Source: Chan et al. 2007. No scratch.
#[derive(Clone, Copy, Debug)]
pub struct Binomial {
    pub(crate) ranks: u32,
    pub(crate) root: Rank,
}

impl Binomial {
    /// The first step in which the rank `place` behind the root sends.
    fn first(place: u32) -> u32 {
        if place == 0 { 0 } else { place.ilog2() + 1 }
    }

    fn children(&self, place: u32) -> u32 {
        let left = self.ranks - 1 - place;
        let steps = if left == 0 { 0 } else { left.ilog2() + 1 };
        steps.saturating_sub(Binomial::first(place))
    }
}

/// The place of `rank` behind `root`.
fn place(rank: Rank, root: Rank, ranks: u32) -> u32 {
    (rank.0 + ranks - root.0) % ranks
}

fn at(place: u32, root: Rank, ranks: u32) -> Rank {
    Rank((place + root.0) % ranks)
}

impl Schedule for Binomial {
    fn name(&self) -> &str {
        "binomial"
    }

    fn collective(&self) -> Collective {
        Collective::Broadcast { root: self.root }
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn blocks(&self) -> u32 {
        1
    }

    fn steps(&self) -> u32 {
        if self.ranks == 1 { 0 } else { (self.ranks - 1).ilog2() + 1 }
    }

    fn lanes(&self) -> u32 {
        1
    }

    fn len(&self, rank: Rank) -> u32 {
        self.children(place(rank, self.root, self.ranks)) + 1
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let place = place(rank, self.root, self.ranks);
        let write = |child: u32, source| {
            let step = Binomial::first(place) + child;
            let to = at(place + (1 << step), self.root, self.ranks);
            Op::Write { to, source, target: Span::output(0, 1), lane: 0, step }
        };
        match place {
            // The root's own copy can come last.
            0 if index < self.children(0) => write(index, Span::input(0, 1)),
            0 => copy_all(1),
            _ if index == 0 => {
                let from = at(place - (1 << place.ilog2()), self.root, self.ranks);
                Op::Wait { from, lane: 0, count: 1 }
            }
            _ => write(index - 1, Span::output(0, 1)),
        }
    }
}

/// Broadcast by a chain of all ranks, or by a double tree of all but the root, in chunks.
///
/// Cost, with the letters of [`ring`](crate::ring), for `C` chunks: the chain `(C + N-2) (a + n/C b)`; the
/// tree, of depth `D = ceil(log2(N-1))` and with `C` chunks of each half, `(C + D) a` and at most `(C + D) n/C b`,
/// which it is from about four chunks on (Sanders et al. 2009, see [`tree`](crate::tree)). No scratch.
#[derive(Clone, Debug)]
pub struct Pipelined {
    ranks: u32,
    root: Rank,
    chunks: u32,
    tree: bool,
    steps: u32,
    /// For each place behind the root.
    stations: Vec<Station>,
}

/// What a rank does in each of the halves; a chain has one.
#[derive(Clone, Debug)]
struct Station {
    /// Where it receives from, as a place; none at the root.
    from: [u32; 2],
    to: [[Option<u32>; 2]; 2],
    pipeline: Pipeline<2>,
}

impl Pipelined {
    pub(crate) fn chain(ranks: u32, root: Rank, chunks: u32) -> Pipelined {
        let stations = (0..ranks)
            .map(|place| {
                let next = (place + 1 < ranks).then_some(place + 1);
                let operations = u32::from(place > 0) + 2 * u32::from(next.is_some());
                Station {
                    from: [place.saturating_sub(1), 0],
                    to: [[next, None], [None, None]],
                    pipeline: Pipeline::new([(place, operations), (place, 0)], chunks),
                }
            })
            .collect();
        let steps = if ranks == 1 { 0 } else { chunks + ranks - 2 };
        Pipelined { ranks, root, chunks, tree: false, steps, stations }
    }

    pub(crate) fn tree(ranks: u32, root: Rank, chunks: u32) -> Pipelined {
        // The root feeds two trees of all the others, whose place is one more than their number there.
        let others = ranks - 1;
        let all: Vec<_> = (0..others).map(|rank| nodes(rank, others)).collect();
        let depth = all.iter().flatten().map(|node| node.depth).max().unwrap_or(0);
        let top = |tree: usize| {
            let rank = all.iter().position(|nodes| nodes[tree].parent.is_none());
            [rank.map(|rank| rank as u32 + 1), None]
        };
        let mut stations = vec![Station {
            from: [0, 0],
            to: [top(0), top(1)],
            pipeline: Pipeline::new([(0, 2), (0, 2)], chunks),
        }];
        for nodes in &all {
            let operations = |tree: usize| {
                let children = nodes[tree].children.iter().flatten().count() as u32;
                (1 + nodes[tree].depth, 1 + 2 * children)
            };
            stations.push(Station {
                from: [0, 1].map(|tree| nodes[tree].parent.map_or(0, |parent| parent + 1)),
                to: [0, 1].map(|tree| nodes[tree].children.map(|child| child.map(|c| c + 1))),
                pipeline: Pipeline::new([operations(0), operations(1)], chunks),
            });
        }
        let steps = if ranks == 1 { 0 } else { chunks + depth };
        Pipelined { ranks, root, chunks, tree: true, steps, stations }
    }
}

impl Schedule for Pipelined {
    fn name(&self) -> &str {
        if self.tree { "tree" } else { "chain" }
    }

    fn collective(&self) -> Collective {
        Collective::Broadcast { root: self.root }
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn blocks(&self) -> u32 {
        self.chunks * (1 + u32::from(self.tree))
    }

    fn steps(&self) -> u32 {
        self.steps
    }

    fn lanes(&self) -> u32 {
        self.blocks()
    }

    fn len(&self, rank: Rank) -> u32 {
        let place = place(rank, self.root, self.ranks);
        if self.ranks == 1 {
            return 1;
        }
        self.stations[place as usize].pipeline.len() + u32::from(place == 0)
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let place = place(rank, self.root, self.ranks);
        let station = &self.stations[place as usize];
        if place == 0 && (self.ranks == 1 || index == station.pipeline.len()) {
            return copy_all(self.blocks());
        }
        let (stream, chunk, part) = station.pipeline.item(index);
        let lane = stream as u32 * self.chunks + chunk;
        let part = match (place, part) {
            (0, part) => part,
            (_, 0) => {
                let from = at(station.from[stream], self.root, self.ranks);
                return Op::Wait { from, lane, count: 1 };
            }
            (_, part) => part - 1,
        };
        let to = at(station.to[stream][part as usize / 2].unwrap_or(0), self.root, self.ranks);
        if part % 2 == 0 {
            return Op::Drain { to };
        }
        let source = if place == 0 { Span::input(lane, 1) } else { Span::output(lane, 1) };
        let step = station.pipeline.start(stream) + chunk;
        Op::Write { to, source, target: Span::output(lane, 1), lane, step }
    }
}
