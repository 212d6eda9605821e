//! Interned rank sets: the contributors to a block.

use std::collections::HashMap;

/// Interned rank sets, by number. The set with only rank `r` has number `r`.
pub(super) struct RankSets {
    /// Sets as runs with consecutive ranks, `first..end`; few in all known algorithms.
    runs: Vec<Box<[(u32, u32)]>>,
    numbers: HashMap<Box<[(u32, u32)]>, u32>,
    sums: HashMap<(u32, u32), u32>,
}

impl RankSets {
    pub(super) fn new(ranks: u32) -> RankSets {
        let runs: Vec<Box<[_]>> = (0..ranks).map(|rank| [(rank, rank + 1)].into()).collect();
        let numbers = runs.iter().cloned().zip(0..).collect();
        RankSets { runs, numbers, sums: HashMap::new() }
    }

    /// Union of two disjoint sets; the error is a common rank.
    pub(super) fn sum(&mut self, a: u32, b: u32) -> Result<u32, u32> {
        let key = (a.min(b), a.max(b));
        if let Some(&sum) = self.sums.get(&key) {
            return Ok(sum);
        }
        let merged = merge(&self.runs[a as usize], &self.runs[b as usize])?;
        let next = self.runs.len() as u32;
        let number = *self.numbers.entry(merged.clone()).or_insert(next);
        if number == next {
            self.runs.push(merged);
        }
        self.sums.insert(key, number);
        Ok(number)
    }

    /// Some rank below `ranks` outside the set.
    pub(super) fn lacks(&self, set: u32, ranks: u32) -> Option<u32> {
        let missing = match self.runs[set as usize][0] {
            (0, end) => end,
            _ => 0,
        };
        (missing < ranks).then_some(missing)
    }

    /// Lowest rank in the set.
    pub(super) fn lowest(&self, set: u32) -> u32 {
        self.runs[set as usize][0].0
    }
}

fn merge(a: &[(u32, u32)], b: &[(u32, u32)]) -> Result<Box<[(u32, u32)]>, u32> {
    let mut all: Vec<_> = a.iter().chain(b).copied().collect();
    all.sort_unstable();
    let mut merged: Vec<(u32, u32)> = Vec::with_capacity(all.len());
    for (first, end) in all {
        match merged.last_mut() {
            Some(last) if first < last.1 => return Err(first),
            Some(last) if first == last.1 => last.1 = end,
            _ => merged.push((first, end)),
        }
    }
    Ok(merged.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_one_number_however_it_was_built() {
        let mut sets = RankSets::new(4);
        let (low, high) = (sets.sum(0, 1).unwrap(), sets.sum(2, 3).unwrap());
        let odd = sets.sum(1, 3).unwrap();
        let even = sets.sum(2, 0).unwrap();
        let all = sets.sum(low, high).unwrap();
        assert_eq!(sets.sum(odd, even), Ok(all));
        assert_eq!(sets.sum(odd, low), Err(1));
        assert_eq!(sets.lacks(all, 4), None);
        assert_eq!(sets.lacks(odd, 4), Some(0));
        assert_eq!(sets.lacks(low, 4), Some(2));
        assert_eq!(sets.lowest(odd), 1);
    }
}
