//! All-reduce by a double binary tree, pipelined in chunks.

use crate::double_tree::{Node, nodes};
use crate::op::{Collective, Op, Rank, Span};
use crate::pipeline::Pipeline;
use crate::schedule::Schedule;

/// All-reduce by a double binary tree: chunks travel up to the roots and down again, both directions overlapped.
///
/// With `C` chunks in each half and trees with depth `D = ceil(log2 N)`, the vector has `2C` blocks. A rank receives
/// from two children in one tree and from its parents in both, and sends as much, so the cost, in the notation of
/// [`ring`](crate::ring), is `(C + 2D - 1) a + ng` and at most `(C + 2D - 1) 2n/C b`, less where the pipeline fills and
/// empties. The best `C` grows as `sqrt(n)`. Each chunk is sent after a drain for the one before, so that chunks do not
/// share the link.
#[derive(Clone, Debug)]
pub struct TreeAllReduce {
    ranks: u32,
    chunks: u32,
    depth: u32,
    nodes: Vec<[Node; 2]>,
    pipelines: Vec<Pipeline<4>>,
}

impl TreeAllReduce {
    pub(crate) fn new(ranks: u32, chunks: u32) -> TreeAllReduce {
        let nodes: Vec<_> = (0..ranks).map(|rank| nodes(rank, ranks)).collect();
        let depth = nodes.iter().flatten().map(|node| node.depth).max().unwrap_or(0);
        let pipelines = nodes
            .iter()
            .map(|nodes| {
                let up = |node: &Node| {
                    let children = node.children.iter().flatten().count() as u32;
                    (depth - node.depth, 2 * children + 2 * u32::from(node.parent.is_some()))
                };
                let down = |node: &Node| {
                    let children = node.children.iter().flatten().count() as u32;
                    (depth + node.depth, 2 * children + u32::from(node.parent.is_some()))
                };
                let [first, second] = nodes;
                Pipeline::new([up(first), up(second), down(first), down(second)], chunks)
            })
            .collect();
        TreeAllReduce { ranks, chunks, depth, nodes, pipelines }
    }

    /// Arrival span for a child's chunk sum: the block's position for the first child, a slot for the second.
    fn arrival(&self, parent: u32, tree: usize, second: bool, chunk: u32) -> Span {
        if second {
            let before = tree == 1 && self.nodes[parent as usize][0].children[1].is_some();
            return Span::scratch(u32::from(before) * self.chunks + chunk, 1);
        }
        Span::output(tree as u32 * self.chunks + chunk, 1)
    }

    fn lane(&self, tree: usize, down: bool, chunk: u32) -> u32 {
        (2 * tree as u32 + u32::from(down)) * self.chunks + chunk
    }

    fn up(&self, rank: Rank, tree: usize, chunk: u32, part: u32) -> Op {
        let node = &self.nodes[rank.0 as usize][tree];
        let block = tree as u32 * self.chunks + chunk;
        let lane = self.lane(tree, false, chunk);
        let children = node.children.iter().flatten().count() as u32;
        if part < 2 * children {
            let child = (part / 2) as usize;
            if part.is_multiple_of(2) {
                return Op::Wait { from: Rank(node.children[child].unwrap_or(0)), lane, count: 1 };
            }
            let target = Span::output(block, 1);
            return match child {
                0 => Op::Reduce { source: Span::input(block, 1), target },
                _ => Op::Reduce { source: self.arrival(rank.0, tree, true, chunk), target },
            };
        }
        let parent = node.parent.unwrap_or(0);
        if part == 2 * children {
            return Op::Drain { to: Rank(parent) };
        }
        let source = if children == 0 { Span::input(block, 1) } else { Span::output(block, 1) };
        let second = self.nodes[parent as usize][tree].children[1] == Some(rank.0);
        let target = self.arrival(parent, tree, second, chunk);
        let step = self.depth - node.depth + chunk;
        Op::Write { to: Rank(parent), source, target, lane, step }
    }

    fn down(&self, rank: Rank, tree: usize, chunk: u32, part: u32) -> Op {
        let node = &self.nodes[rank.0 as usize][tree];
        let all = Span::output(tree as u32 * self.chunks + chunk, 1);
        let lane = self.lane(tree, true, chunk);
        let part = match (node.parent, part) {
            (Some(parent), 0) => return Op::Wait { from: Rank(parent), lane, count: 1 },
            (Some(_), part) => part - 1,
            (None, part) => part,
        };
        let to = Rank(node.children[part as usize / 2].unwrap_or(0));
        match part % 2 {
            0 => Op::Drain { to },
            _ => {
                let step = self.depth + node.depth + chunk;
                Op::Write { to, source: all, target: all, lane, step }
            }
        }
    }
}

impl Schedule for TreeAllReduce {
    fn name(&self) -> &str {
        "tree"
    }

    fn collective(&self) -> Collective {
        Collective::AllReduce
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn blocks(&self) -> u32 {
        2 * self.chunks
    }

    fn scratch_blocks(&self, rank: Rank) -> u32 {
        let two = |node: &&Node| node.children[1].is_some();
        self.chunks * self.nodes[rank.0 as usize].iter().filter(two).count() as u32
    }

    fn steps(&self) -> u32 {
        if self.ranks == 1 { 0 } else { self.chunks + 2 * self.depth - 1 }
    }

    fn lanes(&self) -> u32 {
        4 * self.chunks
    }

    fn len(&self, rank: Rank) -> u32 {
        if self.ranks == 1 { 1 } else { self.pipelines[rank.0 as usize].len() }
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        if self.ranks == 1 {
            return Op::copy_all(self.blocks());
        }
        let (stream, chunk, part) = self.pipelines[rank.0 as usize].item(index);
        if stream < 2 {
            self.up(rank, stream, chunk, part)
        } else {
            self.down(rank, stream - 2, chunk, part)
        }
    }
}
