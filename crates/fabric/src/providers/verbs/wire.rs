//! Wire format for what engines exchange before they connect: addresses and introductions.

use super::super::granted_regions::MAX_NICS;
use super::sys::Gid;
use crate::bytes::Reader;
use crate::parts::PartRule;
use crate::types::Lane;

/// Version for this format and for how immediates are used; both ends must have the same.
const VERSION: u16 = 2;

/// Link address, sent to each rank in the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsAddress {
    /// InfiniBand or Ethernet, as libibverbs numbers them.
    pub link_layer: u8,
    /// Part limits at this end.
    pub max_part_bytes: u64,
    pub max_pages: u32,
    pub stripe_from: u64,
    /// Unconsumed arrivals from each peer.
    pub max_unconsumed: u32,
    pub ports: Vec<PortAddress>,
}

/// Port address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAddress {
    pub gid: Gid,
    /// InfiniBand local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Longest packet, as libibverbs numbers it: 1 for 256 bytes, 5 for 4096.
    pub mtu: u8,
    /// Network number: ports with equal numbers are connected.
    pub network: u8,
}

impl VerbsAddress {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        bytes.push(self.link_layer);
        bytes.extend(self.max_part_bytes.to_le_bytes());
        bytes.extend(self.max_pages.to_le_bytes());
        bytes.extend(self.stripe_from.to_le_bytes());
        bytes.extend(self.max_unconsumed.to_le_bytes());
        bytes.extend((self.ports.len() as u32).to_le_bytes());
        for port in &self.ports {
            bytes.extend(port.gid.0);
            bytes.extend(port.lid.to_le_bytes());
            bytes.extend([port.mtu, port.network]);
        }
        bytes
    }

    /// Decodes an address; `None` for malformed bytes or another version.
    pub fn decode(bytes: &[u8]) -> Option<VerbsAddress> {
        let mut reader = Reader::new(bytes);
        if reader.u16()? != VERSION {
            return None;
        }
        let link_layer = reader.u8()?;
        let (max_part_bytes, max_pages) = (reader.u64()?, reader.u32()?);
        let (stripe_from, max_unconsumed) = (reader.u64()?, reader.u32()?);
        let ports = take_each(&mut reader, |reader| {
            let gid = Gid(reader.array()?);
            let (lid, mtu, network) = (reader.u16()?, reader.u8()?, reader.u8()?);
            (1..=5).contains(&mtu).then_some(PortAddress { gid, lid, mtu, network })
        })?;
        if !ports.is_sorted_by(|before: &PortAddress, port| before.network < port.network) {
            return None;
        }
        if max_part_bytes == 0 || max_pages == 0 || max_unconsumed < 4 {
            return None;
        }
        reader.is_at_end().then_some(VerbsAddress {
            link_layer,
            max_part_bytes,
            max_pages,
            stripe_from,
            max_unconsumed,
            ports,
        })
    }

    /// Ports by which two engines are connected, with each port's index at this and at the other end.
    pub fn shared_ports(&self, other: &VerbsAddress) -> Vec<(usize, usize)> {
        let theirs = |network| other.ports.iter().position(|port| port.network == network);
        let ports = self.ports.iter().enumerate();
        ports.filter_map(|(index, port)| Some((index, theirs(port.network)?))).collect()
    }

    /// Rule by which two engines cut writes to each other.
    pub fn rule(&self, other: &VerbsAddress) -> PartRule {
        PartRule {
            max_part_bytes: self.max_part_bytes.min(other.max_part_bytes),
            max_pages_per_part: self.max_pages.min(other.max_pages),
            stripes: (self.shared_ports(other).len() as u32).max(1),
            stripe_from: self.stripe_from.max(other.stripe_from),
        }
    }

    /// Limit for unconsumed arrivals between two engines.
    pub fn unconsumed(&self, other: &VerbsAddress) -> u32 {
        self.max_unconsumed.min(other.max_unconsumed)
    }

    /// True if both have a port in the same network.
    pub fn reaches(&self, other: &VerbsAddress) -> bool {
        self.link_layer == other.link_layer && !self.shared_ports(other).is_empty()
    }
}

/// Reads a list that begins with a length; `None` if the list is malformed or empty.
fn take_each<T>(
    reader: &mut Reader<'_>,
    mut take: impl FnMut(&mut Reader<'_>) -> Option<T>,
) -> Option<Vec<T>> {
    let count = reader.u32()? as usize;
    let count = (1..=MAX_NICS).contains(&count).then_some(count)?;
    (0..count).map(|_| take(reader)).collect()
}

/// Introduction, sent to one peer: the queue pairs toward it, and the control lanes between the two links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsIntroduction {
    /// Lane that the peer raises for each half of the unconsumed arrival bound that it has consumed.
    pub consumed: Lane,
    /// Lane that the peer raises with a greeting, and when it leaves.
    pub presence: Lane,
    /// Queue pairs, by NIC.
    pub pairs: Vec<PairAddress>,
}

/// Queue pair address within a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairAddress {
    pub number: u32,
    /// Sequence number of the first packet.
    pub first_packet: u32,
}

impl VerbsIntroduction {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.consumed.immediate().to_le_bytes().to_vec();
        bytes.extend(self.presence.immediate().to_le_bytes());
        bytes.extend((self.pairs.len() as u32).to_le_bytes());
        for pair in &self.pairs {
            bytes.extend(pair.number.to_le_bytes());
            bytes.extend(pair.first_packet.to_le_bytes());
        }
        bytes
    }

    /// Decodes an introduction; `None` for malformed bytes.
    pub fn decode(bytes: &[u8]) -> Option<VerbsIntroduction> {
        let mut reader = Reader::new(bytes);
        let consumed = Lane::from_immediate(reader.u32()?);
        let presence = Lane::from_immediate(reader.u32()?);
        let pairs = take_each(&mut reader, |reader| {
            Some(PairAddress { number: reader.u32()?, first_packet: reader.u32()? & 0xff_ffff })
        })?;
        reader.is_at_end().then_some(VerbsIntroduction { consumed, presence, pairs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Generation, LaneId};
    use proptest::prelude::*;

    fn address(ports: usize) -> VerbsAddress {
        let port = |index| PortAddress {
            gid: Gid([index as u8; 16]),
            lid: 3,
            mtu: 5,
            network: index as u8,
        };
        VerbsAddress {
            link_layer: 2,
            max_part_bytes: 1 << 20,
            max_pages: 4,
            stripe_from: 1 << 16,
            max_unconsumed: 64,
            ports: (0..ports).map(port).collect(),
        }
    }

    #[test]
    fn encoded_values_are_decoded() {
        let lane = |number| Lane::new(LaneId::new(number).unwrap(), Generation(3));
        let pairs = vec![PairAddress { number: 17, first_packet: 0xff_ffff }];
        let introduction = VerbsIntroduction { consumed: lane(8), presence: lane(9), pairs };
        assert_eq!(VerbsAddress::decode(&address(2).encode()), Some(address(2)));
        assert_eq!(VerbsIntroduction::decode(&introduction.encode()), Some(introduction));
    }

    #[test]
    fn two_ends_derive_one_rule() {
        let (mut here, there) = (address(2), address(4));
        here.max_pages = 1;
        assert_eq!(here.rule(&there), there.rule(&here));
        assert_eq!((here.rule(&there).stripes, here.rule(&there).max_pages_per_part), (2, 1));
        let infiniband = VerbsAddress { link_layer: 1, ..address(2) };
        assert!(here.reaches(&there) && !here.reaches(&infiniband));
    }

    #[test]
    fn ports_of_equal_networks_are_connected_although_one_end_lacks_some() {
        let (mut here, there) = (address(3), address(4));
        here.ports.remove(1);
        assert_eq!(here.shared_ports(&there), [(0, 0), (1, 2)]);
        assert_eq!(there.shared_ports(&here), [(0, 0), (2, 1)]);
        assert_eq!(here.rule(&there).stripes, 2);
        here.ports.retain(|port| port.network == 2);
        assert!(here.reaches(&there) && !here.reaches(&address(2)));
    }

    #[test]
    fn an_address_of_another_version_or_without_a_port_or_with_a_false_mtu_is_rejected() {
        let mut bytes = address(1).encode();
        bytes[0] += 1;
        assert_eq!(VerbsAddress::decode(&bytes), None);
        assert_eq!(VerbsAddress::decode(&address(0).encode()), None);
        let mut of_mtu = address(1);
        of_mtu.ports[0].mtu = 6;
        assert_eq!(VerbsAddress::decode(&of_mtu.encode()), None);
        let mut twice = address(2);
        twice.ports[1].network = 0;
        assert_eq!(VerbsAddress::decode(&twice.encode()), None);
    }

    proptest! {
        #[test]
        fn garbage_is_rejected_or_decoded_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (VerbsAddress::decode(&bytes), VerbsIntroduction::decode(&bytes));
        }

        #[test]
        fn truncated_bytes_are_rejected(length in 0usize..80) {
            let bytes = address(2).encode();
            prop_assert_eq!(VerbsAddress::decode(&bytes[..length.min(bytes.len() - 1)]), None);
        }
    }
}
