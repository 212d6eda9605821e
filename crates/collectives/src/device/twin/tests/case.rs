//! Test calls: random ones with tensors, and the results by a direct reference over whole vectors.

use super::super::*;
use super::memory::Memory;
use crate::device::message::DeviceOperation;
use crate::device::plan::{CallOptions, DeviceAlgorithm};
use proptest::prelude::*;
use weft_fabric::random::SplitMix64;

/// Byte value around tensors.
const GUARD: u8 = 0xA5;
const GUARD_BYTES: usize = 40;

/// Operation with options, equal on all ranks.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) kind: Kind,
    pub(super) count: u64,
    pub(super) root: u32,
    pub(super) element: Element,
    pub(super) reduction: Reduction,
    pub(super) average: bool,
    pub(super) options: CallOptions,
    /// True if peers may access the tensors.
    pub(super) symmetric: bool,
    pub(super) in_place: bool,
    /// Tensor offset in memory.
    pub(super) shift: usize,
    pub(super) seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce,
    ReduceScatter,
    Reduce,
    AllGather,
    AllToAll,
    AllToAllUneven,
    Broadcast,
    Gather,
    Scatter,
    Barrier,
}

impl Kind {
    pub(super) const ALL: [Kind; 10] = [
        Kind::AllReduce,
        Kind::ReduceScatter,
        Kind::Reduce,
        Kind::AllGather,
        Kind::AllToAll,
        Kind::AllToAllUneven,
        Kind::Broadcast,
        Kind::Gather,
        Kind::Scatter,
        Kind::Barrier,
    ];
}

/// A rank's tensors in one memory: input and output places, and initial and expected bytes.
pub(super) struct Tensors {
    pub(super) memory: Memory,
    pub(super) input: usize,
    pub(super) output: Place,
    pub(super) initial: Vec<u8>,
    pub(super) expected: Vec<u8>,
}

#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) begin: usize,
    pub(super) length: usize,
}

/// Call on all ranks.
pub(super) struct Prepared {
    pub(super) case: Case,
    pub(super) plans: Vec<LaunchPlan>,
    pub(super) tensors: Vec<Tensors>,
}

impl Case {
    /// Elements from `source` to `target` in an uneven exchange.
    pub(super) fn uneven(&self, source: u32, target: u32) -> u64 {
        let pair = u64::from(source) << 32 | u64::from(target);
        match SplitMix64::new(self.seed ^ pair.wrapping_mul(0x9E37_79B9_7F4A_7C15)).below(4) {
            0 => 0,
            1 => self.count,
            _ => SplitMix64::new(self.seed ^ pair).below(self.count + 1),
        }
    }

    pub(super) fn operation(&self, rank: u32, ranks: u32) -> DeviceOperation {
        let (count, root) = (self.count, self.root % ranks);
        match self.kind {
            Kind::AllReduce => DeviceOperation::AllReduce { count },
            Kind::ReduceScatter => DeviceOperation::ReduceScatter { count },
            Kind::Reduce => DeviceOperation::Reduce { count, root },
            Kind::AllGather => DeviceOperation::AllGather { count },
            Kind::AllToAll => DeviceOperation::AllToAll { count },
            Kind::AllToAllUneven => DeviceOperation::AllToAllUneven {
                sent: (0..ranks).map(|peer| self.uneven(rank, peer)).collect(),
                received: (0..ranks).map(|peer| self.uneven(peer, rank)).collect(),
            },
            Kind::Broadcast => DeviceOperation::Broadcast { count, root },
            Kind::Gather => DeviceOperation::Gather { count, root },
            Kind::Scatter => DeviceOperation::Scatter { count, root },
            Kind::Barrier => DeviceOperation::Barrier,
        }
    }

    /// Input and output elements on a rank.
    pub(super) fn counts(&self, rank: u32, ranks: u32) -> (u64, u64) {
        let (count, all) = (self.count, self.count * u64::from(ranks));
        let at_root = |count| if rank == self.root % ranks { count } else { 0 };
        match self.kind {
            Kind::AllReduce => (count, count),
            Kind::ReduceScatter => (all, count),
            Kind::Reduce => (count, at_root(count)),
            Kind::AllGather => (count, all),
            Kind::AllToAll => (all, all),
            Kind::AllToAllUneven => (
                (0..ranks).map(|peer| self.uneven(rank, peer)).sum(),
                (0..ranks).map(|peer| self.uneven(peer, rank)).sum(),
            ),
            Kind::Broadcast => (at_root(count), count),
            Kind::Gather => (count, at_root(all)),
            Kind::Scatter => (at_root(all), count),
            Kind::Barrier => (0, 0),
        }
    }

    /// Expected output on a rank.
    pub(super) fn expected(&self, inputs: &[Vec<u8>], rank: u32) -> Vec<u8> {
        let (ranks, bytes) = (inputs.len() as u32, self.element.bytes() as u64);
        let part = |input: &[u8], index: u32| {
            let begin = (u64::from(index) * self.count * bytes) as usize;
            input[begin..begin + (self.count * bytes) as usize].to_vec()
        };
        let (root, own) = (self.root % ranks, rank as usize);
        let is_root = rank == root;
        match self.kind {
            Kind::AllReduce => self.reduced(inputs),
            Kind::Reduce if is_root => self.reduced(inputs),
            Kind::ReduceScatter => {
                let parts: Vec<_> = inputs.iter().map(|input| part(input, rank)).collect();
                self.reduced(&parts)
            }
            Kind::AllGather => inputs.concat(),
            Kind::Gather if is_root => inputs.concat(),
            Kind::AllToAll => inputs.iter().flat_map(|input| part(input, rank)).collect(),
            Kind::AllToAllUneven => (0..ranks)
                .flat_map(|source| {
                    let before: u64 = (0..rank).map(|target| self.uneven(source, target)).sum();
                    let begin = (before * bytes) as usize;
                    let length = (self.uneven(source, rank) * bytes) as usize;
                    inputs[source as usize][begin..begin + length].to_vec()
                })
                .collect(),
            Kind::Broadcast => inputs[root as usize].clone(),
            Kind::Scatter => part(&inputs[root as usize], own as u32),
            Kind::Reduce | Kind::Gather | Kind::Barrier => Vec::new(),
        }
    }

    pub(super) fn arithmetic(&self) -> (Reduction, Element) {
        match self.reduction.supports(self.element) && !self.average {
            true => (self.reduction, self.element),
            false => (Reduction::Sum, self.element),
        }
    }

    pub(super) fn reduced(&self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let (reduction, element) = self.arithmetic();
        let mut result = inputs[0].clone();
        let (target, count) = (result.as_mut_ptr(), self.count as usize);
        let sources: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
        match inputs.len() as u32 {
            // SAFETY: `count` elements each; the result is new.
            ranks @ 2.. if self.average => unsafe {
                average_all(element, target, &sources, count, ranks);
            },
            // SAFETY: as above.
            _ => unsafe { combine_all(reduction, element, target, &sources, count) },
        }
        result
    }

    pub(super) fn tensors(&self, inputs: &[Vec<u8>], rank: u32) -> Tensors {
        let (ranks, input) = (inputs.len() as u32, &inputs[rank as usize]);
        let bytes = self.element.bytes();
        let output = self.counts(rank, ranks).1 as usize * bytes;
        let own_part = rank as usize * self.count as usize * bytes;
        // Offsets in a common range, where either the input or the output is a part.
        let (input_at, output_at) = match self.kind {
            _ if !self.in_place || input.is_empty() || output == 0 => {
                (0, input.len() + GUARD_BYTES)
            }
            Kind::AllToAll | Kind::AllToAllUneven => (0, input.len() + GUARD_BYTES),
            Kind::AllGather | Kind::Gather => (own_part, 0),
            Kind::ReduceScatter | Kind::Scatter => (0, own_part),
            _ => (0, 0),
        };
        let begin = GUARD_BYTES + self.shift;
        let end = (input_at + input.len()).max(output_at + output);
        let mut initial = vec![GUARD; begin + end + GUARD_BYTES];
        let (input_at, output_at) = (begin + input_at, begin + output_at);
        initial[input_at..input_at + input.len()].copy_from_slice(input);
        let mut expected = initial.clone();
        expected[output_at..output_at + output].copy_from_slice(&self.expected(inputs, rank));
        let output = Place { begin: output_at, length: output };
        Tensors { memory: Memory::of(&initial), input: input_at, output, initial, expected }
    }

    pub(super) fn prepare(&self, layout: &Layout) -> Prepared {
        let mut random = SplitMix64::new(self.seed);
        let bytes = self.element.bytes() as u64;
        let inputs: Vec<Vec<u8>> = (0..layout.ranks)
            .map(|rank| {
                let length = self.counts(rank, layout.ranks).0 * bytes;
                let mut input: Vec<u8> = (0..length.div_ceil(8))
                    .flat_map(|_| random.below(u64::MAX).to_ne_bytes())
                    .collect();
                input.truncate(length as usize);
                input
            })
            .collect();
        let plan = |rank: u32| {
            let operation = self.operation(rank, layout.ranks);
            let symmetric = self.symmetric && operation.of_peers().is_some();
            let plan =
                |options| LaunchPlan::new(&operation, bytes, rank, layout, options, symmetric);
            // Too long for packets, with unknown length, or without a direct form.
            let any = CallOptions { algorithm: None, ..self.options };
            plan(self.options).or_else(|_| plan(any)).expect("a valid call")
        };
        Prepared {
            case: self.clone(),
            plans: (0..layout.ranks).map(plan).collect(),
            tensors: (0..layout.ranks).map(|rank| self.tensors(&inputs, rank)).collect(),
        }
    }
}

impl Prepared {
    pub(super) fn run(&self, twin: &Twin, rank: usize) {
        let (plan, tensors) = (&self.plans[rank], &self.tensors[rank]);
        let at = |offset: usize| tensors.memory.address + offset as u64;
        let of_ranks = |place: fn(&Tensors) -> usize| {
            let address = |tensors: &Tensors| tensors.memory.address + place(tensors) as u64;
            self.tensors.iter().map(address).collect()
        };
        let of_ranks = TensorsOfRanks {
            inputs: of_ranks(|tensors| tensors.input),
            outputs: of_ranks(|tensors| tensors.output.begin),
            digest: self.case.seed as u32,
        };
        let call = TwinCall {
            plan,
            tensors: Some(&of_ranks),
            input: at(tensors.input),
            output: at(tensors.output.begin),
            element_bytes: self.case.element.bytes() as u64,
            reduction: Some(self.case.arithmetic()),
            divisor: if self.case.average { self.plans.len() as u32 } else { 0 },
        };
        // SAFETY: tensors have the case's lengths, and only this call uses them.
        unsafe { twin.run(&call) };
    }

    pub(super) fn check(&self, rank: usize) {
        let tensors = &self.tensors[rank];
        let found = tensors.memory.bytes(tensors.expected.len());
        if found != tensors.expected {
            let at = (0..found.len()).find(|at| found[*at] != tensors.expected[*at]).unwrap_or(0);
            let Place { begin, length } = tensors.output;
            panic!(
                "rank {rank}, byte {at}, output at {begin}+{length}: {:#x}, not {:#x}: {:?}, {:?}",
                found[at], tensors.expected[at], self.case, self.plans[rank],
            );
        }
    }

    pub(super) fn check_poisoned(&self, rank: usize) {
        let tensors = &self.tensors[rank];
        let mut expected = tensors.initial.clone();
        let Place { begin, length } = tensors.output;
        expected[begin..begin + length].fill(0xFF);
        assert!(tensors.memory.bytes(expected.len()) == expected, "rank {rank}: {:?}", self.case);
    }
}

/// True if peers access tensors.
fn of_peers(algorithm: DeviceAlgorithm) -> bool {
    matches!(algorithm, DeviceAlgorithm::Direct | DeviceAlgorithm::CopyEngine)
}

pub(super) fn plain(kind: Kind, count: u64, algorithm: DeviceAlgorithm) -> Case {
    Case {
        kind,
        count,
        root: 0,
        element: Element::F32,
        reduction: Reduction::Sum,
        average: false,
        options: CallOptions { algorithm: Some(algorithm), ..CallOptions::default() },
        symmetric: of_peers(algorithm),
        in_place: false,
        shift: 0,
        seed: 7,
    }
}

prop_compose! {
    pub(super) fn cases(blocks: u32)(
        kind in prop::sample::select(&Kind::ALL),
        // Short ones, some units, and several rings with small chunks or parts of one with the longest.
        count in prop_oneof![0u64..4, 1u64..100, 100u64..3000, 3000u64..20_000],
        root in 0u32..5,
        element in prop::sample::select(&Element::ALL),
        reduction in prop::sample::select(&Reduction::ALL),
        average in prop::bool::weighted(0.3),
        algorithm in prop::option::of(prop::sample::select(&[
            DeviceAlgorithm::OneShot,
            DeviceAlgorithm::TwoShot,
            DeviceAlgorithm::Direct,
            DeviceAlgorithm::CopyEngine,
        ])),
        symmetric in any::<bool>(),
        num_sms in prop::option::of(1u32..4),
        chunk_bytes in prop::option::of(prop::sample::select(&[16u32, 48, 256, 1024, 4096])),
        in_place in any::<bool>(),
        shift in prop_oneof![Just(0usize), 0usize..17],
        seed in any::<u64>(),
    ) -> Case {
        let num_sms = num_sms.map(|blocks_of_call| blocks_of_call.min(blocks));
        let options = CallOptions { algorithm, num_sms, chunk_bytes, copy_engine: false };
        // At most some thousands of chunks.
        let count = if chunk_bytes.is_some_and(|bytes| bytes < 256) { count.min(2000) } else { count };
        let symmetric = symmetric || algorithm.is_some_and(of_peers);
        Case { kind, count, root, element, reduction, average, options, symmetric, in_place, shift, seed }
    }
}

pub(super) fn sequences() -> impl Strategy<Value = (u32, u32, Vec<Case>, u64)> {
    (1u32..6, 1u32..4).prop_flat_map(|(ranks, blocks)| {
        (Just(ranks), Just(blocks), prop::collection::vec(cases(blocks), 1..8), any::<u64>())
    })
}
