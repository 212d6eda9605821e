//! Bytes that engines exchange before they connect: addresses, introductions, grants.

use crate::bytes::{Reader, put_block};
use crate::parts::PartRule;
use crate::types::Lane;

/// Changes whenever anything in this file or in the use of immediates does.
const VERSION: u16 = 2;
/// More NICs than any host has.
const MAX_RAILS: usize = 64;
/// The longest write that a credit rides with, in bytes: it would wait for the last byte of a longer one.
const MAX_RIDE: u64 = 256 << 10;

/// What goes to every rank of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The provider within libfabric, and the format of its addresses.
    pub provider: String,
    pub format: u32,
    /// Equal for two engines if they share what the provider reaches, such as one host's memory.
    pub realm: Vec<u8>,
    /// The process, where two endpoints of one process must not meet; else zero.
    pub process: u64,
    /// How this end cuts writes.
    pub max_part_bytes: u64,
    pub max_pages: u32,
    pub stripe_from: u64,
    /// Arrivals from each peer that may lie unconsumed here.
    pub max_unconsumed: u32,
    /// Bytes of an arrival's immediate data.
    pub immediate_bytes: u32,
    /// A name of each endpoint, one for each NIC.
    pub names: Vec<Vec<u8>>,
}

impl Address {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        put_block(&mut bytes, self.provider.as_bytes());
        bytes.extend(self.format.to_le_bytes());
        put_block(&mut bytes, &self.realm);
        bytes.extend(self.process.to_le_bytes());
        bytes.extend(self.max_part_bytes.to_le_bytes());
        bytes.extend(self.max_pages.to_le_bytes());
        bytes.extend(self.stripe_from.to_le_bytes());
        bytes.extend(self.max_unconsumed.to_le_bytes());
        bytes.extend(self.immediate_bytes.to_le_bytes());
        bytes.extend((self.names.len() as u32).to_le_bytes());
        self.names.iter().for_each(|name| put_block(&mut bytes, name));
        bytes
    }

    /// `None` if the bytes are damaged or of another version.
    pub fn decode(bytes: &[u8]) -> Option<Address> {
        let mut reader = Reader::new(bytes);
        if reader.u16()? != VERSION {
            return None;
        }
        let provider = String::from_utf8(reader.block()?.to_vec()).ok()?;
        let format = reader.u32()?;
        let realm = reader.block()?.to_vec();
        let process = reader.u64()?;
        let (max_part_bytes, max_pages) = (reader.u64()?, reader.u32()?);
        let (stripe_from, max_unconsumed) = (reader.u64()?, reader.u32()?);
        let immediate_bytes = reader.u32()?;
        let count = reader.u32()? as usize;
        if max_part_bytes == 0 || max_pages == 0 || max_unconsumed < 4 {
            return None;
        }
        if !(1..=MAX_RAILS).contains(&count) {
            return None;
        }
        let names = (0..count).map(|_| reader.block().map(<[u8]>::to_vec));
        let names = names.collect::<Option<Vec<_>>>()?;
        reader.is_at_end().then_some(Address {
            provider,
            format,
            realm,
            process,
            max_part_bytes,
            max_pages,
            stripe_from,
            max_unconsumed,
            immediate_bytes,
            names,
        })
    }

    /// How two engines cut writes to each other. A write is spread over as many NICs as both have.
    pub fn rule(&self, other: &Address) -> PartRule {
        PartRule {
            max_part_bytes: self.max_part_bytes.min(other.max_part_bytes),
            max_pages_per_part: self.max_pages.min(other.max_pages),
            stripes: self.names.len().min(other.names.len()) as u32,
            stripe_from: self.stripe_from.max(other.stripe_from),
        }
    }

    /// The longest write that takes a credit along: none where an immediate holds one lane only.
    pub fn max_ride(&self, other: &Address) -> u64 {
        let two_lanes = self.immediate_bytes.min(other.immediate_bytes) >= 8;
        if two_lanes { MAX_RIDE } else { 0 }
    }

    /// Whether one's endpoints can reach the other's.
    pub fn reaches(&self, other: &Address) -> bool {
        let network = |it: &Address| (it.provider.clone(), it.format, it.realm.clone());
        let may_meet = self.process == 0 || self.process != other.process;
        network(self) == network(other) && may_meet
    }
}

/// Immediate data: the lane that an arrival raises, and in the upper half that of a credit that rides along,
/// or 0. No credit's lane is 0: the first lanes of a table go to the reports of a link.
pub fn immediate(lane: Lane, rider: Option<Lane>) -> u64 {
    u64::from(lane.immediate()) | rider.map_or(0, |rider| u64::from(rider.immediate()) << 32)
}

/// The two lanes of [`immediate`].
pub fn lanes_of(immediate: u64) -> (Lane, Option<Lane>) {
    let rider = (immediate >> 32) as u32;
    let rider = (rider != 0).then(|| Lane::from_immediate(rider));
    (Lane::from_immediate(immediate as u32), rider)
}

/// What goes to one peer alone: where its signals are aimed, and the lanes between the two links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Introduction {
    /// Lane that the peer raises when it has consumed half of what it lets lie unconsumed.
    pub consumed: Lane,
    /// Lane that the peer raises when it greets, when it has our greeting, and when it leaves.
    pub presence: Lane,
    /// Target of signals, for each NIC.
    pub targets: Vec<Target>,
}

/// Granted memory as one NIC of its owner names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// What stands for the region's first byte: its address, or zero.
    pub base: u64,
    pub key: u64,
}

fn put_targets(bytes: &mut Vec<u8>, targets: &[Target]) {
    bytes.extend((targets.len() as u32).to_le_bytes());
    for target in targets {
        bytes.extend(target.base.to_le_bytes());
        bytes.extend(target.key.to_le_bytes());
    }
}

fn take_targets(reader: &mut Reader<'_>) -> Option<Vec<Target>> {
    let count = reader.u32()? as usize;
    let targets = (1..=MAX_RAILS).contains(&count).then_some(0..count)?;
    targets.map(|_| Some(Target { base: reader.u64()?, key: reader.u64()? })).collect()
}

impl Introduction {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.consumed.immediate().to_le_bytes().to_vec();
        bytes.extend(self.presence.immediate().to_le_bytes());
        put_targets(&mut bytes, &self.targets);
        bytes
    }

    /// `None` if the bytes are damaged.
    pub fn decode(bytes: &[u8]) -> Option<Introduction> {
        let mut reader = Reader::new(bytes);
        let consumed = Lane::from_immediate(reader.u32()?);
        let presence = Lane::from_immediate(reader.u32()?);
        let targets = take_targets(&mut reader)?;
        reader.is_at_end().then_some(Introduction { consumed, presence, targets })
    }
}

/// A region's entry: the granted range, and how each NIC names the region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub begin: u64,
    pub end: u64,
    pub targets: Vec<Target>,
}

impl Entry {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.begin.to_le_bytes().to_vec();
        bytes.extend(self.end.to_le_bytes());
        put_targets(&mut bytes, &self.targets);
        bytes
    }

    /// `None` if the bytes are damaged.
    pub fn decode(bytes: &[u8]) -> Option<Entry> {
        let mut reader = Reader::new(bytes);
        let (begin, end) = (reader.u64()?, reader.u64()?);
        let targets = take_targets(&mut reader)?;
        (reader.is_at_end() && begin <= end).then_some(Entry { begin, end, targets })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Generation;
    use crate::types::LaneId;
    use proptest::prelude::*;

    fn address(names: usize) -> Address {
        Address {
            provider: "tcp;ofi_rxm".into(),
            format: 2,
            realm: vec![1, 2],
            process: 0,
            max_part_bytes: 1 << 20,
            max_pages: 4,
            stripe_from: 1 << 16,
            max_unconsumed: 64,
            immediate_bytes: 8,
            names: (0..names).map(|name| vec![name as u8; 16]).collect(),
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let lane = |number| Lane::new(LaneId::new(number).unwrap(), Generation(3));
        let targets = vec![Target { base: 7, key: 9 }, Target { base: 0, key: u64::MAX }];
        let introduction =
            Introduction { consumed: lane(8), presence: lane(9), targets: targets.clone() };
        let entry = Entry { begin: 4096, end: 1 << 40, targets };
        assert_eq!(Address::decode(&address(2).encode()), Some(address(2)));
        assert_eq!(Introduction::decode(&introduction.encode()), Some(introduction));
        assert_eq!(Entry::decode(&entry.encode()), Some(entry));
    }

    #[test]
    fn two_ends_derive_one_rule() {
        let (mut here, there) = (address(2), address(4));
        here.max_pages = 1;
        assert_eq!(here.rule(&there), there.rule(&here));
        assert_eq!((here.rule(&there).stripes, here.rule(&there).max_pages_per_part), (2, 1));
    }

    #[test]
    fn two_endpoints_of_a_process_do_not_meet_where_they_must_not() {
        let of = |process| Address { process, ..address(1) };
        assert!(of(0).reaches(&of(0)) && of(1).reaches(&of(2)) && !of(1).reaches(&of(1)));
    }

    #[test]
    fn an_address_of_another_version_or_without_a_name_is_refused() {
        let mut bytes = address(1).encode();
        bytes[0] += 1;
        assert_eq!(Address::decode(&bytes), None);
        assert_eq!(Address::decode(&address(0).encode()), None);
    }

    #[test]
    fn an_immediate_of_eight_bytes_carries_two_lanes() {
        let lane = |number| Lane::new(LaneId::new(number).unwrap(), Generation(255));
        for (raised, rider) in
            [(0, None), (3, Some(0)), (LaneId::LIMIT - 1, Some(LaneId::LIMIT - 1))]
        {
            let both = (lane(raised), rider.map(lane));
            assert_eq!(lanes_of(immediate(both.0, both.1)), both);
        }
    }

    #[test]
    fn a_credit_rides_only_where_both_ends_have_room_for_it() {
        let (mut here, there) = (address(1), address(1));
        assert!(here.max_ride(&there) > 0);
        here.immediate_bytes = 4;
        assert_eq!((here.max_ride(&there), there.max_ride(&here)), (0, 0));
    }

    proptest! {
        #[test]
        fn garbage_is_refused_or_read_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Address::decode(&bytes), Introduction::decode(&bytes), Entry::decode(&bytes));
        }

        #[test]
        fn cut_bytes_are_refused(length in 0usize..80) {
            let bytes = address(2).encode();
            prop_assert_eq!(Address::decode(&bytes[..length.min(bytes.len() - 1)]), None);
        }
    }
}
