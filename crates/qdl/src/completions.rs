//! This process's answers, collected for one call to LoadGen's `QuerySamplesComplete`.

use crate::counts::Counts;
use std::sync::Arc;
use weft_loadgen::{LoadGen, Response};

/// Longest answer in bytes that is copied and waits for others; longer ones go to LoadGen at once.
const SHORT: usize = 4096;
/// Most answers in a call.
const BATCH: usize = 256;

/// Receiver for answers.
pub(crate) trait Complete: Send {
    /// Takes answers, whose bytes it does not use any more when it returns.
    fn complete(&self, responses: &[Response]);
}

impl Complete for LoadGen {
    fn complete(&self, responses: &[Response]) {
        LoadGen::complete(self, responses);
    }
}

/// Answers that wait for the next call.
pub(crate) struct Completions<C> {
    receiver: C,
    counts: Arc<Counts>,
    /// Answer bytes, concatenated. Never reallocated while answers wait: responses hold addresses.
    bytes: Vec<u8>,
    responses: Vec<Response>,
}

impl<C: Complete> Completions<C> {
    pub fn new(receiver: C, counts: Arc<Counts>) -> Completions<C> {
        let (bytes, responses) = (Vec::with_capacity(BATCH * SHORT), Vec::with_capacity(BATCH));
        Completions { receiver, counts, bytes, responses }
    }

    /// Takes the answer to the sample with an id.
    pub fn answer(&mut self, id: u64, answer: &[u8]) {
        let id = id as usize;
        self.counts.add_answered(1);
        if answer.len() > SHORT {
            return self.receiver.complete(&[Response::new(id, answer)]);
        }
        let begin = self.bytes.len();
        self.bytes.extend_from_slice(answer);
        self.responses.push(Response::new(id, &self.bytes[begin..]));
        if self.responses.len() == BATCH {
            self.flush();
        }
    }

    /// Gives all waiting answers to LoadGen.
    pub fn flush(&mut self) {
        if !self.responses.is_empty() {
            self.receiver.complete(&self.responses);
            self.responses.clear();
            self.bytes.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BATCH, Complete, Completions, SHORT};
    use crate::counts::Counts;
    use std::sync::{Arc, Mutex};
    use weft_loadgen::Response;

    /// Call sizes.
    #[derive(Clone, Default)]
    struct Calls(Arc<Mutex<Vec<usize>>>);

    impl Complete for Calls {
        fn complete(&self, responses: &[Response]) {
            self.0.lock().unwrap().push(responses.len());
        }
    }

    #[test]
    fn short_answers_wait_for_a_batch_and_long_ones_do_not() {
        let (calls, counts) = (Calls::default(), Arc::new(Counts::default()));
        let mut completions = Completions::new(calls.clone(), counts.clone());
        for id in 0..BATCH as u64 + 3 {
            completions.answer(id, &[1; 16]);
        }
        assert_eq!(*calls.0.lock().unwrap(), [BATCH]);
        completions.answer(1000, &[1; SHORT + 1]);
        completions.flush();
        completions.flush();
        assert_eq!(*calls.0.lock().unwrap(), [BATCH, 1, 3]);
        assert_eq!(counts.snapshot().answered, BATCH as u64 + 4);
    }
}
