//! Maps from dense ids to values: a slot for each id up to the largest, access in O(1).

use crate::types::RegionKey;
use std::marker::PhantomData;
use weft_control::Rank;

/// Values for peers, by rank.
pub(crate) type PeerMap<T> = IdMap<Rank, T>;

/// Values for regions, by key.
pub(crate) type RegionMap<T> = IdMap<RegionKey, T>;

/// An id that counts from zero without large gaps.
pub(crate) trait DenseId: Copy {
    fn index(self) -> usize;
    fn from_index(index: usize) -> Self;
}

impl DenseId for Rank {
    #[inline(always)]
    fn index(self) -> usize {
        self.0 as usize
    }

    fn from_index(index: usize) -> Rank {
        Rank(index as u32)
    }
}

impl DenseId for RegionKey {
    #[inline(always)]
    fn index(self) -> usize {
        self.0 as usize
    }

    fn from_index(index: usize) -> RegionKey {
        RegionKey(index as u32)
    }
}

/// A map from ids to values. An id that was never inserted has no value.
#[derive(Debug)]
pub(crate) struct IdMap<I, T> {
    slots: Vec<Option<T>>,
    ids: PhantomData<fn(I)>,
}

impl<I, T> Default for IdMap<I, T> {
    fn default() -> Self {
        IdMap { slots: Vec::new(), ids: PhantomData }
    }
}

impl<I: DenseId, T> IdMap<I, T> {
    /// True if no value was ever inserted.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Value for an id.
    #[inline(always)]
    pub fn get(&self, id: I) -> Option<&T> {
        self.slots.get(id.index()).and_then(Option::as_ref)
    }

    /// Value for an id, to change.
    #[inline(always)]
    pub fn get_mut(&mut self, id: I) -> Option<&mut T> {
        self.slots.get_mut(id.index()).and_then(Option::as_mut)
    }

    /// Sets the value for an id; allocates slots up to it. Callers bound external ids before.
    pub fn insert(&mut self, id: I, value: T) {
        let index = id.index();
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || None);
        }
        self.slots[index] = Some(value);
    }

    /// Removes the value for an id.
    pub fn remove(&mut self, id: I) -> Option<T> {
        self.slots.get_mut(id.index()).and_then(Option::take)
    }

    /// Ids with values, in order, to change.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (I, &mut T)> {
        let slots = self.slots.iter_mut().enumerate();
        slots.filter_map(|(index, slot)| Some((I::from_index(index), slot.as_mut()?)))
    }

    /// Values in id order.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten()
    }

    /// Values in id order, to change.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_between_and_beyond_have_no_value() {
        let mut map = PeerMap::default();
        map.insert(Rank(3), 'c');
        map.insert(Rank(1), 'a');
        assert_eq!(
            [0, 1, 2, 3, 4].map(|rank| map.get(Rank(rank)).copied()),
            [None, Some('a'), None, Some('c'), None]
        );
        assert_eq!(map.iter_mut().map(|(rank, _)| rank.0).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(
            (map.remove(Rank(3)), map.remove(Rank(3)), map.remove(Rank(9))),
            (Some('c'), None, None)
        );
        assert_eq!(map.values().copied().collect::<String>(), "a");
    }
}
