//! Schedule executor on integers with an adversarial random order: ranks advance, and writes are read and arrive,
//! element by element, some ranks and writes far slower than others.

use super::Random;
use weft_collectives::schedule::block_start;
use weft_collectives::{Buffer, Collective, Op, Rank, Schedule, Span};

/// Write in flight: for each element the source, the target, and the value once read.
struct Flight {
    from: usize,
    to: usize,
    lane: u32,
    elements: Vec<(Cell, Cell, Option<i64>)>,
    reluctance: u32,
}

/// Element: buffer and index.
type Cell = (usize, usize);

pub struct Executor<'a, S> {
    schedule: &'a S,
    units: u64,
    random: Random,
    /// The three buffers on each rank.
    memory: Vec<[Vec<i64>; 3]>,
    expected: Vec<Vec<i64>>,
    next: Vec<u32>,
    /// Remaining elements in each rank's current copy or addition.
    doing: Vec<Vec<(Cell, Cell)>>,
    adding: Vec<bool>,
    lanes: Vec<Vec<u32>>,
    flights: Vec<Flight>,
    reluctance: Vec<u32>,
    done: Vec<bool>,
}

impl<'a, S: Schedule> Executor<'a, S> {
    /// Inputs, poison and event order come from `seed`; the vector has `units` elements.
    pub fn new(schedule: &'a S, units: u64, seed: u64) -> Executor<'a, S> {
        let mut random = Random::new(seed);
        let ranks = schedule.ranks();
        let blocks = schedule.blocks();
        let slot = units.div_ceil(u64::from(blocks)) as usize;
        let mut memory: Vec<[Vec<i64>; 3]> = Vec::new();
        for rank in (0..ranks).map(Rank) {
            let mut fill = |length| (0..length).map(|_| random.next() as i64 >> 8).collect();
            let packed = |buffer| {
                let first = schedule.first_block(rank, buffer);
                let end = first + schedule.buffer_blocks(rank, buffer);
                (block_start(units, blocks, end) - block_start(units, blocks, first)) as usize
            };
            memory.push([
                fill(packed(Buffer::Input)),
                fill(packed(Buffer::Output)),
                fill(slot * schedule.scratch_blocks(rank) as usize),
            ]);
        }
        let expected = expected(schedule, units, &memory);
        let ranks = ranks as usize;
        let slow = |random: &mut Random| random.choose(&[1, 1, 4, 64]);
        let reluctance = (0..ranks).map(|_| slow(&mut random)).collect();
        Executor {
            schedule,
            units,
            memory,
            expected,
            next: vec![0; ranks],
            doing: vec![Vec::new(); ranks],
            adding: vec![false; ranks],
            lanes: vec![vec![0; ranks * schedule.lanes() as usize]; ranks],
            flights: Vec::new(),
            reluctance,
            done: vec![false; ranks],
            random,
        }
    }

    /// Runs to the end. The error describes the failure.
    pub fn run(mut self) -> Result<(), String> {
        loop {
            let mut able: Vec<usize> = (0..self.next.len()).filter(|&r| self.able(r)).collect();
            let ranks = able.len();
            able.extend(0..self.flights.len());
            if able.is_empty() {
                break;
            }
            let chosen = loop {
                let i = self.random.below(able.len() as u32) as usize;
                let reluctance = if i < ranks {
                    self.reluctance[able[i]]
                } else {
                    self.flights[able[i]].reluctance
                };
                if able.len() == 1 || self.random.below(reluctance) == 0 {
                    break i;
                }
            };
            if chosen < ranks {
                self.advance(able[chosen])?;
            } else {
                self.fly(able[chosen])?;
            }
        }
        match self.done.iter().position(|done| !done) {
            Some(rank) => Err(format!("rank {rank} is stuck at operation {}", self.next[rank])),
            None => Ok(()),
        }
    }

    fn unread(&self, from: usize, to: Option<usize>) -> bool {
        self.flights.iter().any(|flight| {
            flight.from == from
                && to.is_none_or(|to| flight.to == to)
                && flight.elements.iter().any(|element| element.2.is_none())
        })
    }

    fn able(&self, rank: usize) -> bool {
        if self.done[rank] {
            return false;
        }
        if !self.doing[rank].is_empty() {
            return true;
        }
        if self.next[rank] == self.schedule.len(Rank(rank as u32)) {
            return !self.unread(rank, None);
        }
        match self.schedule.op(Rank(rank as u32), self.next[rank]) {
            Op::Wait { from, lane, count } => {
                let lane = from.0 * self.schedule.lanes() + lane;
                self.lanes[rank].get(lane as usize).is_some_and(|&risen| risen >= count)
            }
            Op::Drain { to } => !self.unread(rank, Some(to.0 as usize)),
            _ => true,
        }
    }

    fn advance(&mut self, rank: usize) -> Result<(), String> {
        if !self.doing[rank].is_empty() {
            let i = self.random.below(self.doing[rank].len() as u32) as usize;
            let (source, target) = self.doing[rank].swap_remove(i);
            let value = self.memory[rank][source.0][source.1];
            let target = &mut self.memory[rank][target.0][target.1];
            *target = if self.adding[rank] { target.wrapping_add(value) } else { value };
            return Ok(());
        }
        let me = Rank(rank as u32);
        if self.next[rank] == self.schedule.len(me) {
            self.done[rank] = true;
            if self.memory[rank][1] != self.expected[rank] {
                return Err(format!("rank {rank} has a wrong output"));
            }
            return Ok(());
        }
        let op = self.schedule.op(me, self.next[rank]);
        self.next[rank] += 1;
        match op {
            Op::Write { to, source, target, lane, .. } => {
                if to.0 >= self.schedule.ranks() || lane >= self.schedule.lanes() || to == me {
                    return Err("no such peer or lane".to_owned());
                }
                let elements = self.pairs(me, source, to, target)?;
                self.flights.push(Flight {
                    from: rank,
                    to: to.0 as usize,
                    lane: me.0 * self.schedule.lanes() + lane,
                    elements: elements.into_iter().map(|(a, b)| (a, b, None)).collect(),
                    reluctance: self.random.choose(&[1, 1, 4, 64, 256]),
                });
                if self.random.below(4) == 0 {
                    let last = self.flights.len() - 1;
                    self.fly(last)?;
                }
            }
            Op::Reduce { source, target } | Op::Copy { source, target } => {
                self.doing[rank] = self.pairs(me, source, me, target)?;
                self.adding[rank] = matches!(op, Op::Reduce { .. });
            }
            Op::Wait { .. } | Op::Drain { .. } => {}
        }
        Ok(())
    }

    /// Reads or delivers some elements in a write.
    fn fly(&mut self, index: usize) -> Result<(), String> {
        let flight = &mut self.flights[index];
        let count = flight.elements.len();
        for _ in 0..1 + self.random.below(2 * count as u32 + 1) {
            if flight.elements.is_empty() {
                break;
            }
            let i = self.random.below(flight.elements.len() as u32) as usize;
            let (source, target, value) = flight.elements[i];
            match value {
                None => {
                    let value = self.memory[flight.from][source.0][source.1];
                    flight.elements[i].2 = Some(value);
                }
                Some(value) => {
                    if self.done[flight.to] {
                        return Err(format!("rank {} was written to when it was done", flight.to));
                    }
                    self.memory[flight.to][target.0][target.1] = value;
                    flight.elements.swap_remove(i);
                }
            }
        }
        if flight.elements.is_empty() {
            self.lanes[flight.to][flight.lane as usize] += 1;
            self.flights.swap_remove(index);
        }
        Ok(())
    }

    /// Source and target element pairs.
    fn pairs(
        &self,
        from: Rank,
        source: Span,
        to: Rank,
        target: Span,
    ) -> Result<Vec<(Cell, Cell)>, String> {
        if source.blocks != target.blocks || target.buffer == Buffer::Input || source.blocks == 0 {
            return Err("bad spans".to_owned());
        }
        let mut pairs = Vec::new();
        for i in 0..source.blocks {
            let (a, length) = self.cells(from, source, i)?;
            let (b, room) = self.cells(to, target, i)?;
            for j in 0..length.min(room) {
                let cell = |span: Span, first| (span.buffer as usize, first + j);
                pairs.push((cell(source, a), cell(target, b)));
            }
        }
        Ok(pairs)
    }

    fn cells(&self, rank: Rank, span: Span, i: u32) -> Result<(usize, usize), String> {
        let index = span.first.checked_add(i).ok_or("span too far")?;
        if index >= self.schedule.buffer_blocks(rank, span.buffer) {
            return Err("span outside its buffer".to_owned());
        }
        let blocks = self.schedule.blocks();
        if span.buffer == Buffer::Scratch {
            let slot = self.units.div_ceil(u64::from(blocks)) as usize;
            return Ok((index as usize * slot, slot));
        }
        let first = self.schedule.first_block(rank, span.buffer);
        let start = |block| block_start(self.units, blocks, block) as usize;
        let begin = start(first + index);
        Ok((begin - start(first), start(first + index + 1) - begin))
    }
}

fn expected(schedule: &impl Schedule, units: u64, memory: &[[Vec<i64>; 3]]) -> Vec<Vec<i64>> {
    let (ranks, blocks) = (schedule.ranks(), schedule.blocks());
    let sum = || {
        memory[1..].iter().fold(memory[0][0].clone(), |mut sum, buffers| {
            sum.iter_mut().zip(&buffers[0]).for_each(|(a, b)| *a = a.wrapping_add(*b));
            sum
        })
    };
    let start = |block| block_start(units, blocks, block) as usize;
    let share = blocks / ranks;
    (0..ranks)
        .map(|rank| match schedule.collective() {
            Collective::AllReduce => sum(),
            Collective::ReduceScatter => {
                sum()[start(rank * share)..start((rank + 1) * share)].to_vec()
            }
            Collective::AllGather => memory.iter().flat_map(|m| m[0].clone()).collect(),
            Collective::Broadcast { root } => memory[root.0 as usize][0].clone(),
            Collective::AllToAll => memory
                .iter()
                .flat_map(|m| m[0][start(rank * share)..start((rank + 1) * share)].to_vec())
                .collect(),
        })
        .collect()
}
