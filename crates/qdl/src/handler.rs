//! Handler for a front end's reports: gives answers to LoadGen, one call per service turn.

use crate::counts::{self, Counts};
use crate::kept::KeptAnswers;
use crate::lent::Lent;
use std::collections::HashSet;
use std::sync::Arc;
use weft_dispatch::wire::Layout;
use weft_dispatch::{Answer, Departure, Handler, Report, Reports, Schema};
use weft_loadgen::{LoadGen, Response};

/// Passes answers to LoadGen where the node wrote them. Answers with several tensors are concatenated.
pub(crate) struct ToLoadGen {
    pub loadgen: LoadGen,
    pub counts: Arc<Counts>,
    pub kept: Option<Arc<KeptAnswers>>,
    pub lent: Arc<Lent>,
    /// True if answers have several tensors.
    is_joined: bool,
    /// Token output, and bytes per token.
    stream: Option<(usize, u64)>,
    /// Queries whose first token LoadGen has.
    begun: HashSet<u64>,
    responses: Vec<Response>,
    joined: Vec<u8>,
}

impl ToLoadGen {
    pub fn new(
        loadgen: LoadGen,
        counts: Arc<Counts>,
        kept: Option<Arc<KeptAnswers>>,
        lent: Arc<Lent>,
        schema: &Schema,
    ) -> ToLoadGen {
        let (responses, joined) = Default::default();
        let (stream, is_joined) = (stream_of(schema), schema.outputs.len() > 1);
        let begun = HashSet::new();
        ToLoadGen { loadgen, counts, kept, lent, is_joined, stream, begun, responses, joined }
    }

    /// Takes an answer's first tokens, unless the query was sent before and LoadGen has them.
    fn begin(&mut self, token: u64, tokens: &[u8]) {
        if self.begun.insert(token) {
            self.loadgen.first_token(&[Response::new(token as usize, tokens)]);
        }
    }

    /// Runs before a query ends: LoadGen accepts the end of a token answer only after the first token.
    fn end(&mut self, token: u64) {
        if self.stream.is_some() {
            self.begin(token, &[]);
            self.begun.remove(&token);
        }
    }

    fn answer(&mut self, token: u64, answer: Answer<'_>) {
        self.end(token);
        let tokens = self.stream.map_or(0, |(output, bytes)| {
            let tensor = answer.tensors().nth(output).unwrap_or_default();
            tensor.len() as u64 / bytes
        });
        let bytes = if self.is_joined {
            let begin = self.joined.len();
            answer.tensors().for_each(|tensor| self.joined.extend_from_slice(tensor));
            &self.joined[begin..]
        } else {
            answer.tensors().next().unwrap_or_default()
        };
        if let Some(kept) = &self.kept {
            kept.keep(token, bytes);
        }
        let response = Response::new(token as usize, bytes).with_tokens(tokens as u32);
        self.responses.push(response);
    }
}

/// A schema's token output, and bytes per token.
pub(crate) fn stream_of(schema: &Schema) -> Option<(usize, u64)> {
    let layout = Layout::new(&schema.outputs);
    layout.stream().map(|output| (output, layout.token_bytes().max(1)))
}

/// Answer length in bytes.
fn length(report: &Report<'_>) -> usize {
    match report {
        Report::Answered { answer, .. } => answer.tensors().map(<[u8]>::len).sum(),
        _ => 0,
    }
}

impl Handler for ToLoadGen {
    fn reports(&mut self, reports: &Reports<'_>) {
        if self.is_joined {
            // Responses have addresses, so this memory stays where it is during the call.
            self.joined.clear();
            self.joined.reserve(reports.iter().map(|report| length(&report)).sum());
        }
        let (mut answered, mut failed) = (0, 0);
        for report in reports.iter() {
            match report {
                Report::FirstToken { token, tokens, .. } => self.begin(token, tokens.bytes),
                // They are in the answer, too.
                Report::Tokens { .. } => {}
                Report::Answered { token, answer, .. } => {
                    answered += 1;
                    self.answer(token, answer);
                }
                // LoadGen waits for each sample without a limit.
                Report::Failed { token, quarantined, .. } => {
                    failed += 1;
                    self.end(token);
                    if quarantined {
                        self.lent.add();
                    }
                    self.responses.push(Response::new(token as usize, &[]));
                }
                Report::Returned { .. } => self.lent.remove(),
            }
        }
        // Counted first: LoadGen ends the test at the last answer.
        self.counts.add_answered(answered);
        self.counts.add_failed(failed);
        self.loadgen.complete(&self.responses);
        self.responses.clear();
    }

    fn node_gone(&mut self, departure: &Departure<'_>) {
        self.counts.remove_peer();
        self.counts.add_departure(counts::Departure {
            name: departure.name.into(),
            cause: departure.cause.into(),
            lost: departure.is_lost,
        });
    }
}
