//! Network model: flow times between ranks, for the simulator.
//!
//! A flow moves a number of bytes from one rank to another. Models are event-driven, so that models whose
//! rates change with the active flows, for example max-min fair sharing, fit the same trait as
//! [`LatencyBandwidth`].

use crate::types::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weft_control::Rank;

/// Flow number, chosen by the [`NetworkModel::start`] caller and used once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId(pub u64);

/// Network timing. Times never decrease from one call to the next.
pub trait NetworkModel: Send {
    /// Starts a flow that carries `bytes` from `from` to `to` at `now`; zero bytes for a signal.
    fn start(&mut self, now: Time, flow: FlowId, from: Rank, to: Rank, bytes: u64);

    /// Time at which the next event occurs if no flow starts or is cancelled before; `None` without
    /// flows.
    fn next_event(&self) -> Option<Time>;

    /// Advances to `to`, at most [`NetworkModel::next_event`], and appends the flows that have arrived by
    /// then, in an order that the calls so far determine.
    fn advance(&mut self, to: Time, finished: &mut Vec<FlowId>);

    /// Cancels a flow.
    fn cancel(&mut self, flow: FlowId);
}

/// Uniform network: one latency for all pairs, one NIC with the same bandwidth for each rank.
#[derive(Clone, Debug)]
pub struct LatencyBandwidth {
    latency: Duration,
    bytes_per_second: u64,
    serialised: bool,
    /// Time until which each rank's NIC sends and receives started flows.
    sending: BTreeMap<Rank, Time>,
    receiving: BTreeMap<Rank, Time>,
    arrivals: BTreeSet<(Time, FlowId)>,
    times: BTreeMap<FlowId, Time>,
}

impl LatencyBandwidth {
    /// Model without contention: each flow takes `latency` plus the transfer time at full bandwidth. For
    /// example, 1 MB at 10 us and 1 GB/s takes 1.01 ms.
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

    /// The same with serialised NICs: each sends one flow at a time and receives one at a time, in start
    /// order.
    pub fn serialised(self) -> LatencyBandwidth {
        LatencyBandwidth { serialised: true, ..self }
    }
}

impl Default for LatencyBandwidth {
    /// 2 us and 50 GB/s.
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
