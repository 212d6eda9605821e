//! Statistics and trace records for Python.

use weft_fabric::{Engine, PeerStatistics, Trace};

/// Totals: peer, provider, payload bytes, parts, arrivals, errors.
pub type PyTotals = (u32, &'static str, u64, u64, u64, u64);
/// Trace records: see `Communicator.take_trace`.
pub type PyTrace =
    (Vec<(u64, u32, u32, u64, u64)>, Vec<(u64, u32, u32, u64)>, Vec<(String, u64, u64)>, u64);

/// Totals of all peers.
pub fn totals(engine: &Engine) -> Vec<PyTotals> {
    let row = |peer: PeerStatistics| {
        let totals = peer.totals;
        let provider = peer.provider.name();
        (peer.rank.0, provider, totals.bytes, totals.parts, totals.arrivals, totals.errors)
    };
    engine.statistics().peers.into_iter().map(row).collect()
}

/// Takes all records.
pub fn take(trace: &mut Trace) -> PyTrace {
    let writes = trace.writes.drain(..);
    let writes = writes.map(|w| (w.at.0, w.peer.0, w.lane, w.value, w.bytes)).collect();
    let arrivals = trace.arrivals.drain(..);
    let arrivals = arrivals.map(|a| (a.at.0, a.peer.0, a.lane, a.value)).collect();
    let phases = trace.phases.drain(..).map(|p| (p.name, p.begin.0, p.end.0)).collect();
    (writes, arrivals, phases, std::mem::take(&mut trace.dropped))
}
