//! A layer's replica table, from which kernels and twin take a token's physical expert; and the maps in use.
//!
//! A 16-byte head, whose first four bytes are the table's generation; then for each logical expert
//! [`MOST_REPLICAS`] 16-bit physical experts: its replicas, round robin. So a kernel needs one load and no
//! division.

use crate::shape::expert_map::{ExpertMap, MOST_REPLICAS};

/// Bytes before the first expert's entries.
pub(crate) const HEAD: u64 = 16;
/// Bits in a row count to a rank; the generation is in the bits above, in the same packet.
pub(crate) const ROWS_BITS: u32 = 17;
/// Generation bits there. The packet's highest bit is 0.
const GENERATION_BITS: u32 = 31 - ROWS_BITS;

/// Table size in bytes for `experts` logical experts.
pub(crate) fn table_bytes(experts: u32) -> u64 {
    HEAD + 2 * u64::from(experts) * u64::from(MOST_REPLICAS)
}

/// Offset to the physical expert that `rank` uses for `expert` and token number `token`.
pub(crate) fn turn_at(expert: u32, rank: u32, token: u32) -> u64 {
    let turn = rank.wrapping_add(token) % MOST_REPLICAS;
    HEAD + 2 * (u64::from(expert) * u64::from(MOST_REPLICAS) + u64::from(turn))
}

/// Table for `map` in `generation`, reduced to the packet's bits.
pub(crate) fn table(map: &ExpertMap, generation: u32) -> Vec<u8> {
    let mut bytes = vec![0; HEAD as usize];
    let shown = generation % (1 << GENERATION_BITS);
    bytes[..4].copy_from_slice(&shown.to_ne_bytes());
    for expert in 0..map.experts() {
        for turn in 0..MOST_REPLICAS {
            // Physical experts fit into 16 bits.
            bytes.extend((map.choose(expert, 0, turn) as u16).to_ne_bytes());
        }
    }
    bytes
}

/// Maps in use, one for each layer.
pub(crate) struct LayerMaps {
    pub(crate) current: Vec<ExpertMap>,
    /// Number of tables written so far. Each table has a number, equal on every rank, so that kernels detect
    /// ranks that dispatch by different tables.
    pub(crate) generation: u32,
}

impl LayerMaps {
    pub fn new(maps: &[ExpertMap]) -> LayerMaps {
        LayerMaps { current: maps.to_vec(), generation: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_holds_every_choice() {
        let map = ExpertMap::new(3, &[vec![0, 2], vec![1, 0, 0]]).unwrap();
        let table = table(&map, 7);
        assert_eq!(table.len() as u64, table_bytes(3));
        assert_eq!(table[..4], 7u32.to_ne_bytes());
        for (expert, rank, token) in [(0, 0, 0), (0, 1, 4), (2, 63, 65535), (1, 5, 64), (0, 3, 62)]
        {
            let at = turn_at(expert, rank, token) as usize;
            let physical = u16::from_ne_bytes([table[at], table[at + 1]]);
            assert_eq!(u32::from(physical), map.choose(expert, rank, token));
        }
    }

    #[test]
    fn a_generation_stands_above_all_rows_and_below_the_highest_bit() {
        const { assert!(1u64 << ROWS_BITS > 1 << 16, "tokens of a batch") };
        let map = ExpertMap::new(1, &[vec![0]]).unwrap();
        let shown = |generation| {
            let table = table(&map, generation);
            u32::from_ne_bytes(table[..4].try_into().unwrap()) << ROWS_BITS >> ROWS_BITS
        };
        assert_eq!(shown(u32::MAX), (1 << 14) - 1);
        assert_eq!((shown(1), shown(2), shown(1 << 14)), (1, 2, 0));
    }
}
