//! Halving and doubling among any number of members: shared by HD, HDRM and the rails in a hierarchy.

use crate::op::{Op, Rank, Span};

/// Odd core factors: with these the core has more than 4/5 of all members.
const ODD_PARTS: [u32; 4] = [1, 3, 5, 7];

/// All-reduce among `members`: halving over the digits in the member number, then doubling back.
///
/// The *core* is the largest `q 2^a` up to `members`, with `q` in 1, 3, 5, 7: for example 10 = 5 * 2 for 11 members. Core
/// members' digits are `a` bits from the lowest on, and one base-`q` digit above them. At a level with base `r` a
/// member sends a part of its remaining blocks to each of the `r - 1` members that differ in this digit.
///
/// Members beyond the core are *folded*: after two levels the vector is cut into 4 parts (10 or 14 where these levels
/// are all). A folded member sends each part to the core member that keeps it, its *proxy*, while the core exchanges
/// the first two levels, and receives the sums while the core doubles the last two. The core has proxies for all: each
/// serves one folded member.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cube {
    members: u32,
    /// Bit count, `a`.
    bits: u32,
    /// Top digit base, `q`; 1 without one.
    odd: u32,
    /// True if the contribution is in the output instead of the input.
    in_place: bool,
}

/// Mapping from members, blocks, slots and steps to the schedule's.
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
        let core = |odd: u32| (odd, (members / odd).ilog2());
        let fitting = ODD_PARTS.into_iter().filter(|&odd| odd <= members).map(core);
        let (odd, bits) = fitting.max_by_key(|(odd, bits)| odd << bits).unwrap_or((1, 0));
        Cube { members, bits, odd, in_place }
    }

    /// Block count, and core member count.
    pub(crate) fn blocks(&self) -> u32 {
        self.odd << self.bits
    }

    pub(crate) fn levels(&self) -> u32 {
        self.bits + u32::from(self.odd > 1)
    }

    pub(crate) fn steps(&self) -> u32 {
        2 * self.levels()
    }

    /// Digit base at a level.
    fn base(&self, level: u32) -> u32 {
        if level < self.bits { 2 } else { self.odd }
    }

    /// Number of blocks that a member keeps after `level` levels.
    fn kept_blocks(&self, level: u32) -> u32 {
        if level > self.bits { 1 } else { self.odd << (self.bits - level) }
    }

    /// Blocks that `member` keeps after `level` levels, as first and count: the digits, from the lowest, select parts.
    fn kept(&self, member: u32, level: u32) -> (u32, u32) {
        let low = u64::from(member) & ((1 << level.min(self.bits)) - 1);
        let first = self.odd * (u64::from((low as u32).reverse_bits()) >> (32 - self.bits)) as u32;
        let top = if level > self.bits { member >> self.bits } else { 0 };
        (first + top, self.kept_blocks(level))
    }

    /// The `number`th peer at a level, from 0: its digit is `number + 1` above the member's, modulo the base.
    fn peer(&self, member: u32, level: u32, number: u32) -> u32 {
        if level < self.bits {
            return member ^ (1 << level);
        }
        let low = member & ((1 << self.bits) - 1);
        low | ((((member >> self.bits) + number + 1) % self.odd) << self.bits)
    }

    /// The member's number at its `number`th peer.
    fn number_at_peer(&self, level: u32, number: u32) -> u32 {
        self.base(level) - 2 - number
    }

    /// First slot for arrivals from a peer. Each has its own slots, since peers are not notified when earlier ones are
    /// free. At level 0, an unfilled output receives the first peer's arrivals.
    fn slot(&self, level: u32, number: u32) -> u32 {
        let in_output = if self.in_place { 0 } else { self.kept_blocks(1) };
        let before = self.blocks() - self.kept_blocks(level);
        before + number * self.kept_blocks(level + 1) - in_output
    }

    /// First slot for a folded member's part.
    fn fold_slot(&self) -> u32 {
        if self.levels() == 0 { 0 } else { self.slot(self.levels(), 0) }
    }

    pub(crate) fn scratch(&self, member: u32) -> u32 {
        match self.folded_at(member) {
            _ if member >= self.blocks() => 0,
            Some(_) => self.fold_slot() + self.kept_blocks(2),
            None => self.fold_slot(),
        }
    }

    /// Part count for a folded member's vector: the core has at least 8 members, so two levels.
    fn parts(&self) -> u32 {
        self.base(0) * self.base(1)
    }

    /// The folded member for which a core member is the proxy.
    fn folded_at(&self, member: u32) -> Option<u32> {
        let folded = self.members - self.blocks();
        if folded == 0 || member >= self.blocks() {
            return None;
        }
        let number = member / self.parts();
        (number < folded).then_some(self.blocks() + number)
    }

    /// Proxy for a folded member's part.
    fn proxy(&self, folded: u32, part: u32) -> u32 {
        let low = if self.bits > 1 {
            (part >> 1) | ((part & 1) << 1)
        } else {
            (part / self.odd) | ((part % self.odd) << 1)
        };
        low + (folded - self.blocks()) * self.parts()
    }

    /// Part that a folded member sends at a position, from 0 to the part count: half belong to the first step, as the
    /// core's own exchange does.
    fn part_at(&self, folded: u32, position: u32) -> u32 {
        (position + folded) % self.parts()
    }

    /// Level during which a part is sent, and during which the sum returns.
    fn fold_level(&self, folded: u32, part: u32) -> u32 {
        let parts = self.parts();
        let position = (part + parts - folded % parts) % parts;
        u32::from(position >= parts / 2)
    }

    /// Peer count over all levels.
    fn exchanges(&self) -> u32 {
        self.bits + self.odd - 1
    }

    pub(crate) fn len(&self, member: u32) -> u32 {
        if member >= self.blocks() {
            return 2 * self.parts();
        }
        let fold = if self.folded_at(member).is_some() { 3 } else { 0 };
        let alone = u32::from(self.members == 1 && !self.in_place);
        5 * self.exchanges() + fold + alone
    }

    pub(crate) fn op(&self, member: u32, index: u32, layout: &CubeLayout) -> Op {
        if self.members == 1 {
            return Op::Copy { source: layout.input(0, 1), target: layout.output(0, 1) };
        }
        if member >= self.blocks() {
            return self.folded_op(member, index, layout);
        }
        let mut index = index;
        let folded = self.folded_at(member);
        for level in 0..self.levels() {
            let peers = self.base(level) - 1;
            if index < 3 * peers {
                return self.halve(member, level, index, layout);
            }
            index -= 3 * peers;
            if let Some(folded) = folded.filter(|_| level == 1) {
                if index < 2 {
                    return self.add_folded(member, folded, index, layout);
                }
                index -= 2;
            }
        }
        for level in (0..self.levels()).rev() {
            let peers = self.base(level) - 1;
            let returns = folded.filter(|&folded| {
                let part = self.kept(member, 2).0 / self.kept_blocks(2);
                self.fold_level(folded, part) == level
            });
            let len = 2 * peers + u32::from(returns.is_some());
            if index < len {
                return self.double(member, level, index, returns, layout);
            }
            index -= len;
        }
        unreachable!("the index is below the number of operations")
    }

    /// Operations for a folded member: writes for all parts, then waits for the sums in the order in which they return.
    fn folded_op(&self, member: u32, index: u32, layout: &CubeLayout) -> Op {
        let parts = self.parts();
        if index >= parts {
            let part = self.part_at(member, 2 * parts - 1 - index);
            let step = self.steps() - 1 - self.fold_level(member, part);
            return layout.wait(self.proxy(member, part), step);
        }
        let part = self.part_at(member, index);
        let blocks = self.kept_blocks(2);
        let source = if self.in_place {
            layout.output(part * blocks, blocks)
        } else {
            layout.input(part * blocks, blocks)
        };
        let target = layout.scratch(self.fold_slot(), blocks);
        layout.write(self.proxy(member, part), self.fold_level(member, part), source, target)
    }

    /// Waits for a folded member's part, and adds it.
    fn add_folded(&self, member: u32, folded: u32, index: u32, layout: &CubeLayout) -> Op {
        let (first, blocks) = self.kept(member, 2);
        if index == 0 {
            return layout.wait(folded, self.fold_level(folded, first / blocks));
        }
        let source = layout.scratch(self.fold_slot(), blocks);
        Op::Reduce { source, target: layout.output(first, blocks) }
    }

    /// A halving level: writes to all peers, then a wait and an addition for each.
    fn halve(&self, member: u32, level: u32, index: u32, layout: &CubeLayout) -> Op {
        let peers = self.base(level) - 1;
        let unfilled = level == 0 && !self.in_place;
        // The rank's own contribution to these blocks.
        let own = |(first, blocks)| {
            if unfilled { layout.input(first, blocks) } else { layout.output(first, blocks) }
        };
        let arrival = |member: u32, number: u32| {
            let (first, blocks) = self.kept(member, level + 1);
            if unfilled && number == 0 {
                layout.output(first, blocks)
            } else {
                layout.scratch(self.slot(level, number), blocks)
            }
        };
        if index < peers {
            let peer = self.peer(member, level, index);
            let source = own(self.kept(peer, level + 1));
            let target = arrival(peer, self.number_at_peer(level, index));
            return layout.write(peer, level, source, target);
        }
        let number = (index - peers) / 2;
        if (index - peers).is_multiple_of(2) {
            return layout.wait(self.peer(member, level, number), level);
        }
        let (first, blocks) = self.kept(member, level + 1);
        if unfilled && number == 0 {
            Op::Reduce { source: own((first, blocks)), target: arrival(member, 0) }
        } else {
            Op::Reduce { source: arrival(member, number), target: layout.output(first, blocks) }
        }
    }

    /// A doubling level: writes to all peers and to a folded member, then a wait for each peer.
    fn double(
        &self,
        member: u32,
        level: u32,
        index: u32,
        folded: Option<u32>,
        layout: &CubeLayout,
    ) -> Op {
        let peers = self.base(level) - 1;
        let step = self.steps() - 1 - level;
        if index < peers {
            let (first, blocks) = self.kept(member, level + 1);
            let sums = layout.output(first, blocks);
            return layout.write(self.peer(member, level, index), step, sums, sums);
        }
        let index = index - peers;
        match folded {
            Some(folded) if index == 0 => {
                let (first, blocks) = self.kept(member, 2);
                let sums = layout.output(first, blocks);
                layout.write(folded, step, sums, sums)
            }
            _ => {
                let number = index - u32::from(folded.is_some());
                layout.wait(self.peer(member, level, number), step)
            }
        }
    }
}
