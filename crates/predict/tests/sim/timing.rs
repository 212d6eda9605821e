//! The dispatch and combine scenario beside the real drivers: the same network, the same ids, the same virtual time.

use serde_json::{Value, json};
use weft_fabric::providers::sim::{Cluster, World, WorldConfig};
use weft_fabric::{Memory, Rank, Time};
use weft_moe::{
    Config, DType, Driver, RoundHandle, Rows, RowsMut, Shape, Stage, TokenInput, Weighting,
};
use weft_predict::{MessageCosts, SimulatedNetwork};
use weft_topology::{EndpointId, Network, Router, Routing};

const TOPOLOGY: &str = "fat-tree:leaves=4,spines=2,hosts=2,gbps=100,latency_us=0.5";
const RANKS: u32 = 8;
const EXPERTS: u32 = 16;
const TOP_K: u32 = 2;
const TOKENS: u32 = 64;
const HIDDEN: u32 = 256;
const LATENCY_S: f64 = 1.5e-6;

/// Every rank sends every rank as many tokens: rank `r`'s tokens go round behind it.
fn balanced() -> Vec<i64> {
    let expert = |rank: u32, token: u32| {
        let first = (2 * (rank + token)) % EXPERTS;
        [i64::from(first), i64::from(first + 1)]
    };
    (0..RANKS).flat_map(|rank| (0..TOKENS).flat_map(move |token| expert(rank, token))).collect()
}

fn uneven(seed: u64) -> Vec<i64> {
    let routing = weft_moe::routing::Routing::Zipf { exponent: 0.8 };
    let ids = |rank| routing.ids(seed, rank, TOKENS as usize, TOP_K as usize, EXPERTS);
    (0..RANKS).flat_map(ids).collect()
}

/// Until when the drivers have dispatched, and combined after that, in nanoseconds.
fn by_drivers(ids: &[i64], private_rows: u32) -> (u64, u64) {
    let network = Network::parse(TOPOLOGY).unwrap();
    let mut router = Router::new(&network, Routing::Static).unwrap();
    let places: Vec<EndpointId> = (0..RANKS).map(EndpointId).collect();
    let costs = MessageCosts { post_s: 0.0, latency_s: LATENCY_S };
    let model = SimulatedNetwork::new(&network, &mut router, &places, costs).unwrap();
    let world = World::new(WorldConfig { model: Box::new(model), ..WorldConfig::new(RANKS, 1) });
    let mut cluster = Cluster::new(&world).unwrap();
    let shape = |rank: Rank| {
        let config = Config { private_rows, ..Config::new(RANKS, rank.0, EXPERTS, TOP_K) };
        Shape::new(config.sized(TOKENS, HIDDEN).dtype(DType::BF16)).unwrap()
    };
    let mut drivers: Vec<Driver> = Vec::new();
    for rank in cluster.ranks() {
        drivers.push(Driver::allocate(cluster.engine(rank), &shape(rank)).unwrap());
    }
    for owner in cluster.ranks() {
        for peer in cluster.ranks().filter(|peer| *peer != owner) {
            let grant = drivers[owner.0 as usize].grant(cluster.engine(owner), peer).unwrap();
            let driver = &mut drivers[peer.0 as usize];
            driver.link(cluster.engine(peer), owner, &grant, Time::MAX).unwrap();
        }
    }
    let mut handles: Vec<RoundHandle> = Vec::new();
    for (driver, ids) in drivers.iter_mut().zip(ids.chunks((TOKENS * TOP_K) as usize)) {
        let engine = cluster.engine(Rank(handles.len() as u32));
        let tokens = vec![1; (TOKENS * HIDDEN * 2) as usize];
        let region = engine.register(Memory::from_bytes(tokens)).unwrap();
        let input = TokenInput { region: region.key(), memory: region.memory().clone() };
        handles.push(driver.begin(input, ids, None, None).unwrap());
    }
    let mut until = |drivers: &mut [Driver], stage: Stage| {
        let outcomes = cluster.run_drivers(drivers, |driver| {
            driver.stage(handles[driver.shape().config().rank as usize]) == stage
        });
        outcomes.unwrap();
        world.now().0
    };
    let dispatched = until(&mut drivers, Stage::Dispatched);
    for (driver, handle) in drivers.iter_mut().zip(&handles) {
        let positions = driver.received(*handle).unwrap().plan.positions();
        let outputs = vec![0; positions * HIDDEN as usize * 2];
        let rows = Rows::new(&outputs, HIDDEN as usize * 2, HIDDEN as usize * 2);
        while driver.reply(*handle, rows, Weighting::AtCombine).unwrap() {}
    }
    let combined = until(&mut drivers, Stage::Combined);
    for (driver, handle) in drivers.iter_mut().zip(&handles) {
        let mut out = vec![0; (TOKENS * HIDDEN * 2) as usize];
        let out = RowsMut::new(&mut out, HIDDEN as usize * 2, HIDDEN as usize * 2);
        driver.sum_replies(*handle, out, Weighting::AtCombine).unwrap();
    }
    assert!(world.violations().is_empty(), "{:?}", world.violations());
    (dispatched, combined - dispatched)
}

/// The same by the scenario: the longest times for both.
fn by_scenario(ids: &[i64], private_rows: u32) -> (f64, f64) {
    let spec = json!({
        "scenario": "moe",
        "cluster": {
            "topology": TOPOLOGY,
            "routing": "static",
            "constants": {"set": {"message_latency_s": LATENCY_S}},
        },
        "job": {
            "ranks": RANKS, "experts": EXPERTS, "top_k": TOP_K, "tokens": TOKENS, "hidden": HIDDEN,
            "token_dtype": "bfloat16", "answer_dtype": "bfloat16", "rounds": 1,
            "private_rows": private_rows, "token_routing": {"kind": "trace", "layers": [ids]},
            // Replies are sent after all ranks have dispatched, as by the drivers in this test.
            "costs": {"experts_s": 1e-3},
        },
    });
    let outcome = weft_predict::run(&spec.to_string(), &mut |_, _| true).unwrap();
    let outcome: Value = serde_json::from_str(&outcome).unwrap();
    let longest = |phase: &str| outcome["results"][phase]["max_s"].as_f64().unwrap() * 1e9;
    (longest("dispatch"), longest("combine"))
}

/// A message ends on a whole nanosecond over the fabric, and no message chain is longer than this.
const ROUNDED_NS: f64 = 8.0;

#[test]
fn balanced_rounds_take_as_long_as_the_drivers_take() {
    for private_rows in [0, 4, 64] {
        let ids = balanced();
        let (dispatch, combine) = by_scenario(&ids, private_rows);
        let (dispatched, combined) = by_drivers(&ids, private_rows);
        assert!((dispatched as f64 - dispatch).abs() < ROUNDED_NS, "{dispatched} {dispatch}");
        assert!((combined as f64 - combine).abs() < ROUNDED_NS, "{combined} {combine}");
    }
}

#[test]
fn uneven_dispatch_takes_as_long_as_the_drivers_take() {
    for seed in 0..8 {
        let private_rows = (seed % 3) as u32 * 6;
        let ids = uneven(seed);
        let (dispatch, _) = by_scenario(&ids, private_rows);
        let (dispatched, _) = by_drivers(&ids, private_rows);
        assert!((dispatched as f64 - dispatch).abs() < ROUNDED_NS, "{dispatched} {dispatch}");
    }
}

#[test]
fn the_replies_of_a_round_have_the_bytes_of_the_plan() {
    // All tokens name rank 0's experts: only its link counts.
    let ids = vec![[0i64, 1]; (RANKS * TOKENS) as usize].concat();
    let (dispatched, combined) = by_drivers(&ids, 64);
    let (dispatch, combine) = by_scenario(&ids, 64);
    assert!((dispatched as f64 - dispatch).abs() < ROUNDED_NS);
    let rows = u64::from((RANKS - 1) * TOKENS);
    let bytes_ns = (rows * u64::from(HIDDEN) * 2) as f64 / 12.5;
    assert!(combined as f64 > bytes_ns && (combined as f64) < bytes_ns + 5000.0);
    // In the scenario each rank begins combine by itself, and all but rank 0 have dispatched earlier.
    assert!(combine > bytes_ns && combine < bytes_ns + dispatch);
}
