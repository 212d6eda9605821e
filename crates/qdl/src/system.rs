//! LoadGen's system under test over the network.

use crate::counts::Counts;
use crate::error::{Error, Result};
use crate::handler::{ToLoadGen, stream_of};
use crate::kept::KeptAnswers;
use crate::lent::Lent;
use crate::network::{End, NodeLink, ask_names, ask_schema, in_parallel};
use crate::samples::Samples;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use weft_dispatch::service::Unsubmitted;
use weft_dispatch::wire::{Layout, Tensor};
use weft_dispatch::{FrontEndHandle, FrontEndService, Input, LedgerConfig, Query, Role, Schema};
use weft_fabric::clock;
use weft_loadgen::{LoadGen, Response, Sample, SampleLibrary, SystemUnderTest};

/// Name part that the Network division's rules demand.
pub const REQUIRED: &str = "Network SUT";

/// System under test over the network. It neither batches, pads, converts nor caches: a query is one write from the
/// sample's registered memory.
pub struct NetworkSystem {
    loadgen: LoadGen,
    samples: Arc<Samples>,
    counts: Arc<Counts>,
    config: SystemConfig,
    schema: Schema,
    /// Bytes per query tensor; a sample is all tensors concatenated.
    lengths: Box<[u64]>,
    state: Mutex<State>,
    handle: OnceLock<FrontEndHandle>,
    kept: Option<Arc<KeptAnswers>>,
    lent: Arc<Lent>,
}

/// Sizes and limits for a [`NetworkSystem`].
#[derive(Debug, Clone)]
pub struct SystemConfig {
    /// Connections.
    pub end: End,
    /// Queries in flight, node selection.
    pub ledger: LedgerConfig,
    /// Time from submission until a query fails.
    pub deadline: Duration,
    /// Answers kept by sample, against the rules; 0: none.
    pub kept_answers: usize,
}

/// Before and after LoadGen has asked for the name.
enum State {
    Connected(Vec<NodeLink>),
    Serving(String, FrontEndService<ToLoadGen>),
    Failed(Option<Error>),
}

impl NetworkSystem {
    /// System over connected nodes, whose schema takes the samples.
    ///
    /// # Errors
    /// Errors from [`ask_names`]; [`Error::Invalid`] for samples that a node's schema excludes.
    pub fn new(
        loadgen: LoadGen,
        links: Vec<NodeLink>,
        samples: Arc<Samples>,
        counts: Arc<Counts>,
        config: SystemConfig,
    ) -> Result<NetworkSystem> {
        let schema = ask_schema(&links, config.end.patience)?;
        let lengths = input_lengths(&schema, samples.bytes())?;
        let kept = config.kept_answers;
        let kept = (kept > 0).then(|| Arc::new(KeptAnswers::new(kept)));
        let (state, handle) = (Mutex::new(State::Connected(links)), OnceLock::new());
        let lent = Arc::default();
        Ok(NetworkSystem {
            loadgen,
            samples,
            counts,
            config,
            schema,
            lengths,
            state,
            handle,
            kept,
            lent,
        })
    }

    /// Maximum answer size in bytes.
    pub fn answer_bytes(&self) -> u64 {
        self.schema.outputs.iter().map(Tensor::max_bytes).sum()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queries every node for the name, then begins with all.
    fn begin(&self, links: Vec<NodeLink>) -> Result<(String, FrontEndService<ToLoadGen>)> {
        let SystemConfig { end, ledger, .. } = &self.config;
        let hellos = ask_names(&links, end.patience)?;
        let names: Vec<&str> = hellos.iter().map(|hello| hello.name.as_str()).collect();
        let (counts, kept, lent) = (self.counts.clone(), self.kept.clone(), self.lent.clone());
        let handler = ToLoadGen::new(self.loadgen, counts, kept, lent, &self.schema);
        let memory = std::slice::from_ref(self.samples.memory());
        let service =
            FrontEndService::start(end.service(), *ledger, self.schema.clone(), memory, handler)?;
        self.counts.set_peers(links.len() as u64);
        let hello = end.hello(Role::FrontEnd, "front end".into(), Some(self.schema.clone()));
        in_parallel(links, |link| {
            link.begin(end.patience)?;
            let NodeLink { address, pair, .. } = link;
            let joined = service.join(pair, &hello, clock::now().after(end.patience));
            joined.map_err(|source| Error::Node { address, source })
        })?;
        let _ = self.handle.set(service.handle());
        Ok((format!("Weft {REQUIRED}: {}", names.join(", ")), service))
    }

    /// Ends the service. Returns the error that made the test void, if there was one.
    ///
    /// # Errors
    /// Error from a node that did not return the name.
    pub fn end(self) -> Result<()> {
        match self.state.into_inner().unwrap_or_else(PoisonError::into_inner) {
            State::Failed(Some(error)) => Err(error),
            State::Serving(_, service) => {
                service.stop(clock::now().after(self.config.deadline))?;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Waits until no node can read samples in failed queries. Nodes that have not answered these within another
    /// deadline are lost. False if that cannot be reached.
    fn settle(&self) -> bool {
        if self.lent.wait(self.config.deadline) {
            return true;
        }
        if let State::Serving(_, service) = &*self.state() {
            // A service that has stopped has returned all memory.
            let _ = service.lose_late();
        }
        self.lent.wait(SETTLE)
    }

    /// Gives empty answers: LoadGen waits for an answer to each sample.
    fn fail(&self, samples: &[Sample]) {
        self.counts.add_failed(samples.len() as u64);
        for sample in samples {
            let empty = [Response::new(sample.id, &[])];
            if stream_of(&self.schema).is_some() {
                self.loadgen.first_token(&empty);
            }
            self.loadgen.complete(&empty);
        }
    }

    /// Submits samples; returns how many were, which is all while the service runs.
    fn submit(&self, samples: &[Sample]) -> usize {
        let Some(handle) = self.handle.get() else { return 0 };
        let now = clock::now();
        let deadline = now.after(self.config.deadline);
        let queries = samples.iter().map(|sample| {
            let mut offset = self.samples.offset(sample.index);
            let mut inputs = [Input::default(); Schema::MAX_TENSORS];
            for (input, &length) in inputs.iter_mut().zip(&self.lengths) {
                *input = Input { memory: 0, offset, length };
                offset += length;
            }
            Query::new(sample.id as u64, &inputs[..self.lengths.len()], deadline)
        });
        // Room comes at the latest when queries in flight have reached the deadline.
        match handle.submit_all(queries, deadline.after(self.config.deadline)) {
            Ok(submitted) => submitted as usize,
            Err(Unsubmitted { submitted, .. }) => submitted as usize,
        }
    }
}

/// Bytes per tensor in a sample that concatenates them.
fn input_lengths(schema: &Schema, bytes: u64) -> Result<Box<[u64]>> {
    let most: Box<[u64]> = schema.inputs.iter().map(Tensor::max_bytes).collect();
    let sum: u64 = most.iter().sum();
    match &*most {
        [_] if Layout::new(&schema.inputs).admits(0, bytes) => Ok([bytes].into()),
        _ if bytes == sum => Ok(most),
        _ => Err(Error::Invalid {
            what: "bytes of a sample",
            value: bytes.to_string(),
            expected: format!("{sum}, by the schema of the node, {schema}"),
        }),
    }
}

/// Time in which memory for a lost node's queries returns.
const SETTLE: Duration = Duration::from_secs(10);

/// Samples for a [`NetworkSystem`], which leave memory after no node reads them.
pub(crate) struct NetworkSamples<'a> {
    pub system: &'a NetworkSystem,
    pub samples: &'a Samples,
}

impl SampleLibrary for NetworkSamples<'_> {
    fn name(&self) -> String {
        self.samples.name()
    }

    fn total(&self) -> usize {
        self.samples.total()
    }

    fn performance(&self) -> usize {
        self.samples.performance()
    }

    fn load(&self, indices: &[usize]) {
        self.samples.load(indices);
    }

    /// # Panics
    /// If a node that is lost could still read samples: LoadGen accepts no error here.
    fn unload(&self, indices: &[usize]) {
        assert!(self.system.settle(), "samples are in use, and their node cannot be cut off");
        self.samples.unload(indices);
    }
}

/// Samples per service call, which share one deadline.
const CHUNK: usize = 512;

impl SystemUnderTest for NetworkSystem {
    /// Returns after a round trip to every node.
    fn name(&self) -> String {
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Failed(None)) {
            State::Connected(links) => match self.begin(links) {
                Ok((name, service)) => *state = State::Serving(name, service),
                Err(error) => *state = State::Failed(Some(error)),
            },
            before => *state = before,
        }
        match &*state {
            State::Serving(name, _) => name.clone(),
            _ => "unreachable".to_owned(),
        }
    }

    fn issue(&self, samples: &[Sample]) {
        self.counts.add_issued(samples.len() as u64);
        let size = if self.kept.is_some() { 1 } else { CHUNK };
        for chunk in samples.chunks(size) {
            if let Some(kept) = &self.kept
                && kept.answer(&chunk[0], &self.loadgen)
            {
                self.counts.add_answered(1);
                continue;
            }
            self.fail(&chunk[self.submit(chunk)..]);
        }
    }

    /// No query is held back.
    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::input_lengths;
    use weft_dispatch::Schema;
    use weft_dispatch::wire::{DataType, Dimension, Tensor};

    fn schema(shapes: &[Dimension]) -> Schema {
        let tensor = |size: &Dimension| Tensor::new("x", DataType::I32, &[*size]);
        Schema { inputs: shapes.iter().map(tensor).collect(), ..Schema::bytes(1, 1) }
    }

    #[test]
    fn a_sample_has_the_bytes_of_its_tensors() {
        let (fixed, variable) = (Dimension::Fixed(3), Dimension::UpTo(3));
        assert_eq!(*input_lengths(&schema(&[fixed]), 12).unwrap(), [12]);
        assert_eq!(*input_lengths(&schema(&[variable]), 8).unwrap(), [8]);
        assert_eq!(*input_lengths(&schema(&[fixed, variable]), 24).unwrap(), [12, 12]);
        for (shapes, bytes) in
            [(vec![fixed], 8), (vec![variable], 9), (vec![variable], 16), (vec![fixed; 2], 12)]
        {
            let text = input_lengths(&schema(&shapes), bytes).unwrap_err().to_string();
            assert!(text.starts_with(&format!("bytes of a sample {bytes}: expected ")), "{text}");
        }
    }
}
