//! Descriptors that ranks exchange: engine addresses, and grants for regions and counters.

use crate::bytes::{Reader, put_block};
use crate::cores::CoreSet;
use crate::cpu_quota::CpuQuota;
use crate::processors::Processors;
use crate::types::{Generation, Lane, LaneId, ProviderKind, RegionKey};

/// Engine address: an entry for each provider, and the rank's processors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineAddress {
    /// In [`ProviderKind`] order.
    pub providers: Vec<(ProviderKind, Vec<u8>)>,
    /// Cores and quotas that the rank has.
    pub processors: Processors,
}

const ADDRESS: u8 = b'A';
/// Codes that mark cores and quotas among the provider entries.
const CORES: u8 = u8::MAX;
const QUOTAS: u8 = CORES - 1;
const GRANT: u8 = b'G';
const REFUSAL: u8 = b'R';
/// Longest refusal text, sent or received, in characters.
const MAX_DETAIL: usize = 2000;

impl EngineAddress {
    /// One provider's entry.
    pub fn of(&self, kind: ProviderKind) -> Option<&[u8]> {
        let entry = self.providers.iter().find(|(of, _)| *of == kind)?;
        Some(&entry.1)
    }

    /// Encoded bytes.
    pub fn encode(&self) -> Vec<u8> {
        // An engine has at most one link per kind, so the count fits.
        let mut out = vec![ADDRESS, self.providers.len() as u8 + 2];
        for (kind, entry) in &self.providers {
            out.push(*kind as u8);
            put_block(&mut out, entry);
        }
        out.push(CORES);
        put_block(&mut out, self.processors.cores.encode());
        out.push(QUOTAS);
        put_block(&mut out, &CpuQuota::encode_all(&self.processors.quotas));
        out
    }

    /// Decodes a peer's bytes. Providers unknown here are left out.
    ///
    /// # Errors
    /// The reason why they are not an address.
    pub fn decode(bytes: &[u8]) -> Result<EngineAddress, String> {
        let mut reader = Reader::new(bytes);
        let damaged = || format!("{} bytes that are not an address", bytes.len());
        if reader.u8() != Some(ADDRESS) {
            return Err(damaged());
        }
        let (mut providers, mut processors) = (Vec::new(), Processors::default());
        let mut seen = [false; 256];
        for _ in 0..reader.u8().ok_or_else(damaged)? {
            let kind = reader.u8().ok_or_else(damaged)?;
            let entry = reader.block().ok_or_else(damaged)?;
            if std::mem::replace(&mut seen[usize::from(kind)], true) {
                return Err(format!("two entries of kind {kind}: expected one"));
            }
            match kind {
                CORES => processors.cores = CoreSet::decode(entry),
                QUOTAS => processors.quotas = CpuQuota::decode_all(entry),
                _ => providers
                    .extend(ProviderKind::from_wire(kind).map(|kind| (kind, entry.to_vec()))),
            }
        }
        if !reader.is_at_end() {
            return Err(damaged());
        }
        Ok(EngineAddress { providers, processors })
    }
}

/// Region grant for one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionGrant {
    /// The owner's key.
    pub key: RegionKey,
    /// Region length; offsets count from the first byte.
    pub length: u64,
    /// For the provider on the route between the two.
    pub entry: Vec<u8>,
}

/// Counter grant for one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterGrant {
    /// The first lane that the peer raises.
    pub data: Lane,
    /// Lane on which the peer returns credits for the counter that it has at the same position.
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

/// Refusal in place of a grant: the rank's error text.
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

    /// Address with `count` entries from one provider.
    fn repeated(count: u8) -> Vec<u8> {
        let mut bytes = vec![ADDRESS, count];
        for _ in 0..count {
            bytes.push(ProviderKind::Tcp as u8);
            put_block(&mut bytes, b"there");
        }
        bytes
    }

    #[test]
    fn an_address_names_a_provider_once() {
        let address = EngineAddress::decode(&repeated(1)).unwrap();
        assert_eq!(EngineAddress::decode(&address.encode()), Ok(address));
        for count in [2, 254, 255] {
            let error = EngineAddress::decode(&repeated(count)).unwrap_err();
            assert_eq!(error, "two entries of kind 5: expected one");
        }
    }

    #[test]
    fn the_processors_of_a_rank_round_trip() {
        let quotas = vec![CpuQuota { group: 1 << 40, millicores: 2500 }];
        let processors = Processors { cores: CoreSet::new([1, 300]), quotas };
        let address = EngineAddress { providers: Vec::new(), processors };
        assert_eq!(EngineAddress::decode(&address.encode()), Ok(address));
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
