//! Registrations: user memory that all ranks in a communicator have mapped, by address.

use super::segments::{MemoryNumber, SymmetricPlace};
use crate::heap::Heap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// A communicator's registered memory, for all domains. Clones share the list.
#[derive(Clone, Debug, Default)]
pub struct Registrations(Arc<RwLock<Vec<Entry>>>);

#[derive(Debug)]
struct Entry {
    /// Only this rank's, for the removal.
    serial: u64,
    /// [`Heap::identity`].
    identity: u64,
    own: u64,
    bytes: u64,
    /// By rank.
    addresses: Vec<u64>,
}

/// Registration entry, removed on drop. The drop waits for calls that are being launched: see
/// [`Registrations::enter`].
#[derive(Debug)]
pub struct Registration {
    list: Registrations,
    serial: u64,
}

/// Registered memory while a call uses it on the host; see [`Registrations::enter`].
#[derive(Debug)]
pub struct RegisteredPlaces<'a>(RwLockReadGuard<'a, Vec<Entry>>);

impl Registrations {
    /// Adds memory from [`Heap::register`]. The mappings outlive the entry.
    pub fn add(&self, heap: &Heap) -> Registration {
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let serial = entries.last().map_or(0, |entry| entry.serial + 1);
        let (identity, own, bytes) = (heap.identity(), heap.own(), heap.bytes());
        let addresses = heap.addresses().to_vec();
        entries.push(Entry { serial, identity, own, bytes, addresses });
        drop(entries);
        Registration { list: self.clone(), serial }
    }

    /// Access to the list. No entry is removed meanwhile, so that a twin call finds its tensors mapped, and a launch
    /// precedes the end of the registration.
    pub fn enter(&self) -> RegisteredPlaces<'_> {
        RegisteredPlaces(self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl RegisteredPlaces<'_> {
    /// Symmetric place for `bytes` bytes that are at `address` on this rank, in the latest registration that has them
    /// all.
    pub fn place(&self, address: u64, bytes: u64) -> Option<SymmetricPlace> {
        let inside = |entry: &&Entry| {
            let at = address.wrapping_sub(entry.own);
            at < entry.bytes && bytes <= entry.bytes - at
        };
        let entry = self.0.iter().rev().find(inside)?;
        let offset = address - entry.own;
        let addresses = entry.addresses.iter().map(|base| base + offset).collect();
        Some(SymmetricPlace {
            memory: MemoryNumber::Registration(entry.identity),
            offset,
            addresses,
        })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut entries = self.list.0.write().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|entry| entry.serial != self.serial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::MemoryLocation;

    fn heaps(bytes: u64) -> Vec<Heap> {
        Heap::local_group(&[MemoryLocation::Twin; 2], bytes).unwrap()
    }

    #[test]
    fn places_are_offsets_in_a_registration_with_the_addresses_of_all_ranks() {
        let (list, heaps) = (Registrations::default(), heaps(4096));
        let registration = list.add(&heaps[1]);
        let place = list.enter().place(heaps[1].own() + 40, 8).unwrap();
        assert_eq!(place.memory, MemoryNumber::Registration(heaps[1].identity()));
        assert_eq!((place.offset, place.addresses[0]), (40, heaps[0].own() + 40));
        for (at, bytes) in [(4096, 0), (4090, 7), (0, u64::MAX), (u64::MAX, 1)] {
            assert_eq!(list.enter().place(heaps[1].own().wrapping_add(at), bytes), None);
        }
        drop(registration);
        assert_eq!(list.enter().place(heaps[1].own(), 8), None);
    }

    #[test]
    fn the_latest_of_overlapping_registrations_counts_until_it_ends() {
        let (list, heaps) = (Registrations::default(), heaps(4096));
        let first = list.add(&heaps[0]);
        let second = list.add(&heaps[0]);
        let third = list.add(&heaps[1]);
        drop(first);
        assert!(list.enter().place(heaps[0].own(), 8).is_some());
        drop(second);
        assert_eq!(list.enter().place(heaps[0].own(), 8), None);
        let again = list.add(&heaps[0]);
        drop(third);
        assert!(list.enter().place(heaps[0].own(), 8).is_some());
        drop(again);
    }
}
