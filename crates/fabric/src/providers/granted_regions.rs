//! Granted regions: a peer's regions that this engine may write to, by NIC addresses and keys.

use crate::bytes::Reader;
use crate::types::RegionKey;

/// Maximum NICs in a host.
pub const MAX_NICS: usize = 64;

/// Peer memory, as addressed through one of the owner's NICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// Address of the region's first byte, or zero for addressing by offset.
    pub base: u64,
    pub key: u64,
}

/// Appends a target list.
pub fn put_targets(bytes: &mut Vec<u8>, targets: &[RemoteMemory]) {
    bytes.extend((targets.len() as u32).to_le_bytes());
    for target in targets {
        bytes.extend(target.base.to_le_bytes());
        bytes.extend(target.key.to_le_bytes());
    }
}

/// Reads a target list; `None` if it is malformed or empty.
pub fn take_targets(reader: &mut Reader<'_>) -> Option<Vec<RemoteMemory>> {
    let count = reader.u32()? as usize;
    let targets = (1..=MAX_NICS).contains(&count).then_some(0..count)?;
    targets.map(|_| Some(RemoteMemory { base: reader.u64()?, key: reader.u64()? })).collect()
}

/// Region grant: range, and address and key by NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantEntry {
    pub begin: u64,
    pub end: u64,
    pub targets: Vec<RemoteMemory>,
}

impl GrantEntry {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.begin.to_le_bytes().to_vec();
        bytes.extend(self.end.to_le_bytes());
        put_targets(&mut bytes, &self.targets);
        bytes
    }

    /// Decodes a grant; `None` for malformed bytes.
    pub fn decode(bytes: &[u8]) -> Option<GrantEntry> {
        let mut reader = Reader::new(bytes);
        let (begin, end) = (reader.u64()?, reader.u64()?);
        let targets = take_targets(&mut reader)?;
        (reader.is_at_end() && begin <= end).then_some(GrantEntry { begin, end, targets })
    }
}

/// Regions that one peer has granted.
#[derive(Default)]
pub struct GrantedRegions {
    /// In key order.
    entries: Vec<(RegionKey, GrantEntry)>,
    recent: RecentGrant,
}

/// Last region found, beside the peer's other state in memory.
struct RecentGrant {
    key: RegionKey,
    begin: u64,
    end: u64,
    /// Target through NIC 0.
    first: RemoteMemory,
    index: usize,
}

impl Default for RecentGrant {
    /// No region: no slice lies in this range.
    fn default() -> RecentGrant {
        let (key, first) = (RegionKey(u32::MAX), RemoteMemory { base: 0, key: 0 });
        RecentGrant { key, begin: u64::MAX, end: 0, first, index: usize::MAX }
    }
}

impl GrantedRegions {
    /// Stores a region's grant; `None` if it does not cover `nics` NICs.
    pub fn import(&mut self, key: RegionKey, entry: GrantEntry, nics: usize) -> Option<()> {
        if entry.targets.len() < nics {
            return None;
        }
        self.recent = RecentGrant::default();
        match self.entries.binary_search_by_key(&key, |(key, _)| *key) {
            Ok(place) => self.entries[place].1 = entry,
            Err(place) => self.entries.insert(place, (key, entry)),
        }
        Some(())
    }

    pub fn remove(&mut self, key: RegionKey) {
        self.entries.retain(|(known, _)| *known != key);
        self.recent = RecentGrant::default();
    }

    /// Address and key through one NIC for a slice in a region; `None` outside the grant.
    #[inline(always)]
    pub fn destination(
        &mut self,
        nic: usize,
        key: RegionKey,
        offset: u64,
        length: u64,
    ) -> Option<RemoteMemory> {
        if self.recent.key != key {
            self.find(key)?;
        }
        let RecentGrant { begin, end, first, index, .. } = self.recent;
        if offset < begin || offset.checked_add(length)? > end {
            return None;
        }
        let RemoteMemory { base, key } = match nic {
            0 => first,
            _ => *self.entries.get(index)?.1.targets.get(nic)?,
        };
        Some(RemoteMemory { base: base.wrapping_add(offset), key })
    }

    /// Granted range in a region, and the memory through one NIC.
    pub fn target(&self, nic: usize, key: RegionKey) -> Option<((u64, u64), RemoteMemory)> {
        let index = self.entries.binary_search_by_key(&key, |(key, _)| *key).ok()?;
        let GrantEntry { begin, end, ref targets } = self.entries[index].1;
        Some(((begin, end), *targets.get(nic)?))
    }

    /// Makes a region the recent one.
    #[inline(never)]
    fn find(&mut self, key: RegionKey) -> Option<()> {
        let index = self.entries.binary_search_by_key(&key, |(key, _)| *key).ok()?;
        let GrantEntry { begin, end, ref targets } = self.entries[index].1;
        self.recent = RecentGrant { key, begin, end, first: *targets.first()?, index };
        Some(())
    }

    /// Reason why [`GrantedRegions::destination`] is `None`.
    #[cold]
    pub fn refusal(&mut self, key: RegionKey, offset: u64, length: u64) -> String {
        if self.find(key).is_none() {
            return format!("region {} was not granted", key.0);
        }
        let RecentGrant { begin, end, .. } = self.recent;
        let key = key.0;
        format!(
            "bytes {offset} to {offset}+{length} of region {key}: outside of the grant, {begin} to {end}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry() -> GrantEntry {
        let targets =
            vec![RemoteMemory { base: 7, key: 9 }, RemoteMemory { base: 0, key: u64::MAX }];
        GrantEntry { begin: 4096, end: 1 << 40, targets }
    }

    #[test]
    fn encoded_grants_are_decoded() {
        assert_eq!(GrantEntry::decode(&entry().encode()), Some(entry()));
    }

    #[test]
    fn slices_outside_of_the_grant_have_no_address() {
        let mut granted = GrantedRegions::default();
        let key = RegionKey(3);
        assert_eq!(granted.import(key, entry(), 3), None);
        granted.import(key, entry(), 2).unwrap();
        let first = granted.destination(0, key, 4096, 8).unwrap();
        assert_eq!(first, RemoteMemory { base: 7 + 4096, key: 9 });
        for (offset, length) in [(4095, 8), ((1 << 40) - 7, 8), (u64::MAX, 2)] {
            assert_eq!(granted.destination(0, key, offset, length), None);
        }
        assert_eq!(granted.destination(0, RegionKey(4), 4096, 8), None);
        let second = granted.destination(1, key, 4096, 8).unwrap();
        assert_eq!(second, RemoteMemory { base: 4096, key: u64::MAX });
        granted.import(key, GrantEntry { end: 4100, ..entry() }, 2).unwrap();
        assert_eq!(granted.destination(0, key, 4096, 8), None);
        assert_eq!(granted.destination(0, key, 4096, 4), Some(first));
        granted.remove(key);
        assert_eq!(granted.destination(0, key, 4096, 4), None);
        let (none, nowhere) = (RegionKey(u32::MAX), u64::MAX);
        assert_eq!(GrantedRegions::default().destination(0, none, nowhere, 0), None);
    }

    proptest! {
        #[test]
        fn garbage_is_rejected_or_decoded_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = GrantEntry::decode(&bytes);
        }
    }
}
