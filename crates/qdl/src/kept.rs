//! Answers kept by sample: against the rules, for a proof that MLPerf's audit TEST04 detects them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use weft_loadgen::{LoadGen, Response, Sample};

/// The answers to the samples that were answered last.
pub(crate) struct KeptAnswers {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Sample for each query in flight, by id.
    under_way: HashMap<u64, usize>,
    answers: VecDeque<(usize, Vec<u8>)>,
}

impl KeptAnswers {
    pub fn new(limit: usize) -> KeptAnswers {
        KeptAnswers { limit, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a sample if the answer is known; otherwise the query is in flight.
    pub fn answer(&self, sample: &Sample, loadgen: &LoadGen) -> bool {
        let mut state = self.state();
        let known = state.answers.iter().find(|(index, _)| *index == sample.index);
        if let Some((_, answer)) = known {
            loadgen.complete(&[Response::new(sample.id, answer)]);
            return true;
        }
        state.under_way.insert(sample.id as u64, sample.index);
        false
    }

    /// Keeps the answer to a query under way.
    pub fn keep(&self, id: u64, answer: &[u8]) {
        let mut state = self.state();
        let Some(index) = state.under_way.remove(&id) else { return };
        if state.answers.iter().any(|(known, _)| *known == index) {
            return;
        }
        if state.answers.len() == self.limit {
            state.answers.pop_front();
        }
        state.answers.push_back((index, answer.to_vec()));
    }
}
