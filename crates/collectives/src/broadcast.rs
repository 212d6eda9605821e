//! Broadcast by a binomial tree, by a pipelined chain, and by a pipelined double tree.

use crate::double_tree::nodes;
use crate::op::{Collective, Op, Rank, Span};
use crate::pipeline::Pipeline;
use crate::schedule::Schedule;

/// Broadcast by a binomial tree: in step `k` each rank that has the vector sends it `2^k` ranks further.
///
/// Cost, in the notation of [`ring`](crate::ring): `ceil(log2 N) (a + nb)`; the best for small vectors.
/// Source: Chan et al. 2007. No scratch.
#[derive(Clone, Copy, Debug)]
pub struct Binomial {
    pub(crate) ranks: u32,
    pub(crate) root: Rank,
}

impl Binomial {
    /// First step in which relative rank `relative` sends.
    fn first(relative: u32) -> u32 {
        if relative == 0 { 0 } else { relative.ilog2() + 1 }
    }

    fn children(&self, relative: u32) -> u32 {
        let left = self.ranks - 1 - relative;
        let steps = if left == 0 { 0 } else { left.ilog2() + 1 };
        steps.saturating_sub(Binomial::first(relative))
    }
}

/// Distance from `root` to `rank` around the ring of ranks.
fn relative_rank(rank: Rank, root: Rank, ranks: u32) -> u32 {
    (rank.0 + ranks - root.0) % ranks
}

fn absolute_rank(relative: u32, root: Rank, ranks: u32) -> Rank {
    Rank((relative + root.0) % ranks)
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
        self.children(relative_rank(rank, self.root, self.ranks)) + 1
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let relative = relative_rank(rank, self.root, self.ranks);
        let write = |child: u32, source| {
            let step = Binomial::first(relative) + child;
            let to = absolute_rank(relative + (1 << step), self.root, self.ranks);
            Op::Write { to, source, target: Span::output(0, 1), lane: 0, step }
        };
        match relative {
            // The root's copy comes last.
            0 if index < self.children(0) => write(index, Span::input(0, 1)),
            0 => Op::copy_all(1),
            _ if index == 0 => {
                let from = absolute_rank(relative - (1 << relative.ilog2()), self.root, self.ranks);
                Op::Wait { from, lane: 0, count: 1 }
            }
            _ => write(index - 1, Span::output(0, 1)),
        }
    }
}

/// Broadcast in chunks by a chain through all ranks, or by a double tree over all ranks but the root.
///
/// Cost, in the notation of [`ring`](crate::ring), for `C` chunks: the chain `(C + N-2) (a + n/C b)`; the tree, with
/// depth `D = ceil(log2(N-1))` and `C` chunks per half, `(C + D) a` and at most `(C + D) n/C b`, reached from about
/// four chunks on (Sanders et al. 2009, see [`tree`](crate::tree)). No scratch.
#[derive(Clone, Debug)]
pub struct Pipelined {
    ranks: u32,
    root: Rank,
    chunks: u32,
    tree: bool,
    steps: u32,
    /// By relative rank.
    nodes: Vec<PipelineNode>,
}

/// A rank's neighbours and pipeline, for each vector half; a chain has one half.
#[derive(Clone, Debug)]
struct PipelineNode {
    /// Relative parent ranks; unused at the root.
    parents: [u32; 2],
    children: [[Option<u32>; 2]; 2],
    pipeline: Pipeline<2>,
}

impl Pipelined {
    pub(crate) fn chain(ranks: u32, root: Rank, chunks: u32) -> Pipelined {
        let nodes = (0..ranks)
            .map(|relative| {
                let next = (relative + 1 < ranks).then_some(relative + 1);
                let operations = u32::from(relative > 0) + 2 * u32::from(next.is_some());
                PipelineNode {
                    parents: [relative.saturating_sub(1), 0],
                    children: [[next, None], [None, None]],
                    pipeline: Pipeline::new([(relative, operations), (relative, 0)], chunks),
                }
            })
            .collect();
        let steps = if ranks == 1 { 0 } else { chunks + ranks - 2 };
        Pipelined { ranks, root, chunks, tree: false, steps, nodes }
    }

    pub(crate) fn tree(ranks: u32, root: Rank, chunks: u32) -> Pipelined {
        // The root feeds two trees over all other ranks, in which relative rank `r` is node `r - 1`.
        let others = ranks - 1;
        let all: Vec<_> = (0..others).map(|rank| nodes(rank, others)).collect();
        let depth = all.iter().flatten().map(|node| node.depth).max().unwrap_or(0);
        let top = |tree: usize| {
            let rank = all.iter().position(|nodes| nodes[tree].parent.is_none());
            [rank.map(|rank| rank as u32 + 1), None]
        };
        let mut positions = vec![PipelineNode {
            parents: [0, 0],
            children: [top(0), top(1)],
            pipeline: Pipeline::new([(0, 2), (0, 2)], chunks),
        }];
        for nodes in &all {
            let operations = |tree: usize| {
                let children = nodes[tree].children.iter().flatten().count() as u32;
                (1 + nodes[tree].depth, 1 + 2 * children)
            };
            positions.push(PipelineNode {
                parents: [0, 1].map(|tree| nodes[tree].parent.map_or(0, |parent| parent + 1)),
                children: [0, 1].map(|tree| nodes[tree].children.map(|child| child.map(|c| c + 1))),
                pipeline: Pipeline::new([operations(0), operations(1)], chunks),
            });
        }
        let steps = if ranks == 1 { 0 } else { chunks + depth };
        Pipelined { ranks, root, chunks, tree: true, steps, nodes: positions }
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
        let relative = relative_rank(rank, self.root, self.ranks);
        if self.ranks == 1 {
            return 1;
        }
        self.nodes[relative as usize].pipeline.len() + u32::from(relative == 0)
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let relative = relative_rank(rank, self.root, self.ranks);
        let node = &self.nodes[relative as usize];
        if relative == 0 && (self.ranks == 1 || index == node.pipeline.len()) {
            return Op::copy_all(self.blocks());
        }
        let (stream, chunk, part) = node.pipeline.item(index);
        let lane = stream as u32 * self.chunks + chunk;
        let part = match (relative, part) {
            (0, part) => part,
            (_, 0) => {
                let from = absolute_rank(node.parents[stream], self.root, self.ranks);
                return Op::Wait { from, lane, count: 1 };
            }
            (_, part) => part - 1,
        };
        let to = absolute_rank(
            node.children[stream][part as usize / 2].unwrap_or(0),
            self.root,
            self.ranks,
        );
        if part % 2 == 0 {
            return Op::Drain { to };
        }
        let source = if relative == 0 { Span::input(lane, 1) } else { Span::output(lane, 1) };
        let step = node.pipeline.start(stream) + chunk;
        Op::Write { to, source, target: Span::output(lane, 1), lane, step }
    }
}
