//! Wire format for what engines exchange before they connect: addresses and introductions.

use super::super::granted_regions::{MAX_NICS, RemoteMemory, put_targets, take_targets};
use crate::bytes::{Reader, put_block};
use crate::link::RouteRule;
use crate::parts::PartRule;
use crate::types::Lane;

/// Version for this format and for how immediates are used; both ends must have the same.
const VERSION: u16 = 2;

/// Link address, sent to each rank in the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfiAddress {
    /// Provider within libfabric, and the address format.
    pub provider: String,
    pub format: u32,
    /// Provider scope, such as one host's memory; equal for two engines that reach each other.
    pub realm: Vec<u8>,
    /// Process number where two endpoints in one process must not connect; otherwise zero.
    pub process: u64,
    /// Part limits at this end.
    pub max_part_bytes: u64,
    pub max_pages: u32,
    pub stripe_from: u64,
    /// Unconsumed arrivals from each peer.
    pub max_unconsumed: u32,
    /// Immediate data bytes in an arrival.
    pub immediate_bytes: u32,
    /// Endpoint names, one for each NIC.
    pub names: Vec<Vec<u8>>,
}

impl OfiAddress {
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

    /// Decodes an address; `None` for malformed bytes or another version.
    pub fn decode(bytes: &[u8]) -> Option<OfiAddress> {
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
        if !(1..=MAX_NICS).contains(&count) {
            return None;
        }
        let names = (0..count).map(|_| reader.block().map(<[u8]>::to_vec));
        let names = names.collect::<Option<Vec<_>>>()?;
        reader.is_at_end().then_some(OfiAddress {
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

    /// Rule by which two engines cut writes to each other. A write is striped over as many NICs as both
    /// have.
    pub fn rule(&self, other: &OfiAddress) -> PartRule {
        PartRule {
            max_part_bytes: self.max_part_bytes.min(other.max_part_bytes),
            max_pages_per_part: self.max_pages.min(other.max_pages),
            stripes: self.names.len().min(other.names.len()) as u32,
            stripe_from: self.stripe_from.max(other.stripe_from),
        }
    }

    /// Longest write with a piggybacked credit; zero where an immediate holds one lane only.
    pub fn max_piggyback(&self, other: &OfiAddress) -> u64 {
        let two_lanes = self.immediate_bytes.min(other.immediate_bytes) >= 8;
        if two_lanes { RouteRule::LONGEST_CARRIER } else { 0 }
    }

    /// True if the endpoints at this address reach the other's.
    pub fn reaches(&self, other: &OfiAddress) -> bool {
        let network = |it: &OfiAddress| (it.provider.clone(), it.format, it.realm.clone());
        let may_connect = self.process == 0 || self.process != other.process;
        network(self) == network(other) && may_connect
    }
}

/// Immediate data: the lane that an arrival raises, and in the upper half a piggybacked lane, or 0. No
/// credit has lane 0: a table's first lanes are a link's control lanes.
pub fn immediate(lane: Lane, piggyback: Option<Lane>) -> u64 {
    u64::from(lane.immediate())
        | piggyback.map_or(0, |piggyback| u64::from(piggyback.immediate()) << 32)
}

/// Lanes in [`immediate`].
pub fn lanes_of(immediate: u64) -> (Lane, Option<Lane>) {
    let piggyback = (immediate >> 32) as u32;
    let piggyback = (piggyback != 0).then(|| Lane::from_immediate(piggyback));
    (Lane::from_immediate(immediate as u32), piggyback)
}

/// Introduction, sent to one peer: signal targets, and the control lanes between the two links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfiIntroduction {
    /// Lane that the peer raises for each half of the unconsumed arrival bound that it has consumed.
    pub consumed: Lane,
    /// Lane that the peer raises with a greeting, when it receives ours, and when it leaves.
    pub presence: Lane,
    /// Signal targets, by NIC.
    pub targets: Vec<RemoteMemory>,
}

impl OfiIntroduction {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.consumed.immediate().to_le_bytes().to_vec();
        bytes.extend(self.presence.immediate().to_le_bytes());
        put_targets(&mut bytes, &self.targets);
        bytes
    }

    /// Decodes an introduction; `None` for malformed bytes.
    pub fn decode(bytes: &[u8]) -> Option<OfiIntroduction> {
        let mut reader = Reader::new(bytes);
        let consumed = Lane::from_immediate(reader.u32()?);
        let presence = Lane::from_immediate(reader.u32()?);
        let targets = take_targets(&mut reader)?;
        reader.is_at_end().then_some(OfiIntroduction { consumed, presence, targets })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Generation;
    use crate::types::LaneId;
    use proptest::prelude::*;

    fn address(names: usize) -> OfiAddress {
        OfiAddress {
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
    fn encoded_values_are_decoded() {
        let lane = |number| Lane::new(LaneId::new(number).unwrap(), Generation(3));
        let targets =
            vec![RemoteMemory { base: 7, key: 9 }, RemoteMemory { base: 0, key: u64::MAX }];
        let introduction = OfiIntroduction { consumed: lane(8), presence: lane(9), targets };
        assert_eq!(OfiAddress::decode(&address(2).encode()), Some(address(2)));
        assert_eq!(OfiIntroduction::decode(&introduction.encode()), Some(introduction));
    }

    #[test]
    fn two_ends_derive_one_rule() {
        let (mut here, there) = (address(2), address(4));
        here.max_pages = 1;
        assert_eq!(here.rule(&there), there.rule(&here));
        assert_eq!((here.rule(&there).stripes, here.rule(&there).max_pages_per_part), (2, 1));
    }

    #[test]
    fn two_endpoints_of_one_process_are_unreachable_over_shm() {
        let of = |process| OfiAddress { process, ..address(1) };
        assert!(of(0).reaches(&of(0)) && of(1).reaches(&of(2)) && !of(1).reaches(&of(1)));
    }

    #[test]
    fn an_address_of_another_version_or_without_a_name_is_rejected() {
        let mut bytes = address(1).encode();
        bytes[0] += 1;
        assert_eq!(OfiAddress::decode(&bytes), None);
        assert_eq!(OfiAddress::decode(&address(0).encode()), None);
    }

    #[test]
    fn an_immediate_of_eight_bytes_carries_two_lanes() {
        let lane = |number| Lane::new(LaneId::new(number).unwrap(), Generation(255));
        for (raised, piggyback) in
            [(0, None), (3, Some(0)), (LaneId::LIMIT - 1, Some(LaneId::LIMIT - 1))]
        {
            let both = (lane(raised), piggyback.map(lane));
            assert_eq!(lanes_of(immediate(both.0, both.1)), both);
        }
    }

    #[test]
    fn a_credit_rides_only_where_both_ends_have_room_for_it() {
        let (mut here, there) = (address(1), address(1));
        assert!(here.max_piggyback(&there) > 0);
        here.immediate_bytes = 4;
        assert_eq!((here.max_piggyback(&there), there.max_piggyback(&here)), (0, 0));
    }

    proptest! {
        #[test]
        fn garbage_is_rejected_or_decoded_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (OfiAddress::decode(&bytes), OfiIntroduction::decode(&bytes));
        }

        #[test]
        fn truncated_bytes_are_rejected(length in 0usize..80) {
            let bytes = address(2).encode();
            prop_assert_eq!(OfiAddress::decode(&bytes[..length.min(bytes.len() - 1)]), None);
        }
    }
}
