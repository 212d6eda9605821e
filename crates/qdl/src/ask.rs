//! Queries and answers without LoadGen: a front end for tests of nodes and for rates.

use crate::error::{Error, Result};
use crate::network::{End, NodeLink, ask_schema, connect, in_parallel};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use weft_dispatch::wire::Layout;
use weft_dispatch::{
    FrontEndService, Handler, Input, LedgerConfig, Query, Report, Reports, Role, ServiceConfig,
};
use weft_fabric::{Memory, clock};

/// Queries that wait for a place among those under way.
const SUBMISSIONS: usize = 256;
/// Distance of tensors in memory is a multiple of this.
const ALIGNMENT: u64 = 64;

/// Answer to a query: the bytes of each tensor, or the cause of its failure.
pub type Answer = std::result::Result<Vec<Vec<u8>>, String>;

/// Answers of [`ask`].
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// The answer to each query, of its first submission.
    pub answers: Vec<Answer>,
    /// Queries that were answered, those submitted again too.
    pub answered: u64,
    /// Queries that have failed or were not answered.
    pub failed: u64,
    /// Time from the first submission to the last answer.
    pub elapsed: Duration,
}

/// Sends queries, of the bytes of each of their tensors, to nodes that have one schema, and waits for their answers. They
/// are sent again and again until `time` has passed, at least once.
///
/// # Errors
/// Those of [`connect`] and of the handshakes; [`Error::Invalid`] for a query that the schema excludes.
pub fn ask(
    addresses: &[String],
    end: &End,
    queries: &[Vec<Vec<u8>>],
    patience: Duration,
    time: Duration,
) -> Result<Asked> {
    let links = connect(addresses, end)?;
    let schema = ask_schema(&links, end.patience)?;
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
    // Few queries wait beyond those that nodes have, so that the last answers follow the end of `time`.
    let under_way = end.slots.saturating_mul(nodes);
    let ledger =
        LedgerConfig { queries: under_way, nodes, slots: end.slots, ..LedgerConfig::default() };
    let config = ServiceConfig { submissions: SUBMISSIONS, ..end.service() };
    let memories = [Arc::new(memory)];
    let service = FrontEndService::start(config, ledger, schema.clone(), &memories, handler)?;
    let hello = end.hello(Role::FrontEnd, "front end".into(), Some(schema));
    in_parallel(links, |link| {
        link.begin(end.patience)?;
        let NodeLink { address, pair, .. } = link;
        let joined = service.join(pair, &hello, clock::now().after(end.patience));
        joined.map_err(|source| Error::Node { address, source })
    })?;
    let (begin, mut submitted) = (clock::now(), 0);
    while !queries.is_empty() && (submitted == 0 || clock::now().since(begin) < time) {
        let deadline = clock::now().after(patience);
        let each = places.iter().zip(submitted..);
        let each = each.map(|(inputs, token)| Query::new(token, inputs, deadline));
        let sent = service.handle().submit_all(each, deadline.after(patience));
        submitted += sent.map_err(|unsubmitted| unsubmitted.error)?;
    }
    shared.wait(submitted, patience * 2);
    let elapsed = clock::now().since(begin);
    // Memory of queries that have failed returns at the latest when their nodes are gone.
    drop(service.stop(clock::now().after(end.patience)));
    let kept = std::mem::take(&mut *shared.kept());
    let mut answers = kept.answers;
    let missing = || Err("no report within twice its time".to_owned());
    Ok(Asked {
        answers: (0..queries.len() as u64)
            .map(|token| answers.remove(&token).unwrap_or_else(missing))
            .collect(),
        answered: shared.answered.load(Ordering::Relaxed),
        failed: submitted - shared.answered.load(Ordering::Relaxed),
        elapsed,
    })
}

/// Memory with all tensors, and the place of each.
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

    /// Waits until this number of queries has ended, at most for `limit`.
    fn wait(&self, queries: u64, limit: Duration) {
        let waits = |kept: &mut Kept| kept.ended < queries;
        let waited = self.changed.wait_timeout_while(self.kept(), limit, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
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
