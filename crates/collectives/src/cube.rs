//! Halving and doubling among members of a hypercube: what HD, HDRM and the rails of a hierarchy share.

use crate::op::{Op, Rank, Span};

/// All-reduce of `2^levels` blocks among `members`: recursive halving over the bits from the lowest, then
/// recursive doubling back. Members from `2^levels` on first give all they have to the member with the top bit
/// cleared, and get the result from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cube {
    members: u32,
    levels: u32,
    /// The contribution lies in the output already, not in the input.
    in_place: bool,
}

/// Where a member's operations take place.
pub(crate) struct Place {
    /// Member 0, and the distance to the next in ranks.
    pub(crate) first_rank: u32,
    pub(crate) stride: u32,
    /// The first of the blocks, in input and output.
    pub(crate) block: u32,
    /// The first slot of scratch.
    pub(crate) scratch: u32,
    /// The first step and lane.
    pub(crate) step: u32,
}

impl Place {
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

    /// The blocks, and the members that are not folded: the largest power of two.
    pub(crate) fn blocks(&self) -> u32 {
        1 << self.levels
    }

    fn folded(&self) -> bool {
        self.members > self.blocks()
    }

    pub(crate) fn steps(&self) -> u32 {
        2 * self.levels + 2 * u32::from(self.folded())
    }

    /// True when another member is folded onto `member`.
    fn has_guest(&self, member: u32) -> bool {
        member < self.members - self.blocks()
    }

    /// True when the output holds something before the first level.
    fn filled(&self, member: u32) -> bool {
        self.in_place || self.has_guest(member)
    }

    /// The slot where what arrives at `level` begins: each level has slots of its own, since nothing tells
    /// a peer that those of an earlier level are free.
    fn slot(&self, member: u32, level: u32) -> u32 {
        let blocks = self.blocks();
        let guest = if self.in_place && self.has_guest(member) { blocks } else { 0 };
        let first = if self.filled(member) { 0 } else { blocks / 2 };
        // At level 0, an output that is not filled takes what arrives.
        guest + (blocks - (blocks >> level)).saturating_sub(first)
    }

    pub(crate) fn scratch(&self, member: u32) -> u32 {
        if member < self.blocks() { self.slot(member, self.levels) } else { 0 }
    }

    /// The blocks that `member` keeps after `level` levels: the bits of its number, from the lowest, choose
    /// halves.
    fn kept(&self, member: u32, level: u32) -> (u32, u32) {
        let low = u64::from(member) & ((1 << level) - 1);
        let first = (low as u32).reverse_bits() as u64 >> (32 - self.levels);
        (first as u32, self.blocks() >> level)
    }

    pub(crate) fn len(&self, member: u32) -> u32 {
        if member >= self.blocks() {
            return 2;
        }
        let fold = if self.has_guest(member) { 3 } else { 0 };
        let alone = u32::from(self.members == 1 && !self.in_place);
        5 * self.levels + fold + alone
    }

    pub(crate) fn op(&self, member: u32, index: u32, place: &Place) -> Op {
        let (blocks, levels) = (self.blocks(), self.levels);
        let last = self.steps().saturating_sub(1);
        if self.members == 1 {
            return Op::Copy { source: place.input(0, 1), target: place.output(0, 1) };
        }
        if member >= blocks {
            return match index {
                0 if self.in_place => {
                    let host = member - blocks;
                    place.write(host, 0, place.output(0, blocks), place.scratch(0, blocks))
                }
                0 => {
                    let host = member - blocks;
                    place.write(host, 0, place.input(0, blocks), place.output(0, blocks))
                }
                _ => place.wait(member - blocks, last),
            };
        }
        let mut index = index;
        if self.has_guest(member) {
            let all = place.output(0, blocks);
            match index {
                0 => return place.wait(member + blocks, 0),
                1 if self.in_place => {
                    return Op::Reduce { source: place.scratch(0, blocks), target: all };
                }
                1 => return Op::Reduce { source: place.input(0, blocks), target: all },
                _ if index == 2 + 5 * levels => {
                    return place.write(member + blocks, last, all, all);
                }
                _ => index -= 2,
            }
        }
        let fold = u32::from(self.folded());
        if index < 3 * levels {
            self.halve(member, index / 3, index % 3, fold, place)
        } else {
            let index = index - 3 * levels;
            self.double(member, levels - 1 - index / 2, index % 2, fold, place)
        }
    }

    fn halve(&self, member: u32, level: u32, part: u32, fold: u32, place: &Place) -> Op {
        let peer = member ^ (1 << level);
        let arrival = |member: u32| {
            let (first, blocks) = self.kept(member, level + 1);
            if level == 0 && !self.filled(member) {
                place.output(first, blocks)
            } else {
                place.scratch(self.slot(member, level), blocks)
            }
        };
        // What the rank itself has of these blocks.
        let own = |first, blocks| {
            if level == 0 && !self.filled(member) {
                place.input(first, blocks)
            } else {
                place.output(first, blocks)
            }
        };
        match part {
            0 => {
                let (first, blocks) = self.kept(peer, level + 1);
                place.write(peer, fold + level, own(first, blocks), arrival(peer))
            }
            1 => place.wait(peer, fold + level),
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

    fn double(&self, member: u32, level: u32, part: u32, fold: u32, place: &Place) -> Op {
        let peer = member ^ (1 << level);
        let step = fold + 2 * self.levels - 1 - level;
        if part == 1 {
            return place.wait(peer, step);
        }
        let (first, blocks) = self.kept(member, level + 1);
        place.write(peer, step, place.output(first, blocks), place.output(first, blocks))
    }
}
