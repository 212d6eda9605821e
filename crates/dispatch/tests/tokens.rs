//! Answers in parts over real pairs: tokens and arrival times, and violations by either end.
#![cfg(not(miri))]

#[path = "faults/rogue.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod rogue;
#[path = "faults/setup.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod setup;

use rogue::{CANCELS, HEADERS, Rogue};
use setup::pairs::providers;
use setup::{Front, Node, PATIENCE, SLOTS, listen, pair_with, until};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weft_dispatch::wire::{DataType, Dimension, Tensor};
use weft_dispatch::{
    AcceleratorConfig, AcceleratorService, Backend, Batch, FrontEndService, Handler, Hello, Input,
    LedgerConfig, Query, Report, Reports, Role, Schema, ServiceConfig, Threaded,
};
use weft_fabric::{Memory, Time, clock};

fn soon() -> Time {
    clock::now().after(PATIENCE)
}

/// 1,000-byte queries, answers with up to 8 tokens at 4 bytes.
fn schema() -> Schema {
    let tokens = Tensor::new("tokens", DataType::I32, &[Dimension::Tokens(8)]);
    Schema { inputs: vec![Tensor::bytes("input", 1000)], outputs: vec![tokens] }
}

/// Backend that appends tokens 0 to 5, one every 2 ms.
#[derive(Default)]
struct Generator {
    /// Queries in batches so far.
    begun: u32,
    /// Queries whose first token has been reported: the last three tokens wait for it, if given.
    reported: Option<Arc<AtomicU32>>,
}

impl Backend for Generator {
    fn run(&mut self, batch: &mut Batch<'_>) {
        self.begun += batch.len() as u32;
        for token in 0..6i32 {
            if let (3, Some(reported)) = (token, &self.reported) {
                until("reports", || reported.load(Ordering::Relaxed) >= self.begun);
            }
            for query in 0..batch.len() {
                assert!(batch.append(query, &token.to_le_bytes()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(!batch.append(0, &[0; 12]), "beyond the bound");
        assert!(!batch.append(0, &[0; 3]), "a part of a token");
        assert!(batch.output(0, 0).is_empty() && !batch.resize(0, 0, 4));
    }
}

#[test]
fn tokens_are_reported_before_their_answer_with_rising_times() {
    for provider in providers() {
        let listener = listen(provider);
        let (pair, front) = pair_with(&listener, provider, |pair| {
            let mut front = Front::of(8, schema());
            front.join(pair);
            front
        });
        let reported = Arc::new(AtomicU32::new(0));
        let backend = Generator { begun: 0, reported: Some(reported.clone()) };
        let threaded = Threaded::new([backend], Box::new(|| ())).unwrap();
        let mut node = Node::of(threaded, 3, Duration::ZERO, schema());
        node.join(pair);
        let mut front = front.join().unwrap();
        (0..3).for_each(|_| _ = front.submit(PATIENCE).unwrap());
        let (mut seen, mut times) = (vec![Vec::new(); 3], vec![Vec::<Time>::new(); 3]);
        let mut answered = 0;
        until("answers", || {
            front.poll().unwrap();
            node.poll().unwrap();
            while let Some(report) = front.front_end.next_report() {
                let query = report.token() as usize;
                match report {
                    Report::FirstToken { tokens, .. } | Report::Tokens { tokens, .. } => {
                        assert_eq!(
                            (tokens.from as usize * 4, tokens.sends),
                            (seen[query].len(), 1)
                        );
                        assert!(!report.is_last() && times[query].last() <= Some(&tokens.at));
                        let is_first = matches!(report, Report::FirstToken { .. });
                        seen[query].extend(tokens.bytes);
                        times[query].push(tokens.at);
                        reported.fetch_add(is_first.into(), Ordering::Relaxed);
                    }
                    Report::Answered { answer, .. } => {
                        assert_eq!(answer.tensors().next(), Some(&seen[query][..]));
                        answered += 1;
                    }
                    other => panic!("{other:?}"),
                }
            }
            answered == 3
        });
        let expected: Vec<u8> = (0..6i32).flat_map(i32::to_le_bytes).collect();
        assert!(seen.iter().all(|seen| *seen == expected), "{seen:?}");
        assert_eq!(reported.load(Ordering::Relaxed), 3);
        // On a busy machine some tokens arrive together.
        assert!(times.iter().all(|times| times.len() > 1), "{times:?}");
        assert_eq!(front.front_end.counts().in_flight, 0);
    }
}

/// Keeps what arrives before the answer, and the answer.
#[derive(Default)]
struct Seen {
    parts: Vec<u8>,
    answer: Option<Vec<u8>>,
    failed: bool,
}

struct Recorder(Arc<Mutex<Seen>>);

impl Handler for Recorder {
    fn reports(&mut self, reports: &Reports<'_>) {
        let mut seen = self.0.lock().unwrap();
        for report in reports.iter() {
            match report {
                Report::FirstToken { tokens, .. } | Report::Tokens { tokens, .. } => {
                    seen.parts.extend(tokens.bytes);
                }
                Report::Answered { answer, .. } => {
                    seen.answer = answer.tensors().next().map(<[u8]>::to_vec);
                }
                _ => seen.failed = true,
            }
        }
    }
}

fn hello_of(role: Role) -> Hello {
    Hello { role, slots: SLOTS, checksum: true, name: format!("{role:?}"), schema: Some(schema()) }
}

/// Without another query, parts are confirmed and tokens leave while both services could sleep.
#[test]
fn a_lone_stream_goes_on_between_services() {
    for provider in providers() {
        let listener = listen(provider);
        let (pair, node) = pair_with(&listener, provider, |pair| {
            let (service, batches) = (ServiceConfig::default(), AcceleratorConfig::default());
            let threaded = |waker| Ok(Threaded::new([Generator::default()], waker).unwrap());
            let node =
                AcceleratorService::start_with(service, batches, schema(), threaded).unwrap();
            node.join(pair, &hello_of(Role::Accelerator), soon()).unwrap();
            node
        });
        let memory = Arc::new(Memory::shared(1000).unwrap());
        let seen = Arc::new(Mutex::new(Seen::default()));
        let ledger = LedgerConfig { slots: SLOTS, ..LedgerConfig::default() };
        let (config, handler) = (ServiceConfig::default(), Recorder(seen.clone()));
        let front_end =
            FrontEndService::start(config, ledger, schema(), &[memory], handler).unwrap();
        front_end.join(pair, &hello_of(Role::FrontEnd), soon()).unwrap();
        let node = node.join().unwrap();
        let input = Input { memory: 0, offset: 0, length: 1000 };
        front_end.handle().submit(Query::new(0, &[input], soon())).unwrap();
        until("the answer", || {
            let seen = seen.lock().unwrap();
            assert!(!seen.failed);
            seen.answer.is_some()
        });
        let expected: Vec<u8> = (0..6i32).flat_map(i32::to_le_bytes).collect();
        {
            let seen = seen.lock().unwrap();
            assert_eq!((seen.answer.as_ref(), &seen.parts), (Some(&expected), &expected));
        }
        front_end.stop(soon()).unwrap();
        node.stop(soon()).unwrap();
    }
}

type Violation = (&'static str, fn(&Rogue), fn(&Rogue));

/// First what the front end accepts, if anything, then what it refuses.
const PARTS: [Violation; 9] = [
    (
        "tokens of an answer: 0 after 0",
        |_| (),
        |rogue| rogue.write(0, &rogue.part(1, 0, 0), HEADERS),
    ),
    ("36 bytes of tokens", |_| (), |rogue| rogue.write(0, &rogue.part(1, 36, 36), HEADERS)),
    ("6 bytes of tokens", |_| (), |rogue| rogue.write(0, &rogue.part(1, 6, 6), HEADERS)),
    ("turn 2: expected 1", |_| (), |rogue| rogue.write(0, &rogue.part(2, 4, 4), HEADERS)),
    ("checksum", |_| (), |rogue| rogue.write(0, &rogue.part(1, 4, 8), HEADERS)),
    (
        "tokens of an answer: 2 after 2",
        |rogue| rogue.write(0, &rogue.part(1, 8, 8), HEADERS),
        |rogue| rogue.write(0, &rogue.part(1, 8, 0), HEADERS),
    ),
    (
        "tokens of an answer: 2 after 3",
        |rogue| rogue.write(0, &rogue.part(1, 12, 12), HEADERS),
        |rogue| rogue.write(0, &rogue.slot(1, 0, 8), HEADERS),
    ),
    // A first token after the answer.
    (
        "answer in slot 0, which has no query in flight",
        |rogue| rogue.write(0, &rogue.slot(1, 0, 8), HEADERS),
        |rogue| rogue.write(0, &rogue.part(1, 12, 12), HEADERS),
    ),
    (
        "answer in slot 5, which has no query in flight",
        |_| (),
        |rogue| {
            rogue.write(5, &rogue.part(0, 4, 4), HEADERS);
        },
    ),
];

#[test]
fn a_node_that_sends_wrong_tokens_is_named() {
    for (provider, (expected, accepted, refused)) in
        providers().into_iter().flat_map(|provider| PARTS.map(|violation| (provider, violation)))
    {
        let listener = listen(provider);
        let mut front = Front::of(8, schema());
        let (pair, rogue) =
            pair_with(&listener, provider, |pair| Rogue::of(pair, Role::Accelerator, &schema()));
        // Both ends make the connection at the same time.
        front.join(pair);
        let rogue = rogue.join().unwrap();
        front.submit(PATIENCE).unwrap();
        front.poll().unwrap();
        accepted(&rogue);
        let answers = u32::from(expected.starts_with("answer in slot 0"));
        let parts = u32::from(expected.ends_with("after 2") || expected.ends_with("after 3"));
        let mut reports = 0;
        until("the accepted part", || {
            rogue.poll();
            front.poll().unwrap();
            while front.front_end.next_report().is_some() {
                reports += 1;
            }
            reports >= 2 * answers + parts
        });
        refused(&rogue);
        let mut error = None;
        until(expected, || {
            rogue.poll();
            error = front.poll().err();
            error.is_some()
        });
        let error = error.unwrap().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
        while front.front_end.next_report().is_some() {
            reports += 1;
        }
        assert_eq!(reports, 2 * answers + parts, "{expected}");
    }
}

#[test]
fn a_front_end_that_confirms_what_was_not_sent_is_named() {
    for provider in providers() {
        let listener = listen(provider);
        let (pair, rogue) =
            pair_with(&listener, provider, |pair| Rogue::of(pair, Role::FrontEnd, &schema()));
        let threaded = Threaded::new([Generator::default()], Box::new(|| ())).unwrap();
        let mut node = Node::of(threaded, 3, Duration::ZERO, schema());
        node.join(pair);
        let rogue = rogue.join().unwrap();
        rogue.raise(u64::from(SLOTS) + 3, 3, &[], CANCELS);
        let mut error = None;
        until("the refusal", || {
            rogue.poll();
            error = node.poll().err();
            error.is_some()
        });
        let error = error.unwrap().to_string();
        assert!(error.contains("confirmation: 1 parts in slot 3: expected 0"), "{error}");
    }
}
