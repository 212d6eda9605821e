//! Packing: a write's rows copied into one page, for routes whose parts take few pages, such as one or four.
//!
//! A row write has two destination areas, and the tokens come from anywhere in the user's array: a page for
//! the records and a page for each token. If a part takes one page, or four, each row or two would need a
//! part and an immediate. On such a route the sender copies the tokens to a staging buffer, followed by the
//! records, and writes both as one page; the receiver's slots have room for the records behind the tokens.
//! Both ends derive the choice from the route's rule and the row count.

use crate::area::Area;
use crate::shape::Shape;
use weft_fabric::PartRule;

/// Parts with at least this many pages are filled from the user's array. A page is at least a token, so such
/// parts are long enough, and a copy would only add latency.
const MANY_PAGES: u32 = 16;

/// Alignment for packed writes in the staging buffer, in bytes.
pub(crate) const ALIGNMENT: u64 = 64;

/// True if a write with `rows` rows, at least one, is packed on a route with this rule.
pub(crate) fn is_packed(parts: PartRule, rows: usize) -> bool {
    // One page for each row, and one for the records.
    parts.max_pages_per_part < MANY_PAGES && rows >= parts.max_pages_per_part as usize
}

/// Packed write size in bytes: tokens at the slot stride, then the records.
pub(crate) fn packed_bytes(shape: &Shape, rows: usize) -> u64 {
    rows as u64 * (stride(shape, Area::Tokens) + stride(shape, Area::Metadata))
}

/// Number of times that `rows` rows raise the rows lane: one write for the private rows, one for the
/// remainder.
pub(crate) fn raises_of_rows(shape: &Shape, parts: PartRule, rows: u32) -> u64 {
    let write = |rows: u32| match rows as usize {
        0 => 0,
        rows if is_packed(parts, rows) => parts.count_contiguous(packed_bytes(shape, rows)),
        rows => {
            let records = std::iter::once(rows as u64 * stride(shape, Area::Metadata));
            parts.count(records.chain(std::iter::repeat_n(shape.token_bytes() as u64, rows)))
        }
    };
    let private = rows.min(shape.config().private_rows);
    write(private) + write(rows - private)
}

/// Staging buffer size for a channel in bytes, for peers over routes with these rules; 0 if none packs.
pub(crate) fn staging_bytes(shape: &Shape, routes: impl Iterator<Item = PartRule>) -> u128 {
    let packing = routes.filter(|parts| parts.max_pages_per_part < MANY_PAGES).count() as u32;
    let config = shape.config();
    // A token goes at most once to each rank.
    let copies = packing.min(config.top_k).min(shape.placement().owners());
    let row = u128::from(packed_bytes(shape, 1));
    let rows = u128::from(config.max_tokens) * u128::from(copies);
    // Each rank's private rows and remainder begin at a multiple of the alignment.
    rows * row + 2 * u128::from(packing) * u128::from(ALIGNMENT)
}

fn stride(shape: &Shape, area: Area) -> u64 {
    shape.sizes().extent(area).stride.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elements::dtype::DType;
    use crate::shape::config::Config;

    const MIB: u64 = 1 << 20;

    fn rule(max_pages_per_part: u32) -> PartRule {
        PartRule { max_part_bytes: MIB, max_pages_per_part, ..PartRule::WHOLE }
    }

    /// Tokens in a decode step: 7168 bfloat16 elements, top-8 from 256 experts on 32 ranks.
    fn shape(private_rows: u32) -> Shape {
        let config = Config::new(32, 0, 256, 8).sized(128, 7168).dtype(DType::BF16);
        Shape::new(Config { private_rows, ..config }).unwrap()
    }

    #[test]
    fn decode_batches_are_at_most_two_parts_of_rows() {
        let shape = shape(64);
        // 68-byte records: 72 rows fit into 1 MiB.
        assert_eq!(packed_bytes(&shape, 72), 1_037_088);
        for pages in [1, 4] {
            for rows in 1..=128 {
                let raises = raises_of_rows(&shape, rule(pages), rows);
                assert_eq!(raises, 1 + u64::from(rows > 64), "{rows} rows");
            }
        }
        let most_private = self::shape(128);
        assert_eq!(raises_of_rows(&most_private, rule(1), 72), 1);
        assert_eq!(raises_of_rows(&most_private, rule(1), 73), 2);
    }

    #[test]
    fn writes_that_fit_into_one_part_of_few_pages_and_routes_of_many_are_not_packed() {
        assert!(is_packed(rule(1), 1) && is_packed(rule(4), 4));
        assert!(!is_packed(rule(4), 3), "three rows and their records are four pages");
        for many in [MANY_PAGES, 256, u32::MAX] {
            assert!(!is_packed(rule(many), 100_000));
        }
        assert_eq!(staging_bytes(&shape(32), [256, u32::MAX].map(rule).into_iter()), 0);
        let row = u128::from(packed_bytes(&shape(32), 1));
        let of_three = staging_bytes(&shape(32), [1, 4, 256, 1].map(rule).into_iter());
        assert_eq!(of_three, 3 * 128 * row + 6 * 64);
        let of_all = staging_bytes(&shape(32), std::iter::repeat_n(rule(1), 31));
        assert_eq!(of_all, 8 * 128 * row + 62 * 64);
    }
}
