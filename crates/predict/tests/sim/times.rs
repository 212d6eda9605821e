//! Virtual times, to the nanosecond.

use proptest::prelude::*;
use weft_fabric::{FlowId, NetworkModel, Rank, Time};
use weft_netsim::{Engine, Link, LinkId, Tag};
use weft_predict::{MessageCosts, SimulatedNetwork};
use weft_topology::{EndpointId, Network, Router, Routing};

/// Four hosts on one switch: 1 byte per nanosecond and 0.5 us per link.
const STAR: &str = "fat-tree:leaves=1,spines=1,hosts=4,gbps=8,latency_us=0.5";

fn star(costs: MessageCosts) -> SimulatedNetwork {
    let network = Network::parse(STAR).unwrap();
    let mut router = Router::new(&network, Routing::Static).unwrap();
    let places: Vec<EndpointId> = (0..4).map(EndpointId).collect();
    SimulatedNetwork::new(&network, &mut router, &places, costs).unwrap()
}

/// Runs a model until it ends: arrival time and number for each flow.
fn arrivals(model: &mut SimulatedNetwork) -> Vec<(u64, u64)> {
    let mut seen = Vec::new();
    let mut finished = Vec::new();
    let mut idle = 0;
    while let Some(at) = model.next_event() {
        model.advance(at, &mut finished);
        idle = if finished.is_empty() { idle + 1 } else { 0 };
        assert!(idle < 100, "100 events without an arrival at {} ns", at.0);
        seen.extend(finished.drain(..).map(|flow| (at.0, flow.0)));
    }
    seen
}

#[test]
fn a_flow_takes_its_latency_and_its_bytes() {
    let mut model = star(MessageCosts::default());
    model.start(Time(0), FlowId(7), Rank(0), Rank(1), 1000);
    assert_eq!(arrivals(&mut model), [(2000, 7)]);
    let mut model = star(MessageCosts { post_s: 30e-9, latency_s: 200e-9 });
    model.start(Time(0), FlowId(7), Rank(0), Rank(1), 1000);
    model.start(Time(0), FlowId(8), Rank(0), Rank(2), 0);
    // The second is posted after the first, but has no bytes.
    assert_eq!(arrivals(&mut model), [(1260, 8), (2230, 7)]);
}

#[test]
fn flows_share_common_links() {
    let mut model = star(MessageCosts::default());
    model.start(Time(0), FlowId(1), Rank(0), Rank(1), 1000);
    model.start(Time(0), FlowId(2), Rank(0), Rank(2), 500);
    model.start(Time(200), FlowId(3), Rank(3), Rank(3), 99);
    // Half each until the second has its 500 at 1000 + 1000; then all for the first.
    assert_eq!(arrivals(&mut model), [(200, 3), (2000, 2), (2500, 1)]);
}

#[test]
fn a_cancelled_flow_leaves_its_share_to_the_others() {
    let mut model = star(MessageCosts::default());
    model.start(Time(0), FlowId(1), Rank(0), Rank(1), 1000);
    model.start(Time(0), FlowId(2), Rank(0), Rank(2), 1000);
    model.advance(Time(1500), &mut Vec::new());
    model.cancel(FlowId(2));
    model.cancel(FlowId(9));
    // 250 bytes had left by then.
    assert_eq!(arrivals(&mut model), [(2250, 1)]);
}

#[test]
fn a_clock_that_has_run_for_years_keeps_its_precision() {
    let years = 30 * 365 * 24 * 3600 * 1_000_000_000;
    let mut model = star(MessageCosts { post_s: 30e-9, latency_s: 0.0 });
    model.start(Time(3), FlowId(1), Rank(0), Rank(1), 1001);
    assert_eq!(arrivals(&mut model), [(2034, 1)]);
    for (number, begin) in (2..).zip([years, 2 * years + 1, 18_000_000_000_000_000_000]) {
        model.start(Time(begin), FlowId(number), Rank(0), Rank(1), 1001);
        model.start(Time(begin + 10), FlowId(100 + number), Rank(2), Rank(3), 1);
        let expected = [(begin + 10 + 30 + 1001, 100 + number), (begin + 2031, number)];
        assert_eq!(arrivals(&mut model), expected);
    }
}

#[test]
fn the_last_instant_of_the_clock_is_valid() {
    let mut model = star(MessageCosts::default());
    model.start(Time(u64::MAX - 100), FlowId(1), Rank(0), Rank(1), 1000);
    model.start(Time(u64::MAX), FlowId(2), Rank(1), Rank(0), u64::MAX >> 12);
    let seen = arrivals(&mut model);
    assert_eq!(seen, [(u64::MAX, 1), (u64::MAX, 2)]);
}

#[test]
fn a_chain_of_messages_does_not_drift() {
    // Each takes 1000 1/3 ns: 3 bytes a nanosecond are 24 gigabits a second.
    let network = "fat-tree:leaves=1,spines=1,hosts=4,gbps=24,latency_us=0.5";
    let network = Network::parse(network).unwrap();
    let mut router = Router::new(&network, Routing::Static).unwrap();
    let places: Vec<EndpointId> = (0..4).map(EndpointId).collect();
    let costs = MessageCosts::default();
    let mut model = SimulatedNetwork::new(&network, &mut router, &places, costs).unwrap();
    // A second flow that never ends before the others, so that the clocks are tied together once.
    model.start(Time(0), FlowId(0), Rank(2), Rank(3), 300_000_000_000);
    let mut now = Time(0);
    for number in 1..=30_000 {
        model.start(now, FlowId(number), Rank(0), Rank(1), 1);
        let mut finished = Vec::new();
        while finished.is_empty() {
            let next = model.next_event().unwrap();
            model.advance(next, &mut finished);
            now = next;
        }
        assert_eq!(finished, [FlowId(number)]);
        // The fabric acts on whole nanoseconds, so each message costs 1001 of them, never 1002.
        assert_eq!(now, Time(1001 * number));
    }
    assert_eq!(arrivals(&mut model), [(100_000_001_000, 0)]);
}

#[test]
fn invalid_costs_are_rejected() {
    let network = Network::parse(STAR).unwrap();
    let mut router = Router::new(&network, Routing::Static).unwrap();
    for costs in [
        MessageCosts { post_s: -1.0, latency_s: 0.0 },
        MessageCosts { post_s: 0.0, latency_s: f64::NAN },
    ] {
        let places = [EndpointId(0), EndpointId(1)];
        let error = SimulatedNetwork::new(&network, &mut router, &places, costs).err().unwrap();
        assert!(error.to_string().contains(": expected at least 0"), "{error}");
    }
}

proptest! {
    /// Any flows from one host to others, starting when they like: each arrives at the first whole
    /// nanosecond after the engine's own time.
    #[test]
    fn arrivals_are_the_engines_rounded_up(
        flows in prop::collection::vec((0u64..5000, 1u32..4, 0u64..100_000), 1..40),
        origin in prop_oneof![Just(0u64), Just(1u64 << 40), Just(1u64 << 62)],
    ) {
        let mut flows = flows;
        flows.sort_unstable();
        let first = flows[0].0;
        let mut model = star(MessageCosts::default());
        let mut seen = Vec::new();
        let mut finished = Vec::new();
        for (number, &(at, to, bytes)) in (0..).zip(&flows) {
            let now = Time(origin + at);
            while let Some(next) = model.next_event().filter(|next| *next <= now) {
                model.advance(next, &mut finished);
                seen.extend(finished.drain(..).map(|flow: FlowId| (flow.0, next.0)));
            }
            model.start(now, FlowId(number), Rank(0), Rank(to), bytes);
        }
        seen.extend(arrivals(&mut model).into_iter().map(|(at, flow)| (flow, at)));
        seen.sort_unstable();
        // The same by hand: one link out and one in for each, all shares equal.
        let link = Link { bandwidth: 1e9, latency: 0.5e-6 };
        let mut engine = Engine::new(&[link; 8]).unwrap();
        let mut exact = vec![0.0; flows.len()];
        let paths = (1..4).map(|to| engine.add_path(&[LinkId(0), LinkId(4 + to)]).unwrap());
        let paths: Vec<_> = paths.collect();
        for (number, &(at, to, bytes)) in (0..).zip(&flows) {
            let delay = (at - first) as f64 * 1e-9;
            engine.start_flow(paths[to as usize - 1], bytes, delay, Tag(number)).unwrap();
        }
        let mut events = Vec::new();
        while let Some(time) = engine.next(&mut events).unwrap() {
            for event in events.drain(..) {
                exact[event.tag.0 as usize] = time;
            }
        }
        prop_assert_eq!(seen.len(), flows.len());
        for ((_, at), exact) in seen.iter().zip(exact) {
            let late = (at - origin - first) as f64 - exact * 1e9;
            prop_assert!((-0.01..1.01).contains(&late), "{} ns late", late);
        }
    }
}
