//! Queries and answers without LoadGen: a front end for node tests and rate measurements.

use crate::error::{Error, Result};
use crate::network::{End, NodeLink, ask_schema, connect, in_parallel};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use weft_dispatch::wire::Layout;
use weft_dispatch::{
    FrontEndHandle, FrontEndService, Handler, Input, LedgerConfig, Query, Report, Reports, Role,
    ServiceConfig,
};
use weft_fabric::{Memory, Time, clock};

/// Queries that wait for a place among those under way.
const SUBMISSIONS: usize = 256;
/// Tensor offsets in memory are multiples of this.
const ALIGNMENT: u64 = 64;

/// Longest sleep between two checks for an interrupt.
const SLICE: Duration = Duration::from_millis(50);
/// Time for reports on expired queries.
const REPORT_TIME: Duration = Duration::from_millis(500);

/// Answer to a query: each tensor's bytes, or the failure cause.
pub type Answer = std::result::Result<Vec<Vec<u8>>, String>;

/// Answers from [`ask`].
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// Answer to each query's first submission.
    pub answers: Vec<Answer>,
    /// Queries that were answered, those submitted again too.
    pub answered: u64,
    /// Queries that have failed or were not answered.
    pub failed: u64,
    /// Time from the first submission to the last answer.
    pub elapsed: Duration,
}

/// Sends queries, given as bytes per tensor, to nodes that have one schema, and waits for the answers. The queries are
/// repeated until `time` has passed, at least once.
///
/// Connecting and each query take at most `patience`; the call ends after `patience` plus `time`, and a little later if
/// queries are without an answer. The interrupt in `end` ends it within 0.1 s.
///
/// # Errors
/// Errors from [`connect`] and the handshakes; [`Error::Invalid`] for a query that the schema excludes;
/// [`weft_fabric::Error::Interrupted`].
pub fn ask(
    addresses: &[String],
    end: &End,
    queries: &[Vec<Vec<u8>>],
    patience: Duration,
    time: Duration,
) -> Result<Asked> {
    let limit = clock::now().after(patience);
    // Each handshake step gets the remaining time.
    let step = || end.patience.min(limit.since(clock::now()));
    let links = connect(addresses, &End { patience: step(), ..end.clone() })?;
    let schema = ask_schema(&links, step())?;
    let layout = Layout::new(&schema.inputs);
    for query in queries {
        let admitted = (query.len() == schema.inputs.len())
            && query.iter().enumerate().all(|(at, bytes)| layout.admits(at, bytes.len() as u64));
        if !admitted {
            let lengths: Vec<usize> = query.iter().map(Vec::len).collect();
            let (value, expected) = (format!("{lengths:?}"), format!("those of {schema}"));
            return Err(Error::Invalid { what: "bytes of a query's tensors", value, expected });
        }
    }
    let (memory, places) = place(queries)?;
    let shared = Arc::new(Shared::default());
    let handler = Keep { shared: shared.clone(), queries: queries.len() as u64 };
    let nodes = links.len() as u32;
    // Few queries wait beyond those in flight on nodes, so that the last answers follow soon after `time`.
    let under_way = end.slots.saturating_mul(nodes);
    let ledger =
        LedgerConfig { queries: under_way, nodes, slots: end.slots, ..LedgerConfig::default() };
    let config = ServiceConfig { submissions: SUBMISSIONS, ..end.service() };
    let memories = [Arc::new(memory)];
    let service = FrontEndService::start(config, ledger, schema.clone(), &memories, handler)?;
    let hello = end.hello(Role::FrontEnd, "front end".into(), Some(schema));
    in_parallel(links, |link| {
        link.begin(step())?;
        let NodeLink { address, pair, .. } = link;
        let joined = service.join(pair, &hello, clock::now().after(step()));
        joined.map_err(|source| Error::Node { address, source })
    })?;
    let limit = limit.after(time);
    let (begin, mut submitted) = (clock::now(), 0);
    while !queries.is_empty() && (submitted == 0 || clock::now().since(begin) < time) {
        let deadline = clock::now().after(patience).min(limit);
        let sent = submit(&service.handle(), &places, submitted, deadline, end)?;
        submitted += sent;
        if sent < queries.len() as u64 {
            break;
        }
    }
    // Queries that expire at the limit are reported after it.
    let is_answered = shared.wait(submitted, end, limit.after(REPORT_TIME));
    let elapsed = clock::now().since(begin);
    if is_interrupted(end) {
        return Err(interrupted());
    }
    let is_late = !is_answered || shared.answered.load(Ordering::Relaxed) < submitted;
    if is_late {
        // This memory returns with the node connection, which may be silent for long.
        service.lose_late()?;
    }
    drop(service.stop(clock::now().after(if is_late { REPORT_TIME } else { end.patience })));
    let kept = std::mem::take(&mut *shared.kept());
    let mut answers = kept.answers;
    let missing = || Err("no report within its time".to_owned());
    Ok(Asked {
        answers: (0..queries.len() as u64)
            .map(|token| answers.remove(&token).unwrap_or_else(missing))
            .collect(),
        answered: shared.answered.load(Ordering::Relaxed),
        failed: submitted - shared.answered.load(Ordering::Relaxed),
        elapsed,
    })
}

/// Submits queries with tokens from `first` on, and waits for room until the deadline. Returns how many found room.
fn submit(
    handle: &FrontEndHandle,
    places: &[Vec<Input>],
    first: u64,
    deadline: Time,
    end: &End,
) -> Result<u64> {
    let mut submitted = 0;
    while submitted < places.len() && !is_interrupted(end) {
        let each = places[submitted..].iter().zip(first + submitted as u64..);
        let each = each.map(|(inputs, token)| Query::new(token, inputs, deadline));
        match handle.submit_all(each, clock::now().after(SLICE).min(deadline)) {
            Ok(number) => submitted += number as usize,
            Err(unsubmitted) => {
                submitted += unsubmitted.submitted as usize;
                match unsubmitted.error {
                    weft_dispatch::Error::Full { .. } if clock::now() < deadline => {}
                    weft_dispatch::Error::Full { .. } => break,
                    error => return Err(error.into()),
                }
            }
        }
    }
    Ok(submitted as u64)
}

fn is_interrupted(end: &End) -> bool {
    end.interrupt.as_ref().is_some_and(|raised| raised.load(Ordering::Relaxed))
}

fn interrupted() -> Error {
    weft_fabric::Error::Interrupted.into()
}

/// Memory with all tensors, and each tensor's place.
fn place(queries: &[Vec<Vec<u8>>]) -> Result<(Memory, Vec<Vec<Input>>)> {
    let mut offset = 0;
    let mut places = Vec::with_capacity(queries.len());
    for query in queries {
        let mut inputs = Vec::with_capacity(query.len());
        for tensor in query {
            let length = tensor.len() as u64;
            inputs.push(Input { memory: 0, offset, length });
            offset += length.next_multiple_of(ALIGNMENT);
        }
        places.push(inputs);
    }
    let memory = Memory::shared(usize::try_from(offset.max(1)).unwrap_or(usize::MAX))?;
    for (query, inputs) in queries.iter().zip(&places) {
        for (tensor, input) in query.iter().zip(inputs) {
            memory.copy_in(input.offset as usize, tensor);
        }
    }
    Ok((memory, places))
}

/// Reports so far.
#[derive(Default)]
struct Kept {
    answers: HashMap<u64, Answer>,
    ended: u64,
}

#[derive(Default)]
struct Shared {
    kept: Mutex<Kept>,
    changed: Condvar,
    answered: AtomicU64,
}

impl Shared {
    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this many queries have ended, at most until `limit` or an interrupt; true if they have.
    fn wait(&self, queries: u64, end: &End, limit: Time) -> bool {
        loop {
            let left = limit.since(clock::now());
            let waits = |kept: &mut Kept| kept.ended < queries;
            let waited = self.changed.wait_timeout_while(self.kept(), left.min(SLICE), waits);
            let (kept, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            drop(kept);
            if !waited.timed_out() {
                return true;
            }
            if left.is_zero() || is_interrupted(end) {
                return false;
            }
        }
    }
}

/// Keeps the first answers, and counts all.
struct Keep {
    shared: Arc<Shared>,
    queries: u64,
}

impl Handler for Keep {
    fn reports(&mut self, reports: &Reports<'_>) {
        let mut kept = self.shared.kept();
        for report in reports.iter() {
            let (token, answer): (u64, Answer) = match report {
                Report::Answered { token, answer, .. } => {
                    self.shared.answered.fetch_add(1, Ordering::Relaxed);
                    kept.ended += 1;
                    if token >= self.queries {
                        continue;
                    }
                    (token, Ok(answer.tensors().map(<[u8]>::to_vec).collect()))
                }
                Report::Failed { token, failure, .. } => {
                    kept.ended += 1;
                    (token, Err(failure.to_string()))
                }
                _ => continue,
            };
            if token < self.queries {
                kept.answers.insert(token, answer);
            }
        }
        drop(kept);
        self.shared.changed.notify_all();
    }
}
