//! Engine: exact virtual times, event order, usage, and each error.

mod support;

use support::{engine, path};
use weft_netsim::{Engine, Error, Event, Link, LinkId, LinkUsage, PathId, ServerId, Tag};

const LATENCY: f64 = 1e-6;
const BANDWIDTH: f64 = 1e9;

/// Engine with equal links.
fn equal_links(links: usize) -> Engine {
    Engine::new(&vec![Link { bandwidth: BANDWIDTH, latency: LATENCY }; links]).unwrap()
}

/// All remaining events: times, and tags in order.
fn run(engine: &mut Engine) -> Vec<(f64, Vec<u64>)> {
    let (mut all, mut events) = (Vec::new(), Vec::new());
    while let Some(time) = engine.next(&mut events).unwrap() {
        assert_eq!(time, engine.now());
        all.push((time, events.drain(..).map(|event: Event| event.tag.0).collect()));
    }
    assert_eq!(engine.in_flight(), 0);
    all
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * a.abs().max(b.abs())
}

#[test]
fn a_single_flow_takes_its_delay_its_latency_and_its_bytes() {
    let mut engine = equal_links(3);
    let path = path(&mut engine, &[0, 1, 2]);
    engine.start_flow(path, 5000, 0.5e-6, Tag(9)).unwrap();
    let expected = 0.5e-6 + 3.0 * LATENCY + 5000.0 / BANDWIDTH;
    assert_eq!(engine.next_time(), Some(0.5e-6 + 3.0 * LATENCY));
    let found = run(&mut engine);
    assert!(found.len() == 1 && found[0].1 == [9]);
    assert!(close(found[0].0, expected), "{} is not {expected}", found[0].0);
}

#[test]
fn a_flow_of_no_bytes_or_over_no_link_only_waits() {
    let mut engine = equal_links(2);
    let (far, here) = (path(&mut engine, &[0, 1]), path(&mut engine, &[]));
    engine.start_flow(far, 0, 0.0, Tag(1)).unwrap();
    engine.start_flow(here, 1 << 40, 0.0, Tag(2)).unwrap();
    engine.start_flow(here, 1, 5.0, Tag(3)).unwrap();
    let expected = [(0.0, vec![2]), (2.0 * LATENCY, vec![1]), (5.0, vec![3])];
    assert_eq!(run(&mut engine), expected);
}

#[test]
fn a_later_flow_takes_half_until_the_first_has_ended() {
    // The first has the link to itself for 1 s, then both run at half speed: the first takes 4 s more, the second, half
    // done by then, 2 s by itself.
    let mut engine = engine(&[100.0]);
    let path = path(&mut engine, &[0]);
    engine.start_flow(path, 300, 0.0, Tag(1)).unwrap();
    engine.start_flow(path, 400, 1.0, Tag(2)).unwrap();
    assert_eq!(run(&mut engine), [(5.0, vec![1]), (7.0, vec![2])]);
}

#[test]
fn bandwidth_left_by_a_bottleneck_goes_to_other_flows() {
    // Flow 1 has a third of the narrow link; flow 4 gets the rest on the wide one.
    let mut engine = engine(&[30.0, 100.0]);
    let (both, narrow, wide) =
        (path(&mut engine, &[0, 1]), path(&mut engine, &[0]), path(&mut engine, &[1]));
    let flows = [(both, 1), (narrow, 2), (narrow, 3), (wide, 4)];
    let flows = flows.map(|(path, tag)| engine.start_flow(path, 900, 0.0, Tag(tag)).unwrap());
    engine.advance(0.0, &mut Vec::new()).unwrap();
    assert_eq!(flows.map(|flow| engine.rate(flow).unwrap()), [10.0, 10.0, 10.0, 90.0]);
    assert_eq!(run(&mut engine), [(10.0, vec![4]), (90.0, vec![1, 2, 3])]);
}

#[test]
fn a_server_is_first_in_first_out() {
    let mut engine = engine(&[100.0]);
    let path = path(&mut engine, &[0]);
    let (nic, other) = (engine.add_server(), engine.add_server());
    engine.serve(nic, 1.0, Tag(1)).unwrap();
    engine.start_flow_after(nic, 2.0, path, 100, 0.25, Tag(2)).unwrap();
    engine.serve(nic, 0.0, Tag(3)).unwrap();
    engine.serve(other, 1.5, Tag(4)).unwrap();
    let mut events = Vec::new();
    assert_eq!(engine.next(&mut events).unwrap(), Some(1.0));
    // Queued behind work until 3 s.
    engine.serve(nic, 1.0, Tag(5)).unwrap();
    let rest = [(1.5, vec![4]), (3.0, vec![3]), (4.0, vec![5]), (4.25, vec![2])];
    assert_eq!(run(&mut engine), rest);
    // Idle since 4 s.
    engine.serve(nic, 1.0, Tag(6)).unwrap();
    assert_eq!(run(&mut engine), [(5.25, vec![6])]);
}

#[test]
fn events_of_one_instant_are_in_the_order_of_calls() {
    let mut engine = engine(&[100.0; 8]);
    for tag in [5, 3, 7, 0] {
        let path = path(&mut engine, &[tag as u32]);
        engine.start_flow(path, 100, 0.0, Tag(tag)).unwrap();
    }
    engine.timer(1.0, Tag(9)).unwrap();
    assert_eq!(run(&mut engine), [(1.0, vec![9, 5, 3, 7, 0])]);
}

#[test]
fn a_cancelled_flow_frees_its_share_and_its_handle_is_invalid() {
    let mut engine = engine(&[100.0]);
    let path = path(&mut engine, &[0]);
    let first = engine.start_flow(path, 1000, 0.0, Tag(1)).unwrap();
    engine.start_flow(path, 1000, 0.0, Tag(2)).unwrap();
    let waiting = engine.start_flow(path, 1000, 3.0, Tag(3)).unwrap();
    engine.advance(2.0, &mut Vec::new()).unwrap();
    engine.cancel(first);
    engine.cancel(waiting);
    assert_eq!(engine.rate(first), None);
    // These reuse slots from cancelled flows, whose handles must not match them.
    engine.start_flow(path, 0, 1.0, Tag(4)).unwrap();
    engine.start_flow(path, 0, 1.0, Tag(5)).unwrap();
    engine.cancel(first);
    engine.cancel(waiting);
    assert_eq!(run(&mut engine), [(3.0, vec![4, 5]), (11.0, vec![2])]);
    let usage = engine.link_usage(LinkId(0));
    assert_eq!(usage, LinkUsage { bytes: 1100.0, busy: 11.0, most_flows: 2 });
}

#[test]
fn a_degraded_link_slows_its_flows_and_a_restored_one_resumes_them() {
    let mut engine = engine(&[100.0, 100.0]);
    let (both, second) = (path(&mut engine, &[0, 1]), path(&mut engine, &[1]));
    engine.start_flow(both, 1000, 0.0, Tag(1)).unwrap();
    engine.start_flow(second, 1000, 0.0, Tag(2)).unwrap();
    let mut events = Vec::new();
    engine.advance(4.0, &mut events).unwrap();
    // Each has 800 bytes left. 10 and 90 a second, then none and 100.
    engine.set_bandwidth(LinkId(0), 10.0).unwrap();
    engine.advance(8.0, &mut events).unwrap();
    engine.set_bandwidth(LinkId(0), 0.0).unwrap();
    assert_eq!(engine.next(&mut events).unwrap(), Some(12.4));
    let stalled = Error::Stalled { tag: Tag(1), link: LinkId(0), flows: 1, time: 12.4 };
    assert_eq!(engine.next_time(), None);
    assert_eq!(engine.next(&mut events), Err(stalled.clone()));
    assert_eq!(
        stalled.to_string(),
        "flow 1 is stalled at 12.4 s: link 0 has failed (1 stalled in all)"
    );
    engine.advance(20.0, &mut events).unwrap();
    engine.set_bandwidth(LinkId(0), 100.0).unwrap();
    assert_eq!(run(&mut engine), [(27.6, vec![1])]);
}

#[test]
fn a_timer_before_a_stall_expires() {
    let mut engine = engine(&[100.0]);
    let path = path(&mut engine, &[0]);
    engine.set_bandwidth(LinkId(0), 0.0).unwrap();
    engine.start_flow(path, 1, 0.0, Tag(1)).unwrap();
    engine.timer(3.0, Tag(2)).unwrap();
    let mut events = Vec::new();
    assert_eq!(engine.next(&mut events).unwrap(), Some(3.0));
    assert!(matches!(engine.next(&mut events), Err(Error::Stalled { tag: Tag(1), .. })));
}

#[test]
fn usage_of_a_link_counts_its_bytes() {
    let mut engine = engine(&[100.0, 50.0, 10.0]);
    let (long, short) = (path(&mut engine, &[0, 1]), path(&mut engine, &[0]));
    engine.start_flow(long, 100, 0.0, Tag(1)).unwrap();
    engine.start_flow(short, 100, 1.0, Tag(2)).unwrap();
    engine.start_flow(short, 100, 10.0, Tag(3)).unwrap();
    let mut events = Vec::new();
    engine.advance(1.5, &mut events).unwrap();
    let usage = |bytes, busy, most_flows| LinkUsage { bytes, busy, most_flows };
    assert_eq!(engine.link_usage(LinkId(0)), usage(75.0 + 25.0, 1.5, 2));
    run(&mut engine);
    assert_eq!(engine.link_usage(LinkId(0)), usage(300.0, 2.5 + 1.0, 2));
    assert_eq!(engine.link_usage(LinkId(1)), usage(100.0, 2.0, 1));
    assert_eq!(engine.link_usage(LinkId(2)), LinkUsage::default());
    assert_eq!(engine.link_usage(LinkId(3)), LinkUsage::default());
}

#[test]
fn slots_are_reused() {
    let mut engine = equal_links(4);
    let paths = [path(&mut engine, &[0, 1]), path(&mut engine, &[2, 3])];
    let mut events = Vec::new();
    for round in 0..50_000_u64 {
        engine.start_flow(paths[(round % 2) as usize], 100 + round % 7, 0.0, Tag(0)).unwrap();
        let cancelled = engine.start_flow(paths[0], round, 1e-7, Tag(0)).unwrap();
        engine.timer(1e-7, Tag(1)).unwrap();
        if round % 3 == 0 {
            engine.cancel(cancelled);
        }
        while engine.in_flight() > 20 {
            events.clear();
            engine.next(&mut events).unwrap();
        }
    }
    assert!(engine.slots() <= 23, "{} slots", engine.slots());
    run(&mut engine);
}

#[test]
fn equal_paths_have_one_number_and_a_longer_path_keeps_flows() {
    let mut engine = engine(&[100.0; 40]);
    let short = path(&mut engine, &[0]);
    assert_eq!(path(&mut engine, &[0]), short);
    engine.start_flow(short, 300, 0.0, Tag(1)).unwrap();
    engine.start_flow(short, 300, 0.0, Tag(2)).unwrap();
    engine.advance(1.0, &mut Vec::new()).unwrap();
    let long = path(&mut engine, &(0..40).collect::<Vec<_>>());
    assert_ne!(long, short);
    engine.start_flow(long, 400, 0.0, Tag(3)).unwrap();
    // Both have 250 bytes left, at a third of the speed; then the long one has 150 left.
    let found = run(&mut engine);
    assert_eq!(found.len(), 2);
    assert!(close(found[0].0, 8.5) && found[0].1.len() == 2);
    assert!(close(found[1].0, 10.0) && found[1].1 == [3]);
}

#[test]
fn two_runs_are_the_same_bit_for_bit() {
    let run = || {
        let mut engine = equal_links(16);
        for number in 0..200_u64 {
            let first = (number * 7 % 13) as u32;
            let path = path(&mut engine, &[first, first + 1, (first + 5) % 16]);
            engine
                .start_flow(path, 1000 + number * 977, number as f64 * 1e-7, Tag(number))
                .unwrap();
        }
        run(&mut engine)
    };
    let (first, second) = (run(), run());
    assert!(first.len() > 100);
    assert_eq!(first, second);
}

#[test]
fn events_are_appended() {
    let mut engine = equal_links(1);
    engine.timer(1.0, Tag(1)).unwrap();
    engine.timer(2.0, Tag(2)).unwrap();
    let mut events = Vec::new();
    assert_eq!(engine.next(&mut events).unwrap(), Some(1.0));
    assert_eq!(engine.next(&mut events).unwrap(), Some(2.0));
    assert_eq!(events.iter().map(|event| event.tag.0).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(engine.next(&mut events).unwrap(), None);
}

#[test]
fn invalid_links_are_rejected() {
    for bandwidth in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let links = [Link { bandwidth: 1.0, latency: 0.0 }, Link { bandwidth, latency: 0.0 }];
        let error = Engine::new(&links).unwrap_err();
        assert!(matches!(error, Error::Bandwidth { link: LinkId(1), .. }), "{error}");
        let mut engine = equal_links(1);
        assert_eq!(engine.set_bandwidth(LinkId(0), bandwidth).is_ok(), bandwidth == 0.0);
    }
    for latency in [-1e-9, f64::NAN, f64::INFINITY] {
        let error = Engine::new(&[Link { bandwidth: 1.0, latency }]).unwrap_err();
        assert!(matches!(error, Error::Latency { link: LinkId(0), .. }), "{error}");
    }
    let slow = [Link { bandwidth: 1.0, latency: f64::MAX }; 2];
    let error = Engine::new(&slow).unwrap().add_path(&[LinkId(0), LinkId(1)]).unwrap_err();
    assert!(matches!(error, Error::Latency { .. }), "{error}");
}

#[test]
fn unknown_numbers_are_rejected() {
    let mut engine = equal_links(2);
    let path = path(&mut engine, &[1]);
    let error = engine.add_path(&[LinkId(1), LinkId(2)]).unwrap_err();
    assert_eq!(error, Error::UnknownLink { link: LinkId(2), links: 2 });
    let error = engine.set_bandwidth(LinkId(7), 1.0).unwrap_err();
    assert_eq!(error, Error::UnknownLink { link: LinkId(7), links: 2 });
    let error = engine.start_flow(PathId(1), 1, 0.0, Tag(1)).unwrap_err();
    assert_eq!(error, Error::UnknownPath { path: 1, paths: 1 });
    let unknown = Error::UnknownServer { server: 0, servers: 0 };
    assert_eq!(engine.serve(ServerId(0), 1.0, Tag(1)), Err(unknown.clone()));
    let error = engine.start_flow_after(ServerId(0), 1.0, path, 1, 0.0, Tag(1)).unwrap_err();
    assert_eq!(error, unknown);
    assert_eq!(engine.in_flight(), 0);
}

#[test]
fn a_path_with_a_loop_is_rejected() {
    let mut engine = equal_links(5);
    let links: Vec<LinkId> = [3, 1, 4, 1, 3].map(LinkId).to_vec();
    let error = engine.add_path(&links).unwrap_err();
    assert_eq!(error, Error::Loop { link: LinkId(1), first: 1, second: 3 });
    assert_eq!(error.to_string(), "link 1 is hop 1 and hop 3 of one path: a routing loop");
}

#[test]
fn invalid_durations_are_rejected_without_effect() {
    for seconds in [-1.0, f64::NAN, f64::INFINITY] {
        let mut engine = equal_links(1);
        let (path, server) = (path(&mut engine, &[0]), engine.add_server());
        let errors = [
            engine.timer(seconds, Tag(1)).unwrap_err(),
            engine.serve(server, seconds, Tag(1)).unwrap_err(),
            engine.start_flow(path, 1, seconds, Tag(1)).unwrap_err(),
            engine.start_flow_after(server, seconds, path, 1, 0.0, Tag(1)).unwrap_err(),
            engine.start_flow_after(server, 0.0, path, 1, seconds, Tag(1)).unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, Error::Duration { tag: Tag(1), .. }), "{error}");
        }
        assert_eq!(run(&mut engine), []);
    }
}

#[test]
fn infinite_and_past_times_are_errors() {
    let mut engine = engine(&[f64::MIN_POSITIVE]);
    let path = path(&mut engine, &[0]);
    engine.timer(f64::MAX, Tag(1)).unwrap();
    let server = engine.add_server();
    engine.serve(server, f64::MAX, Tag(2)).unwrap();
    let error = engine.serve(server, f64::MAX, Tag(3)).unwrap_err();
    assert_eq!(error, Error::Time { tag: Tag(3), time: f64::INFINITY });
    engine.start_flow(path, u64::MAX, 0.0, Tag(4)).unwrap();
    let mut events = Vec::new();
    let error = engine.next(&mut events).unwrap_err();
    assert_eq!(error, Error::Time { tag: Tag(4), time: f64::INFINITY });
    let mut engine = equal_links(1);
    engine.advance(3.0, &mut events).unwrap();
    for to in [2.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(engine.advance(to, &mut events), Err(Error::Past { .. })));
    }
}

#[test]
fn time_without_progress_is_an_error() {
    let mut engine = equal_links(1);
    let here = path(&mut engine, &[]);
    engine.timer(1.0, Tag(0)).unwrap();
    let mut events = Vec::new();
    let error = loop {
        match engine.next(&mut events) {
            Ok(_) => drop(engine.start_flow(here, 1, 0.0, Tag(7)).unwrap()),
            Err(error) => break error,
        }
        events.clear();
    };
    assert!(matches!(error, Error::NoProgress { time: 1.0, tag: Tag(7), .. }), "{error}");
}

/// Two chains with equal durations, added in different orders, must stay in step.
#[test]
fn sums_in_another_order_are_still_the_same_instant() {
    let durations = [0.1, 0.2, 0.3, 0.7];
    let mut engine = equal_links(1);
    let mut steps = [0_usize; 2];
    for (chain, duration) in (0..2).zip(durations) {
        engine.timer(duration, Tag(chain)).unwrap();
    }
    let (mut events, mut together) = (Vec::new(), 0);
    for _ in 0..4000 {
        engine.next(&mut events).unwrap();
        together += usize::from(events.len() == 2);
        for event in events.drain(..) {
            let chain = event.tag.0 as usize;
            steps[chain] += 1;
            // The first adds them in order, the second one position ahead.
            engine.timer(durations[(steps[chain] + chain) % 4], event.tag).unwrap();
        }
    }
    assert!(together >= 500, "in step {together} times");
}
