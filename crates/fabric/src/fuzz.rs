//! Fuzz targets: each parser for external bytes as a function that takes arbitrary bytes, for the fuzzer
//! (`fuzz/`) and the tests. A function panics on a violated invariant.

use crate::bytes::{Reader, put_block};
use crate::descriptor::{EngineAddress, Grant};

pub use crate::local::fuzz_address as shm_address;
pub use crate::pair::fuzz as pair;
pub use crate::providers::staged::fuzz_wire as staged_wire;
pub use crate::providers::tcp::{fuzz_stream as tcp_stream, fuzz_wire as tcp_wire};

/// Corpus name and target.
pub type Target = (&'static str, fn(&[u8]));

/// Every target in this crate.
pub const TARGETS: [Target; 7] = [
    ("fabric_bytes", bytes),
    ("fabric_descriptor", descriptor),
    ("fabric_shm_address", shm_address),
    ("fabric_pair", pair),
    ("fabric_staged_wire", staged_wire),
    ("fabric_tcp_wire", tcp_wire),
    ("fabric_tcp_stream", tcp_stream),
];

/// Field reads in the order that the first bytes give stay inside the input.
pub fn bytes(data: &[u8]) {
    let (orders, fields) = data.split_at(data.len().min(8));
    let mut reader = Reader::new(fields);
    let mut read = 0;
    for order in orders {
        let taken = match order % 6 {
            0 => reader.u8().map(|_| 1),
            1 => reader.u16().map(|_| 2),
            2 => reader.u32().map(|_| 4),
            3 => reader.u64().map(|_| 8),
            4 => reader.block().map(|block| 4 + block.len()),
            _ => reader.bytes(usize::from(*order)).map(<[u8]>::len),
        };
        read += taken.unwrap_or(0);
    }
    assert!(read <= fields.len(), "more was read than there is");
    assert!(reader.is_at_end() == (read == fields.len()) || read < fields.len());
    let mut block = Vec::new();
    put_block(&mut block, fields);
    assert_eq!(Reader::new(&block).block(), Some(fields));
}

/// Addresses and grants round-trip through encoding and decoding.
pub fn descriptor(data: &[u8]) {
    if let Ok(address) = EngineAddress::decode(data) {
        assert_eq!(EngineAddress::decode(&address.encode()), Ok(address));
    }
    if let Some(grant) = Grant::decode(data) {
        assert_eq!(grant.encode(), data);
    }
}

#[cfg(test)]
use crate::random::SplitMix64;

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;
