//! What calls are given: addresses, on a device or on the CPU alike. 0 is an array that is not given.

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

/// The one argument of every kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    /// Channel 0 of every rank, as mapped here.
    pub peers: Vec<u64>,
    /// The table of this rank's domain.
    pub table: u64,
    /// Where records are written.
    pub record: u64,
    /// The word with which the host ends all waits.
    pub abort: u64,
    /// Of dispatch send; the number of tokens also of combine receive.
    pub inputs: DispatchInputs,
    /// Of dispatch receive.
    pub received: DispatchOutputs,
    /// Of combine send: `[positions, hidden]` in the combine type.
    pub outputs: u64,
    /// Of combine receive: `[given, hidden]` in the output type.
    pub combined: u64,
    /// This rank.
    pub rank: u32,
    /// The channel.
    pub channel: u32,
    /// Whether combine only gives the rows back.
    pub release: bool,
}

impl Arguments {
    /// The argument as the kernels' struct `MoeArguments` lays it out, little-endian.
    pub fn encode(&self) -> Vec<u64> {
        let DispatchInputs { tokens, scales, ids, weights, count, given } = self.inputs;
        let received = &self.received;
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let mut words = self.peers.clone();
        words.extend([self.table, self.record, self.abort, tokens, scales, ids, weights, count]);
        words.extend([received.tokens, received.scales, received.counts]);
        words.extend([received.offsets, received.rows, received.weights]);
        words.extend([self.outputs, self.combined]);
        words.extend([pair(self.rank, self.channel), pair(given, self.release.into())]);
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_struct_of_the_kernels_is_the_peers_and_eighteen_words() {
        let arguments = Arguments {
            peers: vec![11, 12],
            table: 20,
            record: 21,
            abort: 22,
            inputs: DispatchInputs {
                tokens: 31,
                scales: 32,
                ids: 33,
                weights: 34,
                count: 35,
                given: 5,
            },
            received: DispatchOutputs {
                tokens: 41,
                scales: 42,
                counts: 43,
                offsets: 44,
                rows: 45,
                weights: 46,
            },
            outputs: 51,
            combined: 52,
            rank: 1,
            channel: 2,
            release: true,
        };
        let mut expected =
            vec![11, 12, 20, 21, 22, 31, 32, 33, 34, 35, 41, 42, 43, 44, 45, 46, 51, 52];
        expected.extend([1 | 2 << 32, 5 | 1 << 32]);
        assert_eq!(arguments.encode(), expected);
    }
}
