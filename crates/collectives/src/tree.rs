//! Double binary trees, pipelined in chunks.
//!
//! Source: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
//! Parallel Computing 2009: two trees of which one has as leaves what the other has inside, each for half of
//! the vector, so that every rank sends as much as it receives. The shape is the in-order tree in which the
//! lowest set bit of a position is its height; the second tree is the first one mirrored, or shifted by one
//! for an odd number of ranks.

use crate::op::{Collective, Op, Rank, Span};
use crate::pipeline::Pipeline;
use crate::ring::copy_all;
use crate::schedule::Schedule;

/// A rank's neighbours in one tree.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Node {
    pub(crate) parent: Option<u32>,
    /// The second one only if there is a first.
    pub(crate) children: [Option<u32>; 2],
    pub(crate) depth: u32,
}

/// The node of a position in the in-order tree of `count` positions; position 0 is the root, with one child.
fn node(position: u32, count: u32) -> Node {
    let parent = parent(position, count);
    let mut children = [None, None];
    if position == 0 {
        children[0] = (count > 1).then(|| 1 << (count - 1).ilog2());
    } else {
        let mut step = (1 << position.trailing_zeros()) >> 1;
        if step > 0 {
            children[0] = Some(position - step);
            while step > 0 && position + step >= count {
                step >>= 1;
            }
            children[1] = (step > 0).then(|| position + step);
        }
    }
    let depth = std::iter::successors(parent, |&up| self::parent(up, count)).count() as u32;
    Node { parent, children, depth }
}

fn parent(position: u32, count: u32) -> Option<u32> {
    if position == 0 {
        return None;
    }
    let low = 1 << position.trailing_zeros();
    let up = (position ^ low) | (low << 1);
    Some(if up < count { up } else { position ^ low })
}

/// The nodes of `rank` in both trees of `count` ranks.
pub(crate) fn nodes(rank: u32, count: u32) -> [Node; 2] {
    let second = |position: u32| {
        if count.is_multiple_of(2) { count - 1 - position } else { (position + 1) % count }
    };
    let position =
        if count.is_multiple_of(2) { count - 1 - rank } else { (rank + count - 1) % count };
    let mirrored = node(position, count);
    let mirrored = Node {
        parent: mirrored.parent.map(second),
        children: mirrored.children.map(|child| child.map(second)),
        depth: mirrored.depth,
    };
    [node(rank, count), mirrored]
}

/// All-reduce by a double binary tree: chunk by chunk up to the roots and down again, the two ways overlapped.
///
/// With `C` chunks of each half and trees of depth `D = ceil(log2 N)`, the vector has `2C` blocks. A rank receives
/// from two children in one tree, from its parents in both, and sends as much, so the cost, with the letters of
/// [`ring`](crate::ring), is `(C + 2D - 1) a + ng` and at most `(C + 2D - 1) 2n/C b`, less where the pipeline fills
/// and empties. The best `C` grows with the root of `n`. Each chunk leaves after the one before has left (a drain),
/// so that they do not share the link.
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

    /// Where a child's sum of a chunk arrives: the first one's where it belongs, the second one's in a slot.
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
            return copy_all(self.blocks());
        }
        let (stream, chunk, part) = self.pipelines[rank.0 as usize].item(index);
        if stream < 2 {
            self.up(rank, stream, chunk, part)
        } else {
            self.down(rank, stream - 2, chunk, part)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_trees_and_hardly_anybody_is_inside_both() {
        for count in 1..=300 {
            let all: Vec<_> = (0..count).map(|rank| nodes(rank, count)).collect();
            for tree in [0, 1] {
                let mut roots = 0;
                for rank in 0..count {
                    let node = &all[rank as usize][tree];
                    roots += u32::from(node.parent.is_none());
                    assert!(node.depth <= count.ilog2() + 1, "{rank} of {count}");
                    assert!(node.children[0].is_some() || node.children[1].is_none());
                    for child in node.children.iter().flatten() {
                        assert_eq!(all[*child as usize][tree].parent, Some(rank));
                        assert_eq!(all[*child as usize][tree].depth, node.depth + 1);
                    }
                    if let Some(parent) = node.parent {
                        assert!(all[parent as usize][tree].children.contains(&Some(rank)));
                    }
                }
                assert_eq!(roots, 1);
            }
            let inside = |nodes: &&[Node; 2]| nodes.iter().all(|node| node.children[1].is_some());
            assert_eq!(all.iter().filter(inside).count(), 0, "{count}");
        }
    }

    #[test]
    fn eight_ranks() {
        let parents = |tree: usize| (0..8).map(|r| nodes(r, 8)[tree].parent).collect::<Vec<_>>();
        assert_eq!(
            parents(0),
            [None, Some(2), Some(4), Some(2), Some(0), Some(6), Some(4), Some(6)]
        );
        assert_eq!(
            parents(1),
            [Some(1), Some(3), Some(1), Some(7), Some(5), Some(3), Some(5), None]
        );
    }
}
