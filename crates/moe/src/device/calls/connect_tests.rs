use super::*;
use crate::device::{
    CombineOutputs, DeviceLayout, DispatchInputs, DispatchOutputs, LaunchConfig, PlanLocation,
};
use crate::elements::dtype::DType;
use crate::shape::expert_map::ExpertMap;
use std::time::Duration;
use weft_control::Cause;
use weft_cuda::Stream;

const HIDDEN: usize = 8;
const PLAN: PlanLocation = PlanLocation { address: 0, kept: false };
const SITE: LaunchConfig =
    LaunchConfig { stream: Stream(0), channel: 0, num_sms: None, plan: PLAN, positions: None };

fn config() -> DeviceConfig {
    let config = DeviceConfig::new(2, 0, 4, 2).sized(4, HIDDEN as u32).tokens(DType::F32.into());
    DeviceConfig {
        combine_dtype: DType::F32,
        reply_dtype: DType::F32,
        output_dtype: DType::F32,
        ..config
    }
}

fn twins(skew: Duration) -> Vec<DeviceAllToAll> {
    let setup = DeviceSetup { skew_timeout: skew, ..DeviceSetup::new(MemoryLocation::Twin) };
    DeviceAllToAll::local_group(&config(), &[setup.clone(), setup]).unwrap()
}

/// One rank's arrays for one round. Rows begin at multiples of 16 bytes.
#[repr(align(16))]
#[derive(Clone)]
struct Row([f32; HIDDEN]);

struct Arrays {
    tokens: Vec<Row>,
    ids: Vec<i64>,
    rows: Vec<Row>,
    counts: Vec<i32>,
    offsets: Vec<i32>,
    from: Vec<i32>,
    weights: Vec<f32>,
    combined: Vec<Row>,
}

impl Arrays {
    fn new(shape: &DeviceShape, rank: usize) -> Arrays {
        let positions = shape.positions() as usize;
        let local = shape.local_experts() as usize;
        let row = |value: f32| Row([value; HIDDEN]);
        Arrays {
            tokens: (0..4).map(|token| row((10 * rank + token) as f32)).collect(),
            // Every token goes to an expert on each rank.
            ids: (0..4).flat_map(|token| [token % 2, 2 + token % 2]).collect(),
            rows: vec![row(0.0); positions],
            counts: vec![0; local],
            offsets: vec![0; local + 1],
            from: vec![0; positions],
            weights: vec![0.0; positions],
            combined: vec![row(0.0); 4],
        }
    }

    fn inputs(&mut self) -> DispatchInputs {
        DispatchInputs {
            tokens: self.tokens.as_mut_ptr().expose_provenance() as u64,
            ids: self.ids.as_mut_ptr().expose_provenance() as u64,
            given: 4,
            ..DispatchInputs::default()
        }
    }

    fn outputs(&mut self) -> DispatchOutputs {
        DispatchOutputs {
            tokens: self.rows.as_mut_ptr().expose_provenance() as u64,
            scales: 0,
            counts: self.counts.as_mut_ptr().expose_provenance() as u64,
            offsets: self.offsets.as_mut_ptr().expose_provenance() as u64,
            rows: self.from.as_mut_ptr().expose_provenance() as u64,
            weights: self.weights.as_mut_ptr().expose_provenance() as u64,
            experts: 0,
            load: 0,
            load_bytes: 4,
        }
    }
}

fn send(rank: &DeviceAllToAll, arrays: &mut Arrays) -> Result<(), Error> {
    // SAFETY: the arrays have the lengths that the shape requires, and this thread has exclusive
    // access.
    unsafe { rank.dispatch_send(SITE, &arrays.inputs()) }
}

fn receive(rank: &DeviceAllToAll, arrays: &mut Arrays) -> Result<(), Error> {
    // SAFETY: as above.
    unsafe { rank.dispatch_recv(SITE, &arrays.outputs()) }
}

/// Sends the received rows back as they are.
fn combine_send(rank: &DeviceAllToAll, arrays: &mut Arrays) {
    let outputs = arrays.rows.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: a row for each position.
    unsafe { rank.combine_send(SITE, outputs, false) }.unwrap();
}

/// Receives on all ranks, and checks that each token came back from two identity experts.
fn combine_receive(ranks: &[DeviceAllToAll], arrays: &mut [Arrays]) {
    for (number, (rank, arrays)) in ranks.iter().zip(arrays).enumerate() {
        let combined = arrays.combined.as_mut_ptr().expose_provenance() as u64;
        let outputs = CombineOutputs { combined, given: 4, ..CombineOutputs::default() };
        // SAFETY: a row for each token.
        unsafe { rank.combine_recv(SITE, &outputs, false) }.unwrap();
        rank.check().unwrap();
        for (token, row) in arrays.combined.iter().enumerate() {
            assert_eq!(row.0, [2.0 * (10 * number + token) as f32; HIDDEN]);
        }
    }
}

#[test]
fn a_round_between_ranks_of_one_process() {
    let ranks = twins(Duration::from_secs(10));
    let mut arrays: Vec<Arrays> =
        ranks.iter().enumerate().map(|(rank, each)| Arrays::new(each.shape(), rank)).collect();
    for (rank, arrays) in ranks.iter().zip(&mut arrays) {
        send(rank, arrays).unwrap();
    }
    for (rank, arrays) in ranks.iter().zip(&mut arrays) {
        receive(rank, arrays).unwrap();
        assert_eq!(arrays.counts, [4, 4]);
        assert_eq!(arrays.offsets, [0, 4, 8]);
        let first: Vec<f32> = arrays.rows[..8].iter().map(|row| row.0[0]).collect();
        assert_eq!(first, [0.0, 2.0, 10.0, 12.0, 1.0, 3.0, 11.0, 13.0]);
        combine_send(rank, arrays);
    }
    combine_receive(&ranks, &mut arrays);
}

#[test]
fn a_wait_that_expires_is_raised_by_the_next_call_of_every_rank() {
    let ranks = twins(Duration::from_millis(50));
    let mut arrays = Arrays::new(ranks[0].shape(), 0);
    send(&ranks[0], &mut arrays).unwrap();
    // As on a device, the call itself returns no error.
    receive(&ranks[0], &mut arrays).unwrap();
    for _ in 0..2 {
        let error = send(&ranks[0], &mut arrays).unwrap_err();
        assert!(matches!(error, Error::Gpu(weft_gpu::Error::Timeout { .. })), "{error}");
    }
    let Error::Fabric(weft_fabric::Error::Poisoned(cause)) = ranks[1].check().unwrap_err() else {
        panic!("poison reaches the other rank")
    };
    assert_eq!(cause.kind, Cause::User);
    assert!(cause.detail.contains("rank 0 waited for rank 1 in dispatch_recv"), "{}", cause.detail);
}

#[test]
fn an_invalid_argument_is_rejected_and_the_group_lives_on() {
    let ranks = twins(Duration::from_secs(10));
    let mut arrays = Arrays::new(ranks[0].shape(), 0);
    let inputs = arrays.inputs();
    let refused = |channel, inputs: DispatchInputs| {
        // SAFETY: rejected before any array is accessed.
        unsafe { ranks[0].dispatch_send(LaunchConfig { channel, ..SITE }, &inputs) }.unwrap_err()
    };
    assert!(matches!(refused(2, inputs), Error::NoChannel { channel: 2, channels: 2 }));
    // SAFETY: as above.
    let error =
        unsafe { ranks[0].dispatch_send(LaunchConfig { num_sms: Some(0), ..SITE }, &inputs) };
    assert!(matches!(error, Err(Error::Zero { field: "num_sms" })));
    let error = refused(0, DispatchInputs { given: 5, ..inputs });
    assert!(matches!(error, Error::TooManyTokens { tokens: 5, max_tokens: 4 }));
    for (what, wrong) in [
        ("tokens", DispatchInputs { tokens: 0, ..inputs }),
        ("ids", DispatchInputs { ids: 0, ..inputs }),
    ] {
        let error = refused(0, wrong).to_string();
        assert_eq!(error, format!("{what}: array missing; pass it"));
    }
    let error = refused(0, DispatchInputs { tokens: inputs.tokens + 8, ..inputs });
    assert!(matches!(error, Error::Misaligned { what: "tokens", .. }));
    let outputs = DispatchOutputs { offsets: 0, ..arrays.outputs() };
    // SAFETY: as above.
    let error = unsafe { ranks[0].dispatch_recv(SITE, &outputs) }.unwrap_err();
    assert!(matches!(error, Error::NoAddress { what: "expert offsets" }));
    send(&ranks[0], &mut arrays).unwrap();
    ranks[0].check().unwrap();
}

#[test]
fn all_to_alls_share_a_domain_and_return_their_memory_to_it() {
    let setup = DeviceSetup {
        skew_timeout: Duration::from_secs(10),
        ..DeviceSetup::new(MemoryLocation::Twin)
    };
    let setups = [setup.clone(), setup];
    let domains = Domain::local_group(&[MemoryLocation::Twin; 2]).unwrap();
    let make = || DeviceAllToAll::local_group_on(&domains, &config(), &setups).unwrap();
    let run = |ranks: &[DeviceAllToAll]| {
        let mut arrays: Vec<Arrays> =
            ranks.iter().enumerate().map(|(rank, each)| Arrays::new(each.shape(), rank)).collect();
        for (rank, arrays) in ranks.iter().zip(&mut arrays) {
            send(rank, arrays).unwrap();
        }
        for (rank, arrays) in ranks.iter().zip(&mut arrays) {
            receive(rank, arrays).unwrap();
            assert_eq!(arrays.counts, [4, 4]);
        }
    };
    let at = |ranks: &[DeviceAllToAll]| ranks[0].received_rows(0).unwrap().address;
    let (one, other) = (make(), make());
    let (first, second) = (at(&one), at(&other));
    assert_ne!(first, second);
    // The two all-to-alls' rounds are independent.
    run(&one);
    run(&other);
    drop(one);
    let third = make();
    assert_eq!(at(&third), first, "freed memory is used again");
    run(&third);
    // One rank's captured graph keeps the memory on all ranks.
    third[1].keep();
    drop(third);
    let fourth = make();
    assert!(at(&fourth) != first && at(&fourth) != second);
    run(&fourth);
}

#[test]
fn ranks_may_end_in_any_order() {
    for order in [[0, 1], [1, 0]] {
        let mut ranks: Vec<_> = twins(Duration::from_secs(10)).into_iter().map(Some).collect();
        let mut arrays = Arrays::new(ranks[0].as_ref().unwrap().shape(), 0);
        let (first, last) = (order[0], order[1]);
        ranks[first] = None;
        // Writes to the block on the rank that has ended, which must still be mapped.
        send(ranks[last].as_ref().unwrap(), &mut arrays).unwrap();
    }
}

#[test]
fn an_impossible_configuration_is_rejected_before_any_allocation() {
    let setup = DeviceSetup::new(MemoryLocation::Twin);
    let setups = [setup.clone(), setup];
    let refused = |config: DeviceConfig| {
        DeviceAllToAll::local_group(&config, &setups).err().expect("it is refused")
    };
    let (layout, max_tokens) = (DeviceLayout::Contiguous { pad_to: 0 }, 0);
    assert!(matches!(refused(DeviceConfig { layout, ..config() }), Error::Zero { .. }));
    assert!(matches!(refused(DeviceConfig { max_tokens, ..config() }), Error::Zero { .. }));
    let error = refused(DeviceConfig { max_bytes: Some(10), ..config() });
    assert!(matches!(error, Error::HeapTooLarge { limit: 10, .. }));
    let none = DeviceAllToAll::local_group(&config(), &[]).err().expect("it is refused");
    assert!(matches!(none, Error::Gpu(weft_gpu::Error::Empty { ranks: 0, .. })), "{none}");
}

fn map(ranks: [&[u32]; 2]) -> ExpertMap {
    ExpertMap::new(4, &ranks.map(<[u32]>::to_vec)).unwrap()
}

#[test]
fn maps_are_changed_between_rounds_alone() {
    let first = map([&[0, 1], &[2, 3, 0]]);
    let config = DeviceConfig { maps: [first.clone()].into(), ..config() };
    let setup = DeviceSetup::new(MemoryLocation::Twin);
    let ranks = DeviceAllToAll::local_group(&config, &[setup.clone(), setup]).unwrap();
    let second = map([&[3, 0], &[2, 1, 0]]);
    let round = |expected: [&[i32]; 2], during: &dyn Fn()| {
        let mut arrays = [0, 1].map(|rank| Arrays::new(ranks[rank].shape(), rank));
        for (rank, arrays) in ranks.iter().zip(&mut arrays) {
            send(rank, arrays).unwrap();
        }
        during();
        for ((rank, arrays), counts) in ranks.iter().zip(&mut arrays).zip(expected) {
            receive(rank, arrays).unwrap();
            assert_eq!(arrays.counts[..counts.len()], *counts);
            combine_send(rank, arrays);
        }
        combine_receive(&ranks, &mut arrays);
    };
    // Tokens 0 and 2 on each rank name expert 0, whose replicas take turns by token and rank.
    let refused = || {
        for rank in &ranks {
            let error = rank.set_maps_here(&[(0, second.clone())]).unwrap_err();
            assert!(matches!(error, Error::RoundInFlight { channel: 0 }), "{error}");
        }
    };
    round([&[2, 4], &[4, 4, 2]], &refused);
    for rank in &ranks {
        assert!(matches!(
            rank.set_maps_here(&[(1, second.clone())]),
            Err(Error::NoLayer { layer: 1, layers: 1 })
        ));
        let other = map([&[0, 1, 0], &[2, 3]]);
        assert!(matches!(rank.set_maps_here(&[(0, other)]), Err(Error::MapShape { .. })));
        assert_eq!(rank.map(0).unwrap(), first);
        rank.set_maps_here(&[(0, second.clone())]).unwrap();
        assert_eq!(rank.map(0).unwrap(), second);
    }
    round([&[4, 2], &[4, 4, 2]], &|| ());
}

#[test]
fn a_layer_needs_a_map() {
    let ranks = twins(Duration::from_secs(10));
    let mut arrays = Arrays::new(ranks[0].shape(), 0);
    let inputs = DispatchInputs { layer: 1, ..arrays.inputs() };
    // SAFETY: rejected before any access.
    let error = unsafe { ranks[0].dispatch_send(SITE, &inputs) }.unwrap_err();
    assert!(matches!(error, Error::NoLayer { layer: 1, layers: 1 }), "{error}");
    assert!(matches!(ranks[0].map(0), Err(Error::NoLayer { layer: 0, layers: 0 })));
    assert!(matches!(
        ranks[0].set_maps_here(&[(0, map([&[0, 1], &[2, 3]]))]),
        Err(Error::NoLayer { .. })
    ));
}
