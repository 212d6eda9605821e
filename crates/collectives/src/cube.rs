//! Halving and doubling among the members of a hypercube: shared by HD, HDRM and the rails of a hierarchy.

use crate::op::{Op, Rank, Span};

/// All-reduce of `2^levels` blocks among `members`: recursive halving over the bits from the lowest, then
/// recursive doubling back. Members from `2^levels` on are folded: they send their vector to the member with the
/// top bit cleared, their proxy, and receive the result from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cube {
    members: u32,
    levels: u32,
    /// True if the contribution is in the output instead of the input.
    in_place: bool,
}

/// Mapping of members, blocks, slots and steps to those of the schedule.
pub(crate) struct CubeLayout {
    /// Rank of member 0; `stride` is the distance to the next member in ranks.
    pub(crate) first_rank: u32,
    pub(crate) stride: u32,
    /// First block in input and output.
    pub(crate) block: u32,
    /// First scratch slot.
    pub(crate) scratch: u32,
    /// First step and lane.
    pub(crate) step: u32,
}

impl CubeLayout {
    fn rank(&self, member: u32) -> Rank {
        Rank(self.first_rank + member * self.stride)
    }

    fn input(&self, first: u32, blocks: u32) -> Span {
        Span::input(self.block + first, blocks)
    }

    fn output(&self, first: u32, blocks: u32) -> Span {
        Span::output(self.block + first, blocks)
    }

    fn scratch(&self, first: u32, blocks: u32) -> Span {
        Span::scratch(self.scratch + first, blocks)
    }

    fn write(&self, to: u32, step: u32, source: Span, target: Span) -> Op {
        let step = self.step + step;
        Op::Write { to: self.rank(to), source, target, lane: step, step }
    }

    fn wait(&self, from: u32, step: u32) -> Op {
        Op::Wait { from: self.rank(from), lane: self.step + step, count: 1 }
    }
}

impl Cube {
    pub(crate) fn new(members: u32, in_place: bool) -> Cube {
        Cube { members, levels: members.ilog2(), in_place }
    }

    /// Number of blocks and of unfolded members: the largest power of two up to `members`.
    pub(crate) fn blocks(&self) -> u32 {
        1 << self.levels
    }

    fn folded(&self) -> bool {
        self.members > self.blocks()
    }

    pub(crate) fn steps(&self) -> u32 {
        2 * self.levels + 2 * u32::from(self.folded())
    }

    /// True if another member is folded onto `member`.
    fn is_proxy(&self, member: u32) -> bool {
        member < self.members - self.blocks()
    }

    /// True if the output holds data before the first level.
    fn filled(&self, member: u32) -> bool {
        self.in_place || self.is_proxy(member)
    }

    /// First slot of the arrivals of `level`. Each level has its own slots, since peers are not notified when
    /// those of an earlier level are free.
    fn slot(&self, member: u32, level: u32) -> u32 {
        let blocks = self.blocks();
        let folded = if self.in_place && self.is_proxy(member) { blocks } else { 0 };
        let first = if self.filled(member) { 0 } else { blocks / 2 };
        // At level 0, an unfilled output receives the arrivals.
        folded + (blocks - (blocks >> level)).saturating_sub(first)
    }

    pub(crate) fn scratch(&self, member: u32) -> u32 {
        if member < self.blocks() { self.slot(member, self.levels) } else { 0 }
    }

    /// Blocks that `member` keeps after `level` levels, as first and count: the bits of its number, from the
    /// lowest, select halves.
    fn kept(&self, member: u32, level: u32) -> (u32, u32) {
        let low = u64::from(member) & ((1 << level) - 1);
        let first = (low as u32).reverse_bits() as u64 >> (32 - self.levels);
        (first as u32, self.blocks() >> level)
    }

    pub(crate) fn len(&self, member: u32) -> u32 {
        if member >= self.blocks() {
            return 2;
        }
        let fold = if self.is_proxy(member) { 3 } else { 0 };
        let alone = u32::from(self.members == 1 && !self.in_place);
        5 * self.levels + fold + alone
    }

    pub(crate) fn op(&self, member: u32, index: u32, layout: &CubeLayout) -> Op {
        let (blocks, levels) = (self.blocks(), self.levels);
        let last = self.steps().saturating_sub(1);
        if self.members == 1 {
            return Op::Copy { source: layout.input(0, 1), target: layout.output(0, 1) };
        }
        if member >= blocks {
            return match index {
                0 if self.in_place => {
                    let proxy = member - blocks;
                    layout.write(proxy, 0, layout.output(0, blocks), layout.scratch(0, blocks))
                }
                0 => {
                    let proxy = member - blocks;
                    layout.write(proxy, 0, layout.input(0, blocks), layout.output(0, blocks))
                }
                _ => layout.wait(member - blocks, last),
            };
        }
        let mut index = index;
        if self.is_proxy(member) {
            let all = layout.output(0, blocks);
            match index {
                0 => return layout.wait(member + blocks, 0),
                1 if self.in_place => {
                    return Op::Reduce { source: layout.scratch(0, blocks), target: all };
                }
                1 => return Op::Reduce { source: layout.input(0, blocks), target: all },
                _ if index == 2 + 5 * levels => {
                    return layout.write(member + blocks, last, all, all);
                }
                _ => index -= 2,
            }
        }
        let fold = u32::from(self.folded());
        if index < 3 * levels {
            self.halve(member, index / 3, index % 3, fold, layout)
        } else {
            let index = index - 3 * levels;
            self.double(member, levels - 1 - index / 2, index % 2, fold, layout)
        }
    }

    fn halve(&self, member: u32, level: u32, part: u32, fold: u32, layout: &CubeLayout) -> Op {
        let peer = member ^ (1 << level);
        let arrival = |member: u32| {
            let (first, blocks) = self.kept(member, level + 1);
            if level == 0 && !self.filled(member) {
                layout.output(first, blocks)
            } else {
                layout.scratch(self.slot(member, level), blocks)
            }
        };
        // The rank's own contribution to these blocks.
        let own = |first, blocks| {
            if level == 0 && !self.filled(member) {
                layout.input(first, blocks)
            } else {
                layout.output(first, blocks)
            }
        };
        match part {
            0 => {
                let (first, blocks) = self.kept(peer, level + 1);
                layout.write(peer, fold + level, own(first, blocks), arrival(peer))
            }
            1 => layout.wait(peer, fold + level),
            _ => {
                let (first, blocks) = self.kept(member, level + 1);
                if level == 0 && !self.filled(member) {
                    Op::Reduce { source: own(first, blocks), target: arrival(member) }
                } else {
                    Op::Reduce { source: arrival(member), target: own(first, blocks) }
                }
            }
        }
    }

    fn double(&self, member: u32, level: u32, part: u32, fold: u32, layout: &CubeLayout) -> Op {
        let peer = member ^ (1 << level);
        let step = fold + 2 * self.levels - 1 - level;
        if part == 1 {
            return layout.wait(peer, step);
        }
        let (first, blocks) = self.kept(member, level + 1);
        layout.write(peer, step, layout.output(first, blocks), layout.output(first, blocks))
    }
}
