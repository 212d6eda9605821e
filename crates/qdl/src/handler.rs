//! Handler of a front end's reports: gives answers to LoadGen, all of a turn of the service in one call.

use crate::counts::Counts;
use crate::kept::KeptAnswers;
use std::sync::Arc;
use weft_dispatch::{Answer, Handler, NodeId, Report, Reports};
use weft_loadgen::{LoadGen, Response};

/// Passes answers to LoadGen where the node wrote them. Those of several tensors are put one after another.
pub(crate) struct ToLoadGen {
    pub loadgen: LoadGen,
    pub counts: Arc<Counts>,
    pub kept: Option<Arc<KeptAnswers>>,
    /// Most bytes of an answer.
    pub answer_bytes: usize,
    /// True for answers of several tensors.
    pub is_joined: bool,
    pub responses: Vec<Response>,
    pub joined: Vec<u8>,
}

impl ToLoadGen {
    /// Bytes of an answer, valid until the end of the call.
    fn bytes<'a>(joined: &'a mut Vec<u8>, is_joined: bool, answer: Answer<'a>) -> &'a [u8] {
        if !is_joined {
            return answer.tensors().next().unwrap_or_default();
        }
        let begin = joined.len();
        answer.tensors().for_each(|tensor| joined.extend_from_slice(tensor));
        &joined[begin..]
    }
}

impl Handler for ToLoadGen {
    fn reports(&mut self, reports: &Reports<'_>) {
        let ToLoadGen { responses, joined, kept, is_joined, .. } = self;
        if *is_joined {
            // Responses have addresses, so this memory stays where it is during the call.
            joined.clear();
            joined.reserve(reports.len() * self.answer_bytes);
        }
        let (mut answered, mut failed) = (0, 0);
        for report in reports.iter() {
            match report {
                Report::Answered { token, answer, .. } => {
                    let bytes = ToLoadGen::bytes(joined, *is_joined, answer);
                    if let Some(kept) = kept {
                        kept.keep(token, bytes);
                    }
                    answered += 1;
                    responses.push(Response::new(token as usize, bytes));
                }
                // LoadGen waits for each sample without a limit.
                Report::Failed { token, .. } => {
                    failed += 1;
                    responses.push(Response::new(token as usize, &[]));
                }
                // Tokens are part of the answer, too.
                Report::Returned { .. } | Report::FirstToken { .. } | Report::Tokens { .. } => {}
            }
        }
        // Counted first: LoadGen ends the test at the last answer.
        self.counts.add_answered(answered);
        self.counts.add_failed(failed);
        self.loadgen.complete(responses);
        responses.clear();
    }

    fn node_gone(&mut self, _: NodeId, _: &str) {
        self.counts.remove_peer();
    }
}
