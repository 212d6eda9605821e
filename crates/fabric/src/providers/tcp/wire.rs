//! Wire format between two tcp links, as pure functions over bytes: addresses, hellos, frames.
//!
//! `docs/wire-format.md` has the same in tables. All input is untrusted: malformed bytes are rejected
//! with a reason, incomplete ones wait, and each length is bounded before use.

use crate::bytes::{Reader, put_block};
use crate::parts::PartRule;
use crate::types::{Generation, Lane, Page};
use std::net::IpAddr;

/// Wire format version; both ends must have the same.
pub(super) const VERSION: u16 = 3;
/// Maximum pages in one frame.
pub(super) const MAX_PAGES: u32 = 256;
const HEADER: usize = 12;
const PAGE: usize = 16;
/// Maximum length for a frame's header and page table.
pub(super) const MAX_HEAD: usize = HEADER + MAX_PAGES as usize * PAGE;
/// Hello length.
pub(super) const HELLO: usize = 36;

/// Maximum streams between two ranks.
pub(super) const MAX_STREAMS: u32 = 64;
const MAGIC: [u8; 4] = *b"WEFT";
const COUNTED_WRITE: u8 = 1;

/// Token that an engine issues to one peer over the control plane.
pub(super) type Token = [u8; 16];

/// Link address, sent to each rank through the control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TcpAddress {
    /// Loopback network identity; loopback addresses are comparable only if it is equal.
    pub host: Vec<u8>,
    pub max_part_bytes: u64,
    pub max_pages: u32,
    pub streams: u32,
    pub ip: IpAddr,
}

/// Rule for a pair of links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PairRule {
    pub parts: PartRule,
    pub streams: u32,
}

impl TcpAddress {
    /// True if both are in one network namespace on one host; false if that is unknown.
    pub fn is_on_host_of(&self, other: &TcpAddress) -> bool {
        !self.host.is_empty() && self.host == other.host
    }

    /// Rule that both ends derive: the smaller value for each limit, at least 1.
    pub fn pair(&self, other: &TcpAddress) -> PairRule {
        let max_part_bytes = self.max_part_bytes.min(other.max_part_bytes).max(1);
        let max_pages_per_part = self.max_pages.min(other.max_pages).max(1);
        let streams = self.streams.min(other.streams).clamp(1, MAX_STREAMS);
        PairRule {
            parts: PartRule { max_part_bytes, max_pages_per_part, ..PartRule::WHOLE },
            streams,
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = VERSION.to_le_bytes().to_vec();
        put_block(&mut out, &self.host);
        out.extend_from_slice(&self.max_part_bytes.to_le_bytes());
        out.extend_from_slice(&self.max_pages.to_le_bytes());
        out.extend_from_slice(&self.streams.to_le_bytes());
        match self.ip {
            IpAddr::V4(ip) => put_block(&mut out, &ip.octets()),
            IpAddr::V6(ip) => put_block(&mut out, &ip.octets()),
        }
        out
    }

    /// Decodes a peer's address; `None` for another wire version or malformed bytes.
    pub fn decode(bytes: &[u8]) -> Option<TcpAddress> {
        let mut reader = Reader::new(bytes);
        if reader.u16()? != VERSION {
            return None;
        }
        let host = reader.block()?.to_vec();
        let (max_part_bytes, max_pages, streams) = (reader.u64()?, reader.u32()?, reader.u32()?);
        let ip = reader.block()?;
        let ip = match ip.len() {
            4 => IpAddr::from(<[u8; 4]>::try_from(ip).ok()?),
            _ => IpAddr::from(<[u8; 16]>::try_from(ip).ok()?),
        };
        let address = TcpAddress { host, max_part_bytes, max_pages, streams, ip };
        reader.is_at_end().then_some(address)
    }
}

/// Message to one peer that is routed over tcp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TcpIntroduction {
    /// Token that the peer presents.
    pub token: Token,
    /// Port on which this end listens; 0 if it dials.
    pub port: u16,
}

impl TcpIntroduction {
    pub fn encode(&self) -> Vec<u8> {
        [&self.token[..], &self.port.to_le_bytes()].concat()
    }

    pub fn decode(bytes: &[u8]) -> Option<TcpIntroduction> {
        let mut reader = Reader::new(bytes);
        let token = reader.bytes(size_of::<Token>())?.try_into().ok()?;
        let port = reader.u16()?;
        reader.is_at_end().then_some(TcpIntroduction { token, port })
    }
}

/// Connection end that sends a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Role {
    Dialer = 1,
    Acceptor = 2,
}

/// First bytes in each direction on a connection; fixed length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub generation: Generation,
    pub role: Role,
    /// Sender rank.
    pub from: u32,
    /// Receiver rank.
    pub to: u32,
    /// Stream number within the pair.
    pub stream: u32,
    /// Token that the receiver issued to the sender over the control plane.
    pub token: Token,
}

impl Hello {
    pub fn encode(&self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        out[..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6] = self.generation.0;
        out[7] = self.role as u8;
        out[8..12].copy_from_slice(&self.from.to_le_bytes());
        out[12..16].copy_from_slice(&self.to.to_le_bytes());
        out[16..20].copy_from_slice(&self.stream.to_le_bytes());
        out[20..].copy_from_slice(&self.token);
        out
    }

    pub fn decode(bytes: &[u8; HELLO]) -> Result<Hello, &'static str> {
        let mut reader = Reader::new(bytes);
        if reader.bytes(4) != Some(&MAGIC) {
            return Err("not a Weft connection");
        }
        if reader.u16() != Some(VERSION) {
            return Err("another wire version");
        }
        let rest = |reader: &mut Reader<'_>| {
            let generation = Generation(reader.u8()?);
            let role = match reader.u8()? {
                1 => Role::Dialer,
                2 => Role::Acceptor,
                _ => return None,
            };
            let (from, to, stream) = (reader.u32()?, reader.u32()?, reader.u32()?);
            let token = reader.bytes(16)?.try_into().ok()?;
            Some(Hello { generation, role, from, to, stream, token })
        };
        rest(&mut reader).ok_or("unknown role")
    }
}

/// Compares two tokens in constant time.
pub(super) fn same_token(one: &Token, other: &Token) -> bool {
    one.iter().zip(other).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

/// Appends the header and page table for the frame that writes `pages` and raises `lane`.
pub(super) fn put_head(out: &mut Vec<u8>, lane: Lane, pages: &[Page]) {
    let payload: u64 = pages.iter().map(|page| page.length).sum();
    let mut head = [0; HEADER];
    head[0] = COUNTED_WRITE;
    head[2..4].copy_from_slice(&(pages.len() as u16).to_le_bytes());
    head[4..8].copy_from_slice(&lane.immediate().to_le_bytes());
    head[8..].copy_from_slice(&(payload as u32).to_le_bytes());
    out.extend_from_slice(&head);
    for page in pages {
        let mut entry = [0; PAGE];
        entry[..4].copy_from_slice(&page.destination.0.to_le_bytes());
        entry[4..8].copy_from_slice(&(page.length as u32).to_le_bytes());
        entry[8..].copy_from_slice(&page.destination_offset.to_le_bytes());
        out.extend_from_slice(&entry);
    }
}

/// A well-formed frame's header and page table. The receiver checks the pages against the grants.
#[derive(Debug)]
pub(super) struct Head<'a> {
    pub lane: Lane,
    /// Bytes in all pages.
    pub payload: u32,
    table: &'a [u8],
}

/// One page in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    pub key: u32,
    pub offset: u64,
    pub length: u32,
}

impl<'a> Head<'a> {
    /// Parses the head at the front of `bytes`: `None` if it is incomplete.
    ///
    /// # Errors
    /// Reason why a frame is malformed.
    pub fn parse(bytes: &'a [u8], rule: PartRule) -> Result<Option<Head<'a>>, String> {
        let mut reader = Reader::new(bytes);
        let header = |reader: &mut Reader<'_>| {
            Some((reader.u8()?, reader.u8()?, reader.u16()?, reader.u32()?, reader.u32()?))
        };
        let Some((kind, flags, pages, immediate, payload)) = header(&mut reader) else {
            return Ok(None);
        };
        if kind != COUNTED_WRITE || flags != 0 {
            return Err(format!(
                "frame of kind {kind} with flags {flags:#x}: unknown kind or flags"
            ));
        }
        if u32::from(pages) > rule.max_pages_per_part {
            let limit = rule.max_pages_per_part;
            return Err(format!("frame of {pages} pages: expected at most {limit}"));
        }
        if u64::from(payload) > rule.max_part_bytes {
            let limit = rule.max_part_bytes;
            return Err(format!("frame of {payload} bytes: expected at most {limit}"));
        }
        let Some(table) = reader.bytes(usize::from(pages) * PAGE) else { return Ok(None) };
        let head = Head { lane: Lane::from_immediate(immediate), payload, table };
        let sum: u64 = head.pages().map(|page| u64::from(page.length)).sum();
        if sum != u64::from(payload) {
            return Err(format!("frame of {payload} bytes: its pages have {sum}"));
        }
        Ok(Some(head))
    }

    /// Head length; the payload follows.
    pub fn len(&self) -> usize {
        HEADER + self.table.len()
    }

    /// Payload destinations, in order.
    pub fn pages(&self) -> impl Iterator<Item = Destination> {
        self.table.chunks_exact(PAGE).filter_map(|entry| {
            let mut reader = Reader::new(entry);
            let (key, length) = (reader.u32()?, reader.u32()?);
            Some(Destination { key, offset: reader.u64()?, length })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::RegionKey;
    use proptest::prelude::*;

    const RULE: PartRule =
        PartRule { max_part_bytes: 1 << 20, max_pages_per_part: MAX_PAGES, ..PartRule::WHOLE };

    fn page() -> impl Strategy<Value = Page> {
        (any::<u32>(), any::<u64>(), 0u64..1 << 12).prop_map(|(key, offset, length)| Page {
            source: RegionKey(0),
            source_offset: 0,
            destination: RegionKey(key),
            destination_offset: offset,
            length,
        })
    }

    proptest! {
        #[test]
        fn frames_survive_the_wire_and_truncated_ones_wait(
            immediate in any::<u32>(),
            pages in prop::collection::vec(page(), 0..20),
        ) {
            let lane = Lane::from_immediate(immediate);
            let mut bytes = Vec::new();
            put_head(&mut bytes, lane, &pages);
            for end in 0..bytes.len() {
                prop_assert!(Head::parse(&bytes[..end], RULE).unwrap().is_none());
            }
            let length = bytes.len();
            bytes.extend([0xee; 7]);
            let head = Head::parse(&bytes, RULE).unwrap().unwrap();
            prop_assert_eq!((head.lane, head.len()), (lane, length));
            let expected: Vec<Destination> = pages
                .iter()
                .map(|p| Destination {
                    key: p.destination.0,
                    offset: p.destination_offset,
                    length: p.length as u32,
                })
                .collect();
            prop_assert_eq!(head.pages().collect::<Vec<_>>(), expected);
        }

        #[test]
        fn garbage_is_rejected_or_waits_without_a_panic(mut bytes in any::<Vec<u8>>()) {
            let _ = TcpAddress::decode(&bytes);
            if let Some(hello) = bytes.first_chunk() {
                let _ = Hello::decode(hello);
            }
            let _ = Head::parse(&bytes, RULE);
            if bytes.len() > 4 {
                // Passes the first checks.
                bytes[..4].copy_from_slice(&[COUNTED_WRITE, 0, 2, 0]);
                let _ = Head::parse(&bytes, RULE);
            }
        }

        #[test]
        fn addresses_survive_the_wire(
            host in any::<Vec<u8>>(),
            limits in any::<(u64, u32, u32)>(),
            ip in any::<IpAddr>(),
            port in any::<u16>(),
            token in any::<Token>(),
        ) {
            let (max_part_bytes, max_pages, streams) = limits;
            let address = TcpAddress { host, max_part_bytes, max_pages, streams, ip };
            let bytes = address.encode();
            prop_assert_eq!(TcpAddress::decode(&bytes), Some(address));
            for end in 0..bytes.len() {
                prop_assert_eq!(TcpAddress::decode(&bytes[..end]), None);
            }
            let introduction = TcpIntroduction { token, port };
            let bytes = introduction.encode();
            prop_assert_eq!(TcpIntroduction::decode(&bytes), Some(introduction));
            prop_assert_eq!(TcpIntroduction::decode(&bytes[1..]), None);
        }

        #[test]
        fn both_ends_of_a_pair_derive_the_smaller_of_each_limit(
            here in any::<(u64, u32, u32)>(),
            there in any::<(u64, u32, u32)>(),
        ) {
            let address = |(max_part_bytes, max_pages, streams)| TcpAddress {
                host: Vec::new(),
                max_part_bytes,
                max_pages,
                streams,
                ip: IpAddr::from([127, 0, 0, 1]),
            };
            let (here, there) = (address(here), address(there));
            let PairRule { parts, streams } = here.pair(&there);
            prop_assert_eq!(there.pair(&here), PairRule { parts, streams });
            prop_assert!(parts.max_part_bytes >= 1 && parts.max_pages_per_part >= 1);
            prop_assert!((1..=MAX_STREAMS).contains(&streams));
            for address in [here, there] {
                prop_assert!(parts.max_part_bytes <= address.max_part_bytes.max(1));
                prop_assert!(parts.max_pages_per_part <= address.max_pages.max(1));
                prop_assert!(streams <= address.streams.max(1));
            }
        }

        #[test]
        fn hellos_survive_the_wire(
            generation in any::<u8>(),
            ranks in any::<(u32, u32, u32)>(),
            token in any::<Token>(),
        ) {
            let (from, to, stream) = ranks;
            let generation = Generation(generation);
            let hello = Hello { generation, role: Role::Dialer, from, to, stream, token };
            prop_assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        }
    }

    #[test]
    fn frames_beyond_the_limits_of_a_pair_are_rejected() {
        let frame = |pages: u16, payload: u32| {
            let mut bytes = vec![COUNTED_WRITE, 0];
            bytes.extend(pages.to_le_bytes());
            bytes.extend([0; 4]);
            bytes.extend(payload.to_le_bytes());
            bytes
        };
        // Rejected by the header, before the table.
        assert!(Head::parse(&frame(257, 0), RULE).is_err());
        assert!(Head::parse(&frame(1, (1 << 20) + 1), RULE).is_err());
        assert!(Head::parse(&frame(0, 1), RULE).is_err());
        assert!(Head::parse(&frame(256, 1 << 20), RULE).unwrap().is_none());
        // Page lengths that do not sum to the payload.
        let mut bytes = frame(1, 5);
        bytes.extend([0; PAGE]);
        assert!(Head::parse(&bytes, RULE).is_err());
        for first in [[0, 0], [2, 0], [COUNTED_WRITE, 1]] {
            let mut bytes = frame(0, 0);
            bytes[..2].copy_from_slice(&first);
            assert!(Head::parse(&bytes, RULE).is_err());
        }
    }
}
