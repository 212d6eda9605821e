//! Tests of the twin: ranks as threads, against a direct reference over whole vectors.

use super::*;
use crate::device::message::DeviceOperation;
use crate::device::plan::{CallOptions, DeviceAlgorithm, Kernel};
use proptest::prelude::*;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};
use weft_fabric::random::SplitMix64;
use weft_gpu::Watch;
use weft_gpu::table::{TABLE_BYTES, Word};

/// Value of bytes around tensors.
const GUARD: u8 = 0xA5;
const GUARD_BYTES: usize = 40;

/// Zeroed words, aligned to 8 bytes, by address.
struct Memory {
    words: Vec<u64>,
    address: u64,
}

impl Memory {
    fn new(bytes: usize) -> Memory {
        let mut words = vec![0u64; bytes.div_ceil(8)];
        let address = words.as_mut_ptr().expose_provenance() as u64;
        Memory { words, address }
    }

    fn of(bytes: &[u8]) -> Memory {
        let memory = Memory::new(bytes.len());
        memory.raw().write(0, bytes);
        memory
    }

    fn raw(&self) -> RawMemory<'_> {
        // SAFETY: the vector's bytes, exposed in `new`; the protocol and joins of threads exclude races.
        unsafe { RawMemory::new(self.address, 8 * self.words.len() as u64) }
    }

    fn bytes(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.raw().read(0, &mut bytes);
        bytes
    }
}

struct Rank {
    twin: Twin,
    /// Behind a pointer: its address stays valid when a rank moves.
    watch: Arc<Watch>,
    table: Memory,
}

struct Group {
    layout: Layout,
    heaps: Vec<Memory>,
    ranks: Vec<Rank>,
}

impl Group {
    fn new(ranks: u32, blocks: u32) -> Group {
        let layout = Layout::new(ranks, blocks);
        let heaps: Vec<Memory> = (0..ranks).map(|_| Memory::new(layout.bytes as usize)).collect();
        let peers: Vec<u64> = heaps.iter().map(|heap| heap.address).collect();
        let rank = |rank| {
            let (watch, table) = (Arc::new(Watch::on_host()), Memory::new(TABLE_BYTES as usize));
            let (record, abort) = (watch.record_address(), watch.abort_address());
            // SAFETY: memory and watch live as long as the group.
            let twin =
                unsafe { Twin::new(layout, rank, peers.clone(), table.address, record, abort) };
            twin.watch.set_limit(Duration::from_secs(60));
            Rank { twin, watch, table }
        };
        Group { layout, ranks: (0..ranks).map(rank).collect(), heaps }
    }

    fn set_limit(&self, limit: Duration) {
        self.ranks.iter().for_each(|rank| rank.twin.watch.set_limit(limit));
    }

    /// State as after that many calls: epochs and sequence numbers, with the flags of the latter.
    fn set_state(&self, epoch: u32, sequence: u32) {
        let layout = self.layout;
        for heap in &self.heaps {
            let set = |at: u64, value| heap.raw().word(at).store(value, Relaxed);
            for block in 0..layout.blocks {
                set(layout.epoch(block), epoch);
                for (ring, peer) in
                    (0..2).flat_map(|ring| (0..layout.ranks).map(move |peer| (ring, peer)))
                {
                    set(layout.sequence(ring, block, peer), sequence);
                    set(layout.flag(ring, block, peer), sequence);
                }
            }
        }
    }

    /// Runs the calls on the named ranks, each a thread.
    fn run(&self, calls: &[Prepared], ranks: &[u32]) {
        thread::scope(|scope| {
            for rank in ranks.iter().map(|rank| *rank as usize) {
                scope.spawn(move || {
                    calls.iter().for_each(|call| call.run(&self.ranks[rank].twin, rank))
                });
            }
        });
    }
}

/// Operation with its options, equal on all ranks.
#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    count: u64,
    root: u32,
    element: Element,
    reduction: Reduction,
    average: bool,
    options: CallOptions,
    in_place: bool,
    /// Offset of tensors in memory.
    shift: usize,
    seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
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
    const ALL: [Kind; 10] = [
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

/// Tensors of a rank in one memory: places of the input and the output, and initial and expected bytes.
struct Tensors {
    memory: Memory,
    input: usize,
    output: Place,
    initial: Vec<u8>,
    expected: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Place {
    begin: usize,
    length: usize,
}

/// Call of all ranks.
struct Prepared {
    case: Case,
    plans: Vec<LaunchPlan>,
    tensors: Vec<Tensors>,
}

impl Case {
    /// Elements from `source` to `target` of an uneven exchange.
    fn uneven(&self, source: u32, target: u32) -> u64 {
        let pair = u64::from(source) << 32 | u64::from(target);
        match SplitMix64::new(self.seed ^ pair.wrapping_mul(0x9E37_79B9_7F4A_7C15)).below(4) {
            0 => 0,
            1 => self.count,
            _ => SplitMix64::new(self.seed ^ pair).below(self.count + 1),
        }
    }

    fn operation(&self, rank: u32, ranks: u32) -> DeviceOperation {
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

    /// Elements of the input and the output of a rank.
    fn counts(&self, rank: u32, ranks: u32) -> (u64, u64) {
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

    /// Expected output of a rank.
    fn expected(&self, inputs: &[Vec<u8>], rank: u32) -> Vec<u8> {
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

    fn arithmetic(&self) -> (Reduction, Element) {
        match self.reduction.supports(self.element) && !self.average {
            true => (self.reduction, self.element),
            false => (Reduction::Sum, self.element),
        }
    }

    fn reduced(&self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let (reduction, element) = self.arithmetic();
        let mut result = inputs[0].clone();
        let (target, count) = (result.as_mut_ptr(), self.count as usize);
        let sources: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
        // SAFETY: `count` elements each; the result is new.
        unsafe { combine_all(reduction, element, target, &sources, count) };
        if self.average && inputs.len() > 1 {
            // SAFETY: as above, in place.
            unsafe { divide(element, target, target, count, inputs.len() as u32) };
        }
        result
    }

    fn tensors(&self, inputs: &[Vec<u8>], rank: u32) -> Tensors {
        let (ranks, input) = (inputs.len() as u32, &inputs[rank as usize]);
        let bytes = self.element.bytes();
        let output = self.counts(rank, ranks).1 as usize * bytes;
        let own_part = rank as usize * self.count as usize * bytes;
        // Offsets of the two in a common range, of which one is a part.
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

    fn prepare(&self, layout: &Layout) -> Prepared {
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
            let plan = |options| LaunchPlan::new(&operation, bytes, rank, layout, options);
            // Too long for packets, or of unknown length.
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
    fn run(&self, twin: &Twin, rank: usize) {
        let (plan, tensors) = (&self.plans[rank], &self.tensors[rank]);
        let at = |offset: usize| tensors.memory.address + offset as u64;
        let call = TwinCall {
            plan,
            input: at(tensors.input),
            output: at(tensors.output.begin),
            element_bytes: self.case.element.bytes() as u64,
            reduction: Some(self.case.arithmetic()),
            divisor: if self.case.average { self.plans.len() as u32 } else { 0 },
        };
        // SAFETY: tensors of the case's lengths, of this rank alone.
        unsafe { twin.run(&call) };
    }

    fn check(&self, rank: usize) {
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

    fn check_poisoned(&self, rank: usize) {
        let tensors = &self.tensors[rank];
        let mut expected = tensors.initial.clone();
        let Place { begin, length } = tensors.output;
        expected[begin..begin + length].fill(0xFF);
        assert!(tensors.memory.bytes(expected.len()) == expected, "rank {rank}: {:?}", self.case);
    }
}

fn plain(kind: Kind, count: u64, algorithm: DeviceAlgorithm) -> Case {
    Case {
        kind,
        count,
        root: 0,
        element: Element::F32,
        reduction: Reduction::Sum,
        average: false,
        options: CallOptions { algorithm: Some(algorithm), ..CallOptions::default() },
        in_place: false,
        shift: 0,
        seed: 7,
    }
}

/// Runs the cases on all ranks and compares the results.
fn check(group: &Group, cases: &[Case]) {
    let calls: Vec<Prepared> = cases.iter().map(|case| case.prepare(&group.layout)).collect();
    let ranks: Vec<u32> = (0..group.layout.ranks).collect();
    group.run(&calls, &ranks);
    for (rank, state) in group.ranks.iter().enumerate() {
        assert_eq!(state.watch.fatal(), None);
        calls.iter().for_each(|call| call.check(rank));
    }
}

prop_compose! {
    fn cases(blocks: u32)(
        kind in prop::sample::select(&Kind::ALL),
        // Short ones, some units, and several rings of small chunks or parts of one of the longest.
        count in prop_oneof![0u64..4, 1u64..100, 100u64..3000, 3000u64..20_000],
        root in 0u32..5,
        element in prop::sample::select(&Element::ALL),
        reduction in prop::sample::select(&Reduction::ALL),
        average in prop::bool::weighted(0.3),
        algorithm in prop::option::of(prop::sample::select(&[
            DeviceAlgorithm::OneShot,
            DeviceAlgorithm::TwoShot,
        ])),
        num_sms in prop::option::of(1u32..4),
        chunk_bytes in prop::option::of(prop::sample::select(&[16u32, 48, 256, 1024, 4096])),
        in_place in any::<bool>(),
        shift in prop_oneof![Just(0usize), 0usize..17],
        seed in any::<u64>(),
    ) -> Case {
        let num_sms = num_sms.map(|blocks_of_call| blocks_of_call.min(blocks));
        let options = CallOptions { algorithm, num_sms, chunk_bytes };
        // At most some thousands of chunks.
        let count = if chunk_bytes.is_some_and(|bytes| bytes < 256) { count.min(2000) } else { count };
        Case { kind, count, root, element, reduction, average, options, in_place, shift, seed }
    }
}

fn sequences() -> impl Strategy<Value = (u32, u32, Vec<Case>, u64)> {
    (1u32..6, 1u32..4).prop_flat_map(|(ranks, blocks)| {
        (Just(ranks), Just(blocks), prop::collection::vec(cases(blocks), 1..8), any::<u64>())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 300 }))]

    #[test]
    fn sequences_of_calls_have_the_results_of_the_reference(
        (ranks, blocks, cases, seed) in sequences(),
        epoch in prop_oneof![Just(0), (0u32..8).prop_map(|less| u32::MAX - less)],
        sequence in prop_oneof![Just(0), (0u32..40).prop_map(|less| 0u32.wrapping_sub(less))],
    ) {
        let group = Group::new(ranks, blocks);
        group.set_state(epoch, sequence);
        for (rank, state) in (0..).zip(&group.ranks) {
            state.twin.set_jitter(seed.wrapping_add(rank));
        }
        check(&group, &cases);
    }
}

/// Long calls of small chunks, of which each needs a credit, with late teams.
#[test]
fn rings_are_not_overwritten_by_ranks_that_are_ahead() {
    for seed in 1..if cfg!(miri) { 2 } else { 80 } {
        let group = Group::new(2 + seed as u32 % 3, 1);
        for (rank, state) in (0..).zip(&group.ranks) {
            state.twin.set_jitter(0x9E37_79B9_7F4A_7C15u64.wrapping_mul(10 * seed + rank));
        }
        let cases = [Kind::AllReduce, Kind::AllToAllUneven, Kind::ReduceScatter].map(|kind| {
            let case = plain(kind, 2000, DeviceAlgorithm::TwoShot);
            Case { options: CallOptions { chunk_bytes: Some(16), ..case.options }, seed, ..case }
        });
        check(&group, &cases);
    }
}

/// Kinds and algorithms that reach each kernel.
fn one_of_each_kernel() -> [(Kind, DeviceAlgorithm, Kernel); 5] {
    use DeviceAlgorithm::{OneShot, TwoShot};
    [
        (Kind::AllToAll, OneShot, Kernel::ExchangePackets),
        (Kind::AllToAll, TwoShot, Kernel::ExchangeChunks),
        (Kind::AllReduce, OneShot, Kernel::ReducePackets),
        (Kind::ReduceScatter, TwoShot, Kernel::ReduceChunks),
        (Kind::AllReduce, TwoShot, Kernel::AllReduceChunks),
    ]
}

fn phase_of(kernel: Kernel) -> u32 {
    FAMILY.first_phase + if kernel.is_packets() { 0 } else { 1 }
}

#[test]
fn every_kernel_runs_a_call_of_several_rings_of_small_chunks() {
    let group = Group::new(2, 1);
    let case = |(kind, algorithm, _)| {
        let case = plain(kind, 90, algorithm);
        Case { options: CallOptions { chunk_bytes: Some(16), ..case.options }, ..case }
    };
    check(&group, &one_of_each_kernel().map(case));
}

#[test]
fn calls_of_every_element_and_reduction_have_the_bits_of_whole_vectors() {
    let group = Group::new(3, 2);
    let algorithms = [DeviceAlgorithm::OneShot, DeviceAlgorithm::TwoShot];
    let mut cases = Vec::new();
    for (element, reduction, algorithm, average) in Element::ALL.iter().flat_map(|element| {
        let of = move |reduction| algorithms.map(move |algorithm| (*element, reduction, algorithm));
        let plain = Reduction::ALL.into_iter().flat_map(of).map(|(e, r, a)| (e, r, a, false));
        plain.chain(of(Reduction::Sum).map(|(e, r, a)| (e, r, a, true)))
    }) {
        for kind in [Kind::AllReduce, Kind::ReduceScatter, Kind::Reduce] {
            let case = plain(kind, 301, algorithm);
            cases.push(Case { element, reduction, average, ..case });
        }
    }
    cases.retain(|case| case.reduction.supports(case.element));
    check(&group, &cases);
}

#[test]
fn packets_continue_after_the_last_epoch_with_the_other_half() {
    let group = Group::new(3, 2);
    group.set_state(u32::MAX - 2, 0);
    check(&group, &vec![plain(Kind::AllReduce, 2000, DeviceAlgorithm::OneShot); 6]);
    let epoch = group.heaps[0].raw().word(group.layout.epoch(0)).load(Relaxed);
    // MAX - 1, MAX, 2, 3, 4, 5.
    assert_eq!(epoch, 5);
}

#[test]
fn a_rank_that_does_not_call_is_named_and_outputs_are_poisoned() {
    for (limit, in_place) in [(0, false), (200, false), (200, true)] {
        for (kind, algorithm, kernel) in one_of_each_kernel() {
            let group = Group::new(3, 2);
            group.set_limit(Duration::from_secs(60));
            // A call that succeeds, and then one without rank 1.
            let case = Case { in_place, ..plain(kind, 3000, algorithm) };
            check(&group, std::slice::from_ref(&case));
            group.set_limit(Duration::from_millis(limit));
            let calls = [case.prepare(&group.layout), case.prepare(&group.layout)];
            assert_eq!(calls[0].plans[0].kernel, kernel);
            let start = Barrier::new(2);
            thread::scope(|scope| {
                for rank in [0, 2] {
                    let (calls, twin, start) = (&calls, &group.ranks[rank].twin, &start);
                    scope.spawn(move || {
                        start.wait();
                        calls.iter().for_each(|call| call.run(twin, rank));
                    });
                }
            });
            for rank in [0, 2] {
                let record = group.ranks[rank].watch.fatal().expect("a record");
                assert_eq!(record.code, Code::Timeout);
                assert_eq!((record.rank, record.phase), (rank as u32, phase_of(kernel)));
                assert_eq!(record.channel, 0);
                if limit > 0 {
                    assert_eq!(record.peer, Some(1), "{kernel:?}");
                }
                assert!(record.seen < record.expected, "{record:?}");
                // In place, the poisoned output is all or a part of the input.
                calls.iter().for_each(|call| call.check_poisoned(rank));
            }
        }
    }
}

#[test]
fn a_late_rank_has_its_results_or_an_error_after_others_have_timed_out() {
    for (kind, algorithm, _) in one_of_each_kernel() {
        for count in [10, 5000] {
            let group = Group::new(2, 1);
            let options = CallOptions {
                algorithm: Some(algorithm),
                chunk_bytes: Some(256),
                ..CallOptions::default()
            };
            let call = Case { options, ..plain(kind, count, algorithm) }.prepare(&group.layout);
            group.set_limit(Duration::from_millis(10));
            call.run(&group.ranks[0].twin, 0);
            call.run(&group.ranks[1].twin, 1);
            call.check_poisoned(0);
            match group.ranks[1].watch.fatal() {
                None => call.check(1),
                Some(_) => call.check_poisoned(1),
            }
        }
    }
}

#[test]
fn an_abort_ends_the_waits_of_all_kernels() {
    for (kind, algorithm, kernel) in one_of_each_kernel() {
        let group = Group::new(2, 1);
        let call = plain(kind, 3000, algorithm).prepare(&group.layout);
        let begun = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| call.run(&group.ranks[0].twin, 0));
            thread::sleep(Duration::from_millis(10));
            group.ranks[0].watch.abort();
        });
        assert!(begun.elapsed() < Duration::from_secs(30), "the limit is longer");
        let record = group.ranks[0].watch.fatal().expect("a record");
        assert_eq!(
            (record.code, record.phase, record.peer),
            (Code::Aborted, phase_of(kernel), Some(1))
        );
        call.check_poisoned(0);
        // The peer has the data, or ends by its own limit.
        group.ranks[1].watch.abort();
        call.run(&group.ranks[1].twin, 1);
    }
}

#[test]
fn calls_of_a_dead_domain_or_of_closed_memory_poison_outputs_without_a_record() {
    for (kind, algorithm, _) in one_of_each_kernel() {
        let group = Group::new(2, 1);
        let call = plain(kind, 30, algorithm).prepare(&group.layout);
        group.ranks[0].table.raw().word(Word::Dead as u64).store(9, Relaxed);
        group.heaps[1].raw().word(group.layout.closed).store(1, Relaxed);
        group.run(std::slice::from_ref(&call), &[0, 1]);
        for rank in [0, 1] {
            assert_eq!(group.ranks[rank].watch.fatal(), None);
            call.check_poisoned(rank);
        }
        // No flag or packet has been written.
        for heap in &group.heaps {
            let raw = heap.raw();
            let flags = group.layout.flag(0, 0, 0)..group.layout.flag(1, 0, 1) + 4;
            assert!(flags.step_by(4).all(|at| raw.word(at).load(Relaxed) == 0));
            let packet = raw.packet(group.layout.unit(0, 1, 1, 0));
            assert_eq!(packet.load(Relaxed), 0);
        }
    }
}

#[test]
fn one_rank_copies_its_input() {
    let group = Group::new(1, 2);
    let mut cases = Vec::new();
    for (kind, count) in
        Kind::ALL.into_iter().flat_map(|kind| [(kind, 0), (kind, 7), (kind, 50_000)])
    {
        for in_place in [false, true] {
            for algorithm in [None, Some(DeviceAlgorithm::TwoShot)] {
                let options = CallOptions { algorithm, ..CallOptions::default() };
                let case = plain(kind, count, DeviceAlgorithm::OneShot);
                cases.push(Case { in_place, options, shift: 3, average: true, ..case });
            }
        }
    }
    check(&group, &cases);
}

#[test]
fn blocks_of_the_longest_messages_fill_their_rings_several_times() {
    let group = Group::new(3, 2);
    let bytes = u64::from(group.layout.chunk_capacity) * u64::from(group.layout.ring_chunks);
    for kind in [Kind::AllReduce, Kind::ReduceScatter, Kind::AllToAllUneven, Kind::Broadcast] {
        let case = plain(kind, 5 * bytes / 4 + 3, DeviceAlgorithm::TwoShot);
        check(&group, &[case.clone(), plain(kind, 5, DeviceAlgorithm::TwoShot), case]);
    }
}
