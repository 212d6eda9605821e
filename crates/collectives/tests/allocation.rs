//! After the first calls with a shape, further ones allocate no memory, algorithm selection included, except for
//! registering an input that writes read in place.

#[expect(dead_code, reason = "other tests use the rest")]
#[path = "common/communicators.rs"]
mod communicators;
#[path = "../../fabric/tests/common/counting.rs"]
mod counting;
#[path = "../../fabric/tests/common/ranks.rs"]
mod ranks;

use counting::counting;
use std::time::Duration;
use weft_collectives::tuning::{TuningSource, candidates, collective_name};
use weft_collectives::{
    Call, Collective, Collectives, CollectivesConfig, Element, Options, Rank, Reduction, Scale,
};
use weft_fabric::{Communicator, ProviderKind, Time, clock};

const RANKS: u32 = 2;
const COLLECTIVES: [Collective; 5] = [
    Collective::AllReduce,
    Collective::ReduceScatter,
    Collective::AllGather,
    Collective::Broadcast { root: Rank(1) },
    Collective::AllToAll,
];
/// Vector elements: messages, one chunk, several chunks.
const ELEMENTS: [u64; 4] = [2, 96, 10_000, 400_000];
/// Calls with each shape before the counted ones: channels take the buffers in turn.
const FIRST_CALLS: usize = 5;
/// Counted calls with each shape; the one with the fewest allocations counts: transport queues grow once, to a size
/// that depends on peer timing.
const COUNTED_CALLS: usize = 5;

fn soon() -> Time {
    clock::now().after(Duration::from_secs(60))
}

/// Measurements for all algorithms, from which times are predicted.
fn times(provider: &str) -> String {
    let mut lines = Vec::new();
    for collective in COLLECTIVES {
        for (index, (algorithm, Options { chunks, .. })) in candidates(collective).enumerate() {
            let seconds = 1e-4 / (index + 1) as f64;
            lines.push(format!(
                r#"{{"collective": "{}", "algorithm": "{algorithm}", "chunks": {chunks},
                    "points": [[64, {seconds:e}], [4194304, {seconds:e}]]}}"#,
                collective_name(collective)
            ));
        }
    }
    format!(
        r#"{{"format": "weft-tuning-1", "entries": [{{"provider": "{provider}", "ranks": {RANKS},
            "machine": "this", "at": "today", "constants": {{"step_s": 5e-6, "post_s": 1e-6,
            "byte_s": 1e-9, "add_byte_s": 1e-10, "copy_byte_s": 1e-10}}, "times": [{}]}}]}}"#,
        lines.join(",")
    )
}

/// Runs a call until it ends.
fn run(communicator: &Communicator, collectives: &Collectives, call: &Call) {
    let mut never = || false;
    // SAFETY: the call's memory stays valid and untouched until the wait has returned.
    let id = unsafe { collectives.start(&mut communicator.access(), call) }.unwrap();
    let mut options = communicator.wait_options(soon(), &mut never);
    collectives.wait(&mut communicator.access(), id, &mut options).unwrap();
}

/// Without allocations in repeated calls but for one if the vector has `in_place_bytes`, which registers the input.
fn on_rank(
    communicator: &Communicator,
    text: Option<&str>,
    reduction_threads: u32,
    in_place_bytes: u64,
) {
    let source = text.map(|text| TuningSource { name: "times.json", text, machine: "this" });
    let config = CollectivesConfig { reduction_threads, ..CollectivesConfig::default() };
    let collectives = Collectives::connect_tuned(communicator, config, source, soon()).unwrap();
    let input = vec![1i64; 400_000];
    let mut output = vec![0i64; 400_000];
    let mut calls = Vec::new();
    for collective in COLLECTIVES {
        for elements in ELEMENTS {
            let output = output.as_mut_ptr();
            let is_broadcast = matches!(collective, Collective::Broadcast { .. });
            calls.push(Call {
                collective,
                element: Element::I64,
                reduction: Reduction::Sum,
                scale: Scale::None,
                elements,
                input: if is_broadcast { output.cast() } else { input.as_ptr().cast() },
                output: output.cast(),
                algorithm: None,
            });
        }
    }
    for _ in 0..FIRST_CALLS {
        calls.iter().for_each(|call| run(communicator, &collectives, call));
    }
    let mut least = vec![usize::MAX; calls.len()];
    for _ in 0..COUNTED_CALLS {
        // In another order: the last call's division is not the next one's.
        for (call, least) in calls.iter().zip(&mut least).rev() {
            let ((), allocations) = counting(|| run(communicator, &collectives, call));
            *least = allocations.min(*least);
        }
    }
    for (call, allocations) in calls.iter().zip(least) {
        let bytes = call.elements * size_of::<i64>() as u64;
        // The handle for a registered input.
        let registered = usize::from(bytes >= in_place_bytes);
        let Call { collective, elements, .. } = call;
        assert!(
            allocations <= registered,
            "{collective} of {elements} elements: {allocations} allocations in each call"
        );
    }
    let mut never = || false;
    let mut options = communicator.wait_options(soon(), &mut never);
    collectives.close(communicator, &mut options).unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "miri has neither memory files nor sockets")]
fn a_call_of_a_shape_that_was_called_before_allocates_no_memory() {
    for (kind, in_place_bytes) in [(ProviderKind::Shm, 16 << 10), (ProviderKind::Tcp, 128 << 10)] {
        for (text, threads) in [(None, 1), (None, 2), (Some(times(kind.name())), 1)] {
            communicators::communicators(RANKS, kind, None, |communicator| {
                on_rank(&communicator, text.as_deref(), threads, in_place_bytes);
            });
        }
    }
}
