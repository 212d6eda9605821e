//! Descriptors that ranks exchange: addresses of engines, and grants of regions and counters.

use crate::bytes::{Reader, put_block};
use crate::cores::CoreSet;
use crate::types::{Generation, Lane, LaneId, ProviderKind, RegionKey};

/// Address of an engine: an entry for each of its providers, and its cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineAddress {
    /// In the order of [`ProviderKind`].
    pub providers: Vec<(ProviderKind, Vec<u8>)>,
    /// Cores on which the rank may run; empty where unknown.
    pub cores: CoreSet,
}

const ADDRESS: u8 = b'A';
/// Code of the cores among the entries of providers.
const CORES: u8 = u8::MAX;
const GRANT: u8 = b'G';
const REFUSAL: u8 = b'R';
/// Longest text of a refusal, sent or received, in characters.
const MAX_DETAIL: usize = 2000;

impl EngineAddress {
    /// The entry of one provider.
    pub fn of(&self, kind: ProviderKind) -> Option<&[u8]> {
        let entry = self.providers.iter().find(|(of, _)| *of == kind)?;
        Some(&entry.1)
    }

    /// Encoded bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![ADDRESS, self.providers.len() as u8 + 1];
        for (kind, entry) in &self.providers {
            out.push(*kind as u8);
            put_block(&mut out, entry);
        }
        out.push(CORES);
        put_block(&mut out, self.cores.encode());
        out
    }

    /// Decodes a peer's bytes; `None` if they are not an address. Providers unknown here are left out.
    pub fn decode(bytes: &[u8]) -> Option<EngineAddress> {
        let mut reader = Reader::new(bytes);
        if reader.u8()? != ADDRESS {
            return None;
        }
        let (mut providers, mut cores) = (Vec::new(), CoreSet::default());
        for _ in 0..reader.u8()? {
            let kind = reader.u8()?;
            let entry = reader.block()?;
            if kind == CORES {
                cores = CoreSet::decode(entry);
            }
            providers.extend(ProviderKind::from_wire(kind).map(|kind| (kind, entry.to_vec())));
        }
        reader.is_at_end().then_some(EngineAddress { providers, cores })
    }
}

/// Grant of a region to one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionGrant {
    /// The owner's key.
    pub key: RegionKey,
    /// The region's length; offsets count from its first byte.
    pub length: u64,
    /// For the provider of the route between the two.
    pub entry: Vec<u8>,
}

/// Grant of a counter to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterGrant {
    /// The first lane that the peer raises.
    pub data: Lane,
    /// The lane on which the peer returns credits for its own counter of the same position.
    pub credit: Lane,
    /// Rounds that may be open at a time.
    pub window: u32,
}

/// Regions and counters that one rank grants to one peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Regions.
    pub regions: Vec<RegionGrant>,
    /// Counters.
    pub counters: Vec<CounterGrant>,
}

impl Grant {
    /// Encoded bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![GRANT];
        out.extend_from_slice(&(self.regions.len() as u32).to_le_bytes());
        for region in &self.regions {
            out.extend_from_slice(&region.key.0.to_le_bytes());
            out.extend_from_slice(&region.length.to_le_bytes());
            put_block(&mut out, &region.entry);
        }
        out.extend_from_slice(&(self.counters.len() as u32).to_le_bytes());
        for counter in &self.counters {
            for lane in [counter.data, counter.credit] {
                out.extend_from_slice(&lane.id().get().to_le_bytes());
                out.push(lane.generation().0);
            }
            out.extend_from_slice(&counter.window.to_le_bytes());
        }
        out
    }

    /// Decodes a peer's bytes; `None` if they are not a grant.
    pub fn decode(bytes: &[u8]) -> Option<Grant> {
        let mut reader = Reader::new(bytes);
        if reader.u8()? != GRANT {
            return None;
        }
        let mut grant = Grant::default();
        for _ in 0..reader.u32()? {
            grant.regions.push(RegionGrant {
                key: RegionKey(reader.u32()?),
                length: reader.u64()?,
                entry: reader.block()?.to_vec(),
            });
        }
        for _ in 0..reader.u32()? {
            let mut lane = || {
                let id = LaneId::new(reader.u32()?)?;
                Some(Lane::new(id, Generation(reader.u8()?)))
            };
            let (data, credit) = (lane()?, lane()?);
            grant.counters.push(CounterGrant { data, credit, window: reader.u32()? });
        }
        reader.is_at_end().then_some(grant)
    }
}

/// Refusal in place of a grant: the text of the rank's error.
pub(crate) struct Refusal(pub String);

impl Refusal {
    /// Encoded bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![REFUSAL];
        out.extend(self.0.chars().take(MAX_DETAIL).collect::<String>().into_bytes());
        out
    }

    /// Decodes a peer's bytes; `None` if they are not a refusal.
    pub fn decode(bytes: &[u8]) -> Option<Refusal> {
        let text = bytes.strip_prefix(&[REFUSAL])?;
        Some(Refusal(String::from_utf8_lossy(text).chars().take(MAX_DETAIL).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lane() -> impl Strategy<Value = Lane> {
        (0..LaneId::LIMIT, any::<u8>())
            .prop_map(|(id, g)| Lane::new(LaneId::new(id).unwrap(), Generation(g)))
    }

    proptest! {
        #[test]
        fn grants_round_trip(
            regions in prop::collection::vec((any::<u32>(), any::<u64>(), any::<Vec<u8>>()), 0..4),
            counters in prop::collection::vec((lane(), lane(), any::<u32>()), 0..4),
        ) {
            let grant = Grant {
                regions: regions
                    .into_iter()
                    .map(|(key, length, entry)| RegionGrant { key: RegionKey(key), length, entry })
                    .collect(),
                counters: counters
                    .into_iter()
                    .map(|(data, credit, window)| CounterGrant { data, credit, window })
                    .collect(),
            };
            prop_assert_eq!(Grant::decode(&grant.encode()), Some(grant.clone()));
            let bytes = grant.encode();
            for end in 0..bytes.len() {
                prop_assert_eq!(Grant::decode(&bytes[..end]), None);
            }
        }

        #[test]
        fn garbage_is_refused_without_a_panic(bytes in any::<Vec<u8>>()) {
            let _ = EngineAddress::decode(&bytes);
            let mut tagged = bytes.clone();
            tagged.insert(0, GRANT);
            let _ = Grant::decode(&tagged);
            tagged[0] = ADDRESS;
            let _ = EngineAddress::decode(&tagged);
        }
    }
}
