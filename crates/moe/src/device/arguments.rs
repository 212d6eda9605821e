//! What calls are given: addresses, on a device or on the CPU alike. 0 is an array that is not given.

use weft_gpu::layout::c_struct;

/// Inputs of dispatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DispatchInputs {
    /// `[given, hidden]` of the token type.
    pub tokens: u64,
    /// `[given, scales]`, if tokens come with scales.
    pub scales: u64,
    /// `[given, top_k]` expert ids; a negative one means none.
    pub ids: u64,
    /// `[given, top_k]` float32; without them every weight is 1.
    pub weights: u64,
    /// One int32: tokens that exist, of those given. Without it all do.
    pub count: u64,
    /// Rows of the arrays, at most `max_tokens`.
    pub given: u32,
}

/// Outputs of dispatch, of as many rows as there are positions unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DispatchOutputs {
    /// `[positions, hidden]` as tokens travel; not in the indexed layout.
    pub tokens: u64,
    /// `[positions, scales]`; not in the indexed layout.
    pub scales: u64,
    /// `[local experts]` int32: tokens of each expert.
    pub counts: u64,
    /// `[local experts + 1]` int32: where each expert's group begins, and the end of the last.
    pub offsets: u64,
    /// `[positions]` int32: the row, `source * max_tokens + slot`, or -1 for padding.
    pub rows: u64,
    /// `[positions]` float32: the router's weight, 0 for padding.
    pub weights: u64,
}

weft_gpu::layout! {
    /// The one argument of every kernel, behind `u64 peer[RANKS]`: channel 0 of every rank, as mapped here.
    pub struct ArgumentBlock {
        table: u64, "the table of this rank's domain";
        record: u64, "where records are written";
        abort: u64, "the word with which the host ends all waits";
        tokens: u64, "of dispatch send, as DispatchInputs in Rust says";
        scales: u64, "likewise";
        ids: u64, "likewise";
        weights: u64, "likewise";
        count: u64, "likewise; of combine receive too";
        out_tokens: u64, "of dispatch receive, as DispatchOutputs in Rust says";
        out_scales: u64, "likewise";
        out_counts: u64, "likewise";
        out_offsets: u64, "likewise";
        out_rows: u64, "likewise";
        out_weights: u64, "likewise";
        outputs: u64, "of combine send: positions x hidden in the combine type";
        combined: u64, "of combine receive: given x hidden in the output type";
        rank: u32, "this rank";
        channel: u32, "the channel";
        given: u32, "tokens of dispatch send, and of combine receive";
        release: u32, "whether combine only gives the rows back";
    }
}

/// Words of the block.
pub(super) const WORDS: usize = ArgumentBlock::SIZE / 8;

impl ArgumentBlock {
    /// With what a call was given.
    #[inline]
    pub(super) fn of_call(self, inputs: &DispatchInputs, received: &DispatchOutputs) -> Self {
        let DispatchInputs { tokens, scales, ids, weights, count, given } = *inputs;
        ArgumentBlock {
            tokens,
            scales,
            ids,
            weights,
            count,
            given,
            out_tokens: received.tokens,
            out_scales: received.scales,
            out_counts: received.counts,
            out_offsets: received.offsets,
            out_rows: received.rows,
            out_weights: received.weights,
            ..self
        }
    }

    /// As the kernels get it.
    #[inline]
    pub(super) fn words(&self) -> [u64; WORDS] {
        let bytes = self.bytes();
        let (words, _) = bytes.as_chunks::<8>();
        std::array::from_fn(|word| u64::from_ne_bytes(words[word]))
    }
}

/// The header `moe/arguments.cuh`.
pub fn arguments_header() -> String {
    let peers = "    u64 peer[RANKS]; // channel 0 of every rank, as mapped here\n";
    format!(
        "// The argument of all kernels. Generated from crates/moe/src/device/arguments.rs; a test compares the two.\n\
         #pragma once\n#include \"weft/ptx.cuh\"\n\nnamespace weft::moe {{\n\n\
         constexpr u32 RANKS = WEFT_RANKS;\n\n{}\
         static_assert(sizeof(Arguments) == 8 * RANKS + {}, \"as it is declared in Rust\");\n\n\
         }} // namespace weft::moe\n",
        c_struct("Arguments", peers, ArgumentBlock::FIELDS),
        ArgumentBlock::SIZE,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::SOURCES;

    #[test]
    fn the_header_is_the_one_that_kernels_include() {
        let listed = SOURCES.iter().find(|(path, _)| *path == "moe/arguments.cuh");
        let expected = arguments_header();
        assert_eq!(
            listed.map(|(_, text)| *text),
            Some(expected.as_str()),
            "write this to crates/moe/kernels/moe/arguments.cuh:\n{expected}"
        );
    }

    #[test]
    fn every_array_of_a_call_has_a_place_of_its_own() {
        let inputs =
            DispatchInputs { tokens: 31, scales: 32, ids: 33, weights: 34, count: 35, given: 5 };
        let received = DispatchOutputs {
            tokens: 41,
            scales: 42,
            counts: 43,
            offsets: 44,
            rows: 45,
            weights: 46,
        };
        let fixed = ArgumentBlock { table: 20, record: 21, abort: 22, ..ArgumentBlock::default() };
        let block =
            ArgumentBlock { outputs: 51, combined: 52, rank: 1, channel: 2, release: 1, ..fixed };
        let mut expected = vec![20, 21, 22, 31, 32, 33, 34, 35, 41, 42, 43, 44, 45, 46, 51, 52];
        expected.extend([1 | 2 << 32, 5 | 1 << 32]);
        assert_eq!(block.of_call(&inputs, &received).words(), expected[..]);
    }
}
