//! Call arguments: array addresses, on a device or on the CPU. 0 is an absent array.

use weft_gpu::layout::c_struct;

/// Dispatch inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DispatchInputs {
    /// `[given, hidden]` in the token type.
    pub tokens: u64,
    /// `[given, scales]`, if tokens come with scales.
    pub scales: u64,
    /// `[given, top_k]` expert ids; a negative one means none.
    pub ids: u64,
    /// `[given, top_k]` float32; without them every weight is 1.
    pub weights: u64,
    /// One int32: the valid token count, at most `given`. Without it all `given` tokens are valid.
    pub count: u64,
    /// Array rows, at most `max_tokens`.
    pub given: u32,
    /// Layer whose replicas the tokens go to; 0 without maps.
    pub layer: u32,
}

/// Dispatch outputs, with one row for each position unless stated otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DispatchOutputs {
    /// `[positions, hidden]` in the wire type; absent in the indexed layout.
    pub tokens: u64,
    /// `[positions, scales]`; absent in the indexed layout.
    pub scales: u64,
    /// `[local experts]` int32: token count for each expert.
    pub counts: u64,
    /// `[local experts + 1]` int32: start of each expert's group, and the end of the last, for example
    /// `[0, 48, 56, 64]`. In the dense layout `[ranks + 1]`: start of each source's rows, and the end of
    /// the last.
    pub offsets: u64,
    /// `[positions]` int32: the row, `source * max_tokens + slot`, or -1 for padding. In the dense layout
    /// `[positions, top_k]` in the id type: local experts, -1 for none on this rank.
    pub rows: u64,
    /// `[positions]` float32: the router's weight, 0 for padding. In the dense layout `[positions, top_k]`.
    pub weights: u64,
    /// `[positions]` int32, optional: local expert, -1 for padding and behind the last group; all -1 in the
    /// dense layout, whose rows have several experts.
    pub experts: u64,
    /// `[physical experts]` on all ranks, optional: token counts for this rank's experts are added to the
    /// matching elements.
    pub load: u64,
    /// Bytes per `load` element: 4 or 8.
    pub load_bytes: u32,
}

/// Arrays for combine receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CombineOutputs {
    /// `[given, hidden]` in the output type.
    pub combined: u64,
    /// Arrays with the same shape, or 0, which are added to the sums in float32, in this order, before the
    /// result is rounded. The last may be `combined` itself, with the previous content.
    pub added: [u64; 3],
    /// As in [`DispatchInputs`].
    pub count: u64,
    /// As in [`DispatchInputs`].
    pub given: u32,
}

/// Plan location for a round: token slots, and positions of received rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanLocation {
    /// Address of [`ChannelLayout::plan_bytes`](crate::device::ChannelLayout::plan_bytes) bytes on the
    /// device, aligned to 16. 0 is the channel's own memory, which the next round overwrites. Equal in all
    /// calls of a round.
    pub address: u64,
    /// True if an earlier round made the plan: dispatch then reads no ids, weights or counts, and writes no
    /// counts, offsets, rows or weights.
    pub kept: bool,
}

/// A round's counts at a rank, before the layout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    /// Token count for each local expert.
    pub experts: Vec<u32>,
    /// Start of each expert's group, then the end of the last.
    pub offsets: Vec<u32>,
    /// Room that is needed, if it exceeds the available room; otherwise 0.
    pub needed: u32,
}

/// Key for a plan that round `epoch` makes on the channel with this number; nonzero.
pub(crate) fn plan_key(number: u32, epoch: u32) -> u32 {
    ((number.wrapping_mul(0x9E37_79B1) ^ epoch) & !KEPT).max(1)
}

/// Flag in a line of counts: it holds a kept plan's key in place of counts.
pub(crate) const KEPT: u32 = 1 << 31;

weft_gpu::layout! {
    /// Argument for every kernel, behind `u64 peer[RANKS]`: channel 0 of each rank, as mapped on this rank.
    pub struct ArgumentBlock {
        table: u64, "this rank's domain table";
        record: u64, "address of the device records";
        abort: u64, "address of the abort word, with which the host ends all waits";
        tokens: u64, "dispatch send: DispatchInputs in Rust";
        scales: u64, "likewise";
        ids: u64, "likewise";
        weights: u64, "likewise";
        count: u64, "likewise; combine receive too";
        out_tokens: u64, "dispatch receive: DispatchOutputs in Rust";
        out_scales: u64, "likewise";
        out_counts: u64, "likewise";
        out_offsets: u64, "likewise";
        out_rows: u64, "likewise";
        out_weights: u64, "likewise";
        out_experts: u64, "likewise, or 0";
        out_load: u64, "likewise, or 0";
        load_bytes: u64, "per out_load element";
        outputs: u64, "combine send: positions x hidden in the combine type";
        combined: u64, "combine receive: CombineOutputs in Rust";
        added: [u64; 3], "likewise";
        map: u64, "dispatch send: the layer's replica table, or 0";
        plan: u64, "this round's plan: PlanLocation in Rust; 0: in the channel";
        rank: u32, "this rank";
        channel: u32, "the channel";
        given: u32, "tokens in dispatch send, and in combine receive";
        release: u32, "nonzero if combine only releases the rows";
        kept: u32, "nonzero if an earlier round made the plan";
        number: u32, "channel number among all channels in the domain";
        positions: u64, "rows in this call's position arrays";
    }
}

/// Words in the block.
pub(crate) const WORDS: usize = ArgumentBlock::SIZE / 8;

impl ArgumentBlock {
    /// With a call's arguments.
    #[inline]
    pub(crate) fn of_call(
        self,
        inputs: &DispatchInputs,
        received: &DispatchOutputs,
        combined: &CombineOutputs,
    ) -> Self {
        let CombineOutputs { combined, added, .. } = *combined;
        let DispatchInputs { tokens, scales, ids, weights, count, given, layer: _ } = *inputs;
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
            out_experts: received.experts,
            out_load: received.load,
            load_bytes: received.load_bytes.into(),
            combined,
            added,
            ..self
        }
    }

    /// As words in the kernel argument.
    #[inline]
    pub(crate) fn words(&self) -> [u64; WORDS] {
        let bytes = self.bytes();
        let (words, _) = bytes.as_chunks::<8>();
        std::array::from_fn(|word| u64::from_ne_bytes(words[word]))
    }
}

/// The header `moe/arguments.cuh`.
pub fn arguments_header() -> String {
    let peers = "    u64 peer[RANKS]; // channel 0 of every rank, as mapped on this rank\n";
    format!(
        "// Argument for all kernels. Generated from crates/moe/src/device/abi/arguments.rs; a test compares the two.\n\
         #pragma once\n#include \"weft/ptx.cuh\"\n\nnamespace weft::moe {{\n\n\
         constexpr u32 RANKS = WEFT_RANKS;\n\n{}\
         static_assert(sizeof(Arguments) == 8 * RANKS + {}, \"the size in Rust\");\n\n\
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
        let inputs = DispatchInputs {
            tokens: 31,
            scales: 32,
            ids: 33,
            weights: 34,
            count: 35,
            given: 5,
            layer: 0,
        };
        let received = DispatchOutputs {
            tokens: 41,
            scales: 42,
            counts: 43,
            offsets: 44,
            rows: 45,
            weights: 46,
            experts: 47,
            load: 48,
            load_bytes: 4,
        };
        let fixed = ArgumentBlock { table: 20, record: 21, abort: 22, ..ArgumentBlock::default() };
        let combined = CombineOutputs { combined: 52, added: [53, 54, 55], count: 35, given: 5 };
        let block = ArgumentBlock {
            outputs: 51,
            map: 56,
            plan: 58,
            rank: 1,
            channel: 2,
            release: 1,
            kept: 3,
            number: 4,
            positions: 57,
            ..fixed
        };
        let mut expected = vec![20, 21, 22, 31, 32, 33, 34, 35, 41, 42, 43, 44, 45, 46, 47];
        expected.extend([48, 4, 51, 52, 53, 54, 55, 56, 58]);
        expected.extend([1 | 2 << 32, 5 | 1 << 32, 3 | 4 << 32, 57]);
        assert_eq!(block.of_call(&inputs, &received, &combined).words(), expected[..]);
    }
}
