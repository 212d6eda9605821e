//! Kernel argument, declared once for the host and all kernels.

use super::message::Message;
use std::fmt::Write as _;
use std::iter::repeat;
use weft_gpu::layout;
use weft_gpu::layout::c_struct;
use weft_gpu::table::MAX_RANKS;

layout! {
    /// The part that does not depend on the rank count.
    pub struct ArgumentBlock {
        table: u64, "domain table";
        record: u64, "failure records, in pinned memory";
        abort: u64, "word by which the host ends all waits";
        input: u64, "tensor that is sent";
        output: u64, "tensor that is written";
        rank: u32, "this rank";
        element_bytes: u32, "bytes per element: 1, 2, 4 or 8";
        aligned: u32, "nonzero if both tensors and all messages in them start at multiples of 16";
        same_for_all: u32, "nonzero if all peers are sent the same bytes";
        units_per_block: u32, "by packets: message units per block";
        chunk_bytes: u32, "by chunks: bytes per chunk, a multiple of 16";
        divisor: u32, "rank count for an average, or 0";
        digest: u32, "direct calls: call digest, equal on all ranks";
    }
}

/// Words in the longest argument.
pub(super) const MAX_WORDS: usize = MAX_RANKS * (3 + MESSAGE_WORDS) + ArgumentBlock::SIZE / 8;

const MESSAGE_WORDS: usize = size_of::<Message>() / 8;

/// More than 4096 bytes, for more than 62 ranks, need a CUDA 12.1 driver or later.
const _: () = assert!(MAX_WORDS * 8 <= 32764, "the limit of a kernel's argument");

/// Tensors in a direct call at all ranks, by rank, as mapped on this rank. Tensors that peers do not access are this
/// rank's own, or missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorsOfRanks {
    /// Inputs.
    pub inputs: Vec<u64>,
    /// Outputs.
    pub outputs: Vec<u64>,
    /// Call digest, equal on all ranks.
    pub digest: u32,
}

/// Launch argument as words: memory and tensors on all ranks, messages, block.
pub(super) fn argument(
    peers: &[u64],
    tensors: Option<&TensorsOfRanks>,
    messages: &[Message],
    block: &ArgumentBlock,
) -> [u64; MAX_WORDS] {
    let mut words = [0; MAX_WORDS];
    let bytes = block.bytes();
    let (block, _) = bytes.as_chunks::<8>();
    let of_message = |message: &Message| {
        let Message { send_at, send_bytes, receive_at, receive_bytes, longer } = *message;
        [send_at, send_bytes, receive_at, receive_bytes, longer]
    };
    let (inputs, outputs): (&[u64], &[u64]) =
        tensors.map_or((&[], &[]), |tensors| (&tensors.inputs, &tensors.outputs));
    let padded = |all| <[u64]>::iter(all).copied().chain(repeat(0)).take(peers.len());
    let all = peers.iter().copied().chain(padded(inputs)).chain(padded(outputs));
    let all = all.chain(messages.iter().flat_map(of_message));
    let all = all.chain(block.iter().map(|word| u64::from_ne_bytes(*word)));
    words.iter_mut().zip(all).for_each(|(to, word)| *to = word);
    words
}

/// The header `collectives/arguments.cuh`.
pub fn arguments_header() -> String {
    let mut message = String::new();
    for (name, about) in [
        ("send_at", "begin in the input"),
        ("send_bytes", "bytes to the rank"),
        ("receive_at", "begin in the output"),
        ("receive_bytes", "bytes from the rank"),
        ("longer", "bytes in the pair's longer direction"),
    ] {
        // Writing to a string does not fail.
        let _ = writeln!(message, "    u64 {name}; // {about}");
    }
    let arrays = "    u64 peer[RANKS]; // every rank's memory, as mapped on this rank\n    u64 \
                  input_of[RANKS]; // direct calls: every rank's input that peers read, as \
                  mapped on this rank\n    u64 output_of[RANKS]; // direct calls: every rank's \
                  output that peers write\n    Message message[RANKS]; // bytes exchanged with \
                  each rank; for this rank: copied, or its own contribution\n";
    format!(
        "// Kernel argument. Generated from crates/collectives/src/device/arguments.rs; a test \
         compares the two.\n#pragma once\n#include \"weft/ptx.cuh\"\n\nnamespace \
         weft::collectives {{\n\nconstexpr u32 RANKS = WEFT_RANKS;\n\nstruct Message \
         {{\n{message}}};\n\n{}static_assert(sizeof(Arguments) == {} * RANKS + {}, \"the size \
         in Rust\");\n\n}} // namespace weft::collectives\n",
        c_struct("Arguments", arrays, ArgumentBlock::FIELDS),
        8 * (3 + MESSAGE_WORDS),
        ArgumentBlock::SIZE,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_the_one_that_kernels_include() {
        let listed =
            crate::device::SOURCES.iter().find(|(path, _)| *path == "collectives/arguments.cuh");
        let expected = arguments_header();
        assert_eq!(
            listed.map(|(_, text)| *text),
            Some(expected.as_str()),
            "write this to crates/collectives/kernels/collectives/arguments.cuh:\n{expected}"
        );
    }

    #[test]
    fn words_follow_in_the_order_of_the_struct() {
        let message = |n| Message {
            send_at: n,
            send_bytes: n + 1,
            receive_at: n + 2,
            receive_bytes: n + 3,
            longer: n + 4,
        };
        let block =
            ArgumentBlock { table: 70, rank: 1, element_bytes: 2, ..ArgumentBlock::default() };
        let tensors = TensorsOfRanks { inputs: vec![7, 8], outputs: Vec::new(), digest: 0 };
        let words = argument(&[5, 6], Some(&tensors), &[message(10), message(20)], &block);
        let expected =
            [5, 6, 7, 8, 0, 0, 10, 11, 12, 13, 14, 20, 21, 22, 23, 24, 70, 0, 0, 0, 0, 1 | 2 << 32];
        assert_eq!(words[..expected.len()], expected);
    }
}
