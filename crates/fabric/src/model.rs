//! How long bytes take: what the simulator asks of a model of the network.
//!
//! A model knows flows, each a number of bytes on their way from one rank to another. It is driven by
//! events, so that one whose rates change as flows come and go (max-min fair sharing, say) fits the same
//! trait as [`LatencyBandwidth`].

use crate::types::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weft_control::Rank;

/// A flow's number, chosen by whoever starts it and never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId(pub u64);

/// The timing of a network. Times never go back from one call to the next.
pub trait NetworkModel: Send {
    /// `bytes` leave `from` for `to` at `now`. There may be none: a signal.
    fn start(&mut self, now: Time, flow: FlowId, from: Rank, to: Rank, bytes: u64);

    /// When something happens next if no flow is started or cancelled before; `None` if no flow is left.
    fn next_event(&self) -> Option<Time>;

    /// Moves on to `to`, at most [`NetworkModel::next_event`], and appends the flows that have arrived
    /// by then, in an order that depends on nothing but the calls made so far.
    fn advance(&mut self, to: Time, finished: &mut Vec<FlowId>);

    /// Forgets a flow that will not arrive.
    fn cancel(&mut self, flow: FlowId);
}

/// Every pair of ranks has the same latency, every rank one NIC of the same speed.
#[derive(Clone, Debug)]
pub struct LatencyBandwidth {
    latency: Duration,
    bytes_per_second: u64,
    serialised: bool,
    /// Until when each rank's NIC sends and receives what has been started.
    sending: BTreeMap<Rank, Time>,
    receiving: BTreeMap<Rank, Time>,
    arrivals: BTreeSet<(Time, FlowId)>,
    times: BTreeMap<FlowId, Time>,
}

impl LatencyBandwidth {
    /// Flows do not disturb each other: each takes `latency` and its bytes at full speed.
    pub fn new(latency: Duration, bytes_per_second: u64) -> LatencyBandwidth {
        LatencyBandwidth {
            latency,
            bytes_per_second: bytes_per_second.max(1),
            serialised: false,
            sending: BTreeMap::new(),
            receiving: BTreeMap::new(),
            arrivals: BTreeSet::new(),
            times: BTreeMap::new(),
        }
    }

    /// A NIC sends one flow at a time and receives one at a time, in the order in which they started.
    pub fn serialised(self) -> LatencyBandwidth {
        LatencyBandwidth { serialised: true, ..self }
    }
}

impl Default for LatencyBandwidth {
    /// 2 microseconds and 50 gigabytes a second.
    fn default() -> Self {
        LatencyBandwidth::new(Duration::from_micros(2), 50_000_000_000)
    }
}

impl NetworkModel for LatencyBandwidth {
    fn start(&mut self, now: Time, flow: FlowId, from: Rank, to: Rank, bytes: u64) {
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        let wire = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        let mut begin = now;
        if self.serialised {
            for free in [self.sending.get(&from), self.receiving.get(&to)].into_iter().flatten() {
                begin = begin.max(*free);
            }
        }
        let sent = begin.after(wire);
        if self.serialised {
            self.sending.insert(from, sent);
            self.receiving.insert(to, sent);
        }
        let arrival = sent.after(self.latency);
        self.arrivals.insert((arrival, flow));
        self.times.insert(flow, arrival);
    }

    fn next_event(&self) -> Option<Time> {
        self.arrivals.first().map(|(time, _)| *time)
    }

    fn advance(&mut self, to: Time, finished: &mut Vec<FlowId>) {
        while let Some(&(time, flow)) = self.arrivals.first()
            && time <= to
        {
            self.arrivals.pop_first();
            self.times.remove(&flow);
            finished.push(flow);
        }
    }

    fn cancel(&mut self, flow: FlowId) {
        if let Some(time) = self.times.remove(&flow) {
            self.arrivals.remove(&(time, flow));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(mut model: LatencyBandwidth) -> Vec<(u64, u64)> {
        let send = |model: &mut LatencyBandwidth, flow, from, to, bytes| {
            model.start(Time(0), FlowId(flow), Rank(from), Rank(to), bytes);
        };
        send(&mut model, 1, 0, 1, 1000);
        send(&mut model, 2, 0, 2, 1000);
        send(&mut model, 3, 3, 1, 500);
        send(&mut model, 4, 3, 4, 9);
        model.cancel(FlowId(4));
        let mut seen = Vec::new();
        while let Some(at) = model.next_event() {
            let mut finished = Vec::new();
            model.advance(at, &mut finished);
            seen.extend(finished.into_iter().map(|flow| (at.0, flow.0)));
        }
        seen
    }

    #[test]
    fn flows_take_latency_and_their_bytes() {
        let model = LatencyBandwidth::new(Duration::from_nanos(50), 1_000_000_000);
        assert_eq!(arrivals(model), [(550, 3), (1050, 1), (1050, 2)]);
    }

    #[test]
    fn a_serialised_nic_sends_and_receives_one_flow_at_a_time() {
        let model = LatencyBandwidth::new(Duration::from_nanos(50), 1_000_000_000).serialised();
        assert_eq!(arrivals(model), [(1050, 1), (1550, 3), (2050, 2)]);
    }
}
