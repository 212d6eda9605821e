//! Double binary tree: the shape of two trees over the same ranks.
//!
//! Source: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
//! Computing 2009: two trees, each for one vector half; the leaves in one are the inner nodes in the other, so that
//! every rank sends as much as it receives. The shape is the in-order tree in which the lowest set bit in a position is
//! the node height; the second tree is the first one mirrored, or shifted by one for an odd rank count.

/// A rank's neighbours in one tree.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Node {
    pub(crate) parent: Option<u32>,
    /// The second is `Some` only if the first is.
    pub(crate) children: [Option<u32>; 2],
    pub(crate) depth: u32,
}

/// Node at a position in the in-order tree of `count` positions; position 0 is the root, with one child.
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

/// Nodes for `rank` in both trees over `count` ranks.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_trees_and_no_rank_is_an_inner_node_of_both() {
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
