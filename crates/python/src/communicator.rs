//! `Communicator`: the rank group that `weft.init()` returns.

use crate::awaits::{self, Await, Awaits};
use crate::choices::choose;
use crate::errors::Error;
use crate::fork;
use crate::memory::{lent, with_remedy};
use crate::numbers::{Device, Expected, Length, Peer, Round, Window};
use crate::peer_group::PeerGroup;
use crate::region::Region;
use crate::request::Request;
use crate::shared::{HandlerException, Shared, call_at_end, deadline, deliver, duration};
use crate::sharing;
use crate::slices::{PySlices, pages};
use crate::traces::{self, PyTotals, PyTrace};
use crate::word::{self, Word};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use weft_control::{Cause, Operation, Poison};
use weft_fabric::{
    Communicator as Fabric, CounterConfig, CounterId, Memory, Page, PeerWrite, Placement, Rank,
    Reader, Region as FabricRegion, RegionKey, RemoteRegion, Route, TrafficClass, WatchCondition,
};

/// A rank group whose members can write to each other.
#[pyclass(frozen, module = "weft._native")]
pub struct Communicator {
    pub shared: Shared,
    rank: u32,
    world_size: u32,
    generation: u32,
    hosts: Vec<String>,
}

impl Communicator {
    pub fn wrap(fabric: Fabric, raised: HandlerException) -> Communicator {
        Communicator {
            rank: fabric.rank().0,
            world_size: fabric.world_size(),
            generation: fabric.control().generation(),
            hosts: fabric.control().members().iter().map(|m| m.host_id.clone()).collect(),
            shared: Shared::new(fabric, raised),
        }
    }

    fn route_to(&self, py: Python<'_>, Peer(peer): Peer) -> PyResult<Route> {
        let unknown = weft_fabric::Error::Unknown { what: "rank", number: peer.into() };
        self.shared.with(py, |fabric| Ok(fabric.engine().route(Rank(peer)).ok_or(unknown)?))
    }
}

/// A route: provider, maximum bytes and pages in a part.
type PyRoute = (&'static str, Option<u64>, Option<u32>);
/// Lane raises since the last credit: counter, peer, number.
type PyRaised = (u32, u32, u64);

#[pymethods]
impl Communicator {
    /// This rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks in the group.
    #[getter]
    fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Number of re-formations.
    #[getter]
    fn generation(&self) -> u32 {
        self.generation
    }

    /// Each rank's host identity.
    #[getter]
    fn hosts(&self) -> Vec<String> {
        self.hosts.clone()
    }

    /// The provider on the route to each rank; `None` for this one.
    fn routes(&self, py: Python<'_>) -> PyResult<Vec<Option<&'static str>>> {
        self.shared.with(py, |fabric| {
            let ranks = (0..fabric.world_size()).map(Rank);
            let engine = fabric.engine();
            Ok(ranks.map(|r| engine.route(r).map(|route| route.provider.name())).collect())
        })
    }

    /// Details by provider, such as a library version; providers without any are left out.
    fn provider_details(
        &self,
        py: Python<'_>,
    ) -> PyResult<BTreeMap<&'static str, BTreeMap<&'static str, String>>> {
        self.shared.with(py, |fabric| {
            let details = fabric.provider_details().into_iter();
            Ok(details.map(|(kind, each)| (kind.name(), each.into_iter().collect())).collect())
        })
    }

    /// The route to a peer: provider, and maximum bytes and pages in a part; `None`: no limit.
    fn route(&self, py: Python<'_>, peer: Peer) -> PyResult<PyRoute> {
        let route = self.route_to(py, peer)?;
        let rule = route.parts;
        let bytes = (rule.max_part_bytes != u64::MAX).then_some(rule.max_part_bytes);
        let pages = (rule.max_pages_per_part != u32::MAX).then_some(rule.max_pages_per_part);
        Ok((route.provider.name(), bytes, pages))
    }

    /// Lane raises by a write with these page lengths, to or from a peer.
    fn parts(&self, py: Python<'_>, peer: Peer, lengths: Vec<Length>) -> PyResult<u64> {
        let lengths = lengths.into_iter().map(|length| length.0);
        Ok(self.route_to(py, peer)?.parts.count(lengths))
    }

    /// Each rank's clock offset from rank 0's in nanoseconds, and the error bound.
    fn clock_offsets(&self, py: Python<'_>) -> PyResult<Vec<(i64, u64)>> {
        self.shared.with(py, |fabric| {
            let ranks = (0..fabric.world_size()).map(Rank);
            let control = fabric.control();
            Ok(ranks.map(|r| (control.clock_offset(r), control.clock_error(r))).collect())
        })
    }

    /// Each rank's bytes, in rank order; `for_share`: as the first half in `share`.
    #[pyo3(signature = (payload, timeout, for_share=false))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        payload: &[u8],
        timeout: f64,
        for_share: bool,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let payload = payload.to_vec();
        let operation = if for_share { Operation::Share } else { Operation::AllGather };
        let gathered = self.shared.with(py, move |fabric| {
            Ok(fabric.control().all_gather_as(operation, &payload, duration(timeout))?)
        })?;
        Ok(gathered.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Key shared by this group's members; `None` for a pair.
    fn derive_key<'py>(
        &self,
        py: Python<'py>,
        purpose: &str,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let purpose = purpose.to_owned();
        let key = self.shared.with(py, move |fabric| {
            Ok(fabric.control().mesh().map(|control| control.derive_key(&purpose)))
        })?;
        Ok(key.map(|key| PyBytes::new(py, &key)))
    }

    /// Every rank has entered before any leaves.
    fn barrier(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.shared.wait(py, timeout, |fabric, waiter| Ok(fabric.barrier(waiter)?))
    }

    /// Memory that peers can be granted: on the host, placed as requested, or on a device.
    #[pyo3(signature = (length, device=None, numa_node=None, huge_pages=false))]
    fn alloc(
        &self,
        py: Python<'_>,
        length: Length,
        device: Option<Device>,
        numa_node: Option<u32>,
        huge_pages: bool,
    ) -> PyResult<Region> {
        let placement = Placement { numa_node, huge_pages };
        let length = usize::try_from(length.0).unwrap_or(usize::MAX);
        let region = self.shared.with(py, |fabric| {
            let mut engine = fabric.engine();
            Ok(match device {
                None => engine.register(Memory::shared_with(length, placement)?)?,
                Some(Device(device)) => engine.alloc_device(device, length)?,
            })
        })?;
        Ok(Region::new(&region, true, &self.shared))
    }

    /// The user's memory, on the host or on the CUDA device with this ordinal, for a reader of what peers
    /// write into it.
    #[pyo3(signature = (address, length, owner, writable, device=None, reader="all"))]
    #[allow(clippy::too_many_arguments)]
    fn register(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        owner: Py<PyAny>,
        writable: bool,
        device: Option<u32>,
        reader: &str,
    ) -> PyResult<Region> {
        let known = [("all", Reader::All), ("owner", Reader::Owner)];
        let reader = choose(py, "reader", reader, &known)?;
        let memory = lent(address, length, owner, device)?.read_by(reader);
        let region = self.shared.with(py, |fabric| {
            Ok(fabric.register_user_buffer(memory).map_err(|error| with_remedy(error, device))?)
        })?;
        Ok(Region::new(&region, writable, &self.shared))
    }

    /// A counter with this window, toward these peers (`None`: all).
    #[pyo3(signature = (window=Window(1), peers=None, bulk=false))]
    fn counter(
        &self,
        py: Python<'_>,
        window: Window,
        peers: Option<Vec<Peer>>,
        bulk: bool,
    ) -> PyResult<u32> {
        self.shared.with(py, |fabric| {
            let peers: Option<Vec<Rank>> =
                peers.map(|list| list.iter().map(|peer| Rank(peer.0)).collect());
            let class = if bulk { TrafficClass::Bulk } else { TrafficClass::Latency };
            let config = CounterConfig { window: window.0, peers: peers.as_deref(), class };
            Ok(fabric.engine().counter_with(config)?.number())
        })
    }

    /// Waits until all writes toward a counter have arrived, and releases it.
    fn release_counter(&self, py: Python<'_>, counter: u32, timeout: f64) -> PyResult<()> {
        self.shared.wait(py, timeout, move |fabric, waiter| {
            Ok(fabric.release_counter(CounterId::from_number(counter), waiter)?)
        })
    }

    /// True if a counter was shared with any peer.
    fn is_shared(&self, py: Python<'_>, counter: u32) -> PyResult<bool> {
        self.shared.with(py, move |fabric| {
            Ok(fabric.engine().is_shared(CounterId::from_number(counter))?)
        })
    }

    /// The first round toward a peer without a write.
    fn next_round(&self, py: Python<'_>, counter: u32, peer: Peer) -> PyResult<u64> {
        self.shared.with(py, move |fabric| {
            Ok(fabric.engine().next_round(CounterId::from_number(counter), Rank(peer.0))?)
        })
    }

    /// A peer's oldest round without a credit.
    fn open_round(&self, py: Python<'_>, counter: u32, peer: Peer) -> PyResult<u64> {
        self.shared.with(py, move |fabric| {
            Ok(fabric.engine().open_round(CounterId::from_number(counter), Rank(peer.0))?)
        })
    }

    /// Grants all of `regions` to every peer and links `counters`. By rank: (key, length) for the
    /// regions that it granted.
    fn share(
        &self,
        py: Python<'_>,
        regions: Vec<Py<Region>>,
        counters: Vec<u32>,
        timeout: f64,
    ) -> PyResult<Vec<Vec<(u32, u64)>>> {
        self.shared.with(py, move |fabric| {
            let regions = regions.iter().map(|region| region.get().get());
            let regions: Vec<FabricRegion> = regions.collect::<Result<_, Error>>()?;
            sharing::share(fabric, &regions, counters, deadline(timeout))
        })
    }

    /// A region's grant for one peer, encoded.
    fn grant_region<'py>(
        &self,
        py: Python<'py>,
        region: Py<Region>,
        peer: Peer,
        timeout: f64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let grant = self.shared.with(py, move |fabric| {
            sharing::grant(fabric, &region.get().get()?, Rank(peer.0), deadline(timeout))
        })?;
        Ok(PyBytes::new(py, &grant))
    }

    /// Key and length of the region that a peer's grant has.
    fn import_region(
        &self,
        py: Python<'_>,
        peer: Peer,
        grant: &[u8],
        timeout: f64,
    ) -> PyResult<(u32, u64)> {
        let grant = grant.to_vec();
        self.shared.with(py, move |fabric| {
            sharing::import(fabric, Rank(peer.0), &grant, deadline(timeout))
        })
    }

    /// Writes pages to peers and raises the counters, as one request, in a round or in the next one
    /// toward each; `done` is called when it ends.
    #[pyo3(signature = (writes, counter, round, done))]
    fn scatter(
        &self,
        py: Python<'_>,
        writes: Vec<(Peer, Vec<PySlices>)>,
        counter: u32,
        round: Option<Round>,
        done: Option<Py<PyAny>>,
    ) -> PyResult<Request> {
        let id = self.shared.with(py, move |fabric| {
            let writes = writes.into_iter().map(|(peer, list)| Ok((Rank(peer.0), pages(list)?)));
            let writes: Vec<(Rank, Vec<Page>)> = writes.collect::<Result<_, Error>>()?;
            let writes: Vec<PeerWrite<'_>> =
                writes.iter().map(|(peer, pages)| PeerWrite { peer: *peer, pages }).collect();
            let mut engine = fabric.engine();
            let counter = CounterId::from_number(counter);
            deliver(&self.shared, done, |done| match round {
                Some(Round(round)) => engine.scatter(&writes, counter, round, done),
                None => engine.scatter_next(&writes, counter, done),
            })
        })?;
        Ok(Request { id, shared: self.shared.clone() })
    }

    /// Resolves a counter, a source and peers' regions (peer, key, length) for scatters to them.
    fn peer_group(
        &self,
        py: Python<'_>,
        counter: u32,
        source: Py<Region>,
        destinations: Vec<(u32, u32, u64)>,
    ) -> PyResult<PeerGroup> {
        let group = self.shared.with(py, move |fabric| {
            let source = source.get().get()?;
            let remote = |(peer, key, length)| RemoteRegion {
                peer: Rank(peer),
                key: RegionKey(key),
                length,
            };
            let destinations: Vec<RemoteRegion> = destinations.into_iter().map(remote).collect();
            let counter = CounterId::from_number(counter);
            Ok(fabric.engine().peer_group(counter, &source, &destinations)?)
        })?;
        Ok(PeerGroup::new(group, &self.shared))
    }

    /// Waits until peers have raised a counter by as much as is expected from each, in an open round or in
    /// the oldest for each.
    #[pyo3(signature = (counter, round, expected, timeout))]
    fn wait(
        &self,
        py: Python<'_>,
        counter: u32,
        round: Option<Round>,
        expected: Vec<(Peer, Expected)>,
        timeout: f64,
    ) -> PyResult<()> {
        self.shared.wait(py, timeout, move |fabric, waiter| {
            let expected = expected.into_iter().map(|(peer, raises)| (Rank(peer.0), raises.0));
            let expected: Vec<_> = expected.collect();
            let counter = CounterId::from_number(counter);
            match round {
                Some(Round(round)) => fabric.wait_in(counter, round, &expected, waiter)?,
                None => fabric.wait(counter, &expected, waiter)?,
            }
            Ok(())
        })
    }

    /// Waits until a peer has given the credit that a round, or the next one, needs.
    #[pyo3(signature = (peer, counter, round, timeout))]
    fn wait_for_credit(
        &self,
        py: Python<'_>,
        peer: Peer,
        counter: u32,
        round: Option<Round>,
        timeout: f64,
    ) -> PyResult<()> {
        self.shared.wait(py, timeout, move |fabric, waiter| {
            let (counter, peer) = (CounterId::from_number(counter), Rank(peer.0));
            let round = match round {
                Some(Round(round)) => round,
                None => fabric.engine().next_round(counter, peer)?,
            };
            Ok(fabric.wait_for_credit(counter, peer, round, waiter)?)
        })
    }

    /// Calls `callback` once peers have raised a counter as [`Communicator::wait`] expects.
    #[pyo3(signature = (counter, round, expected, callback))]
    fn watch(
        &self,
        py: Python<'_>,
        counter: u32,
        round: Option<Round>,
        expected: Vec<(Peer, Expected)>,
        callback: Py<PyAny>,
    ) -> PyResult<()> {
        call_at_end(&self.shared, py, callback, raises(counter, round, expected))
    }

    /// Sets a word to `value` once peers have raised a counter as [`Communicator::wait`] expects, or to `failure` if they
    /// never will.
    #[pyo3(signature = (counter, round, expected, word, value, failure))]
    #[allow(clippy::too_many_arguments)]
    fn watch_word(
        &self,
        py: Python<'_>,
        counter: u32,
        round: Option<Round>,
        expected: Vec<(Peer, Expected)>,
        word: PyRef<'_, Word>,
        value: u32,
        failure: Option<u32>,
    ) -> PyResult<()> {
        let condition = raises(counter, round, expected);
        word::set_at_end(&self.shared, py, condition, &word, value, failure)
    }

    /// Starts an await with this number for the same as [`Communicator::wait`]; `None` if it holds.
    #[pyo3(signature = (counter, round, expected, awaits, number))]
    fn start_await(
        &self,
        py: Python<'_>,
        counter: u32,
        round: Option<Round>,
        expected: Vec<(Peer, Expected)>,
        awaits: PyRef<'_, Awaits>,
        number: u64,
    ) -> PyResult<Option<Await>> {
        awaits::start(&self.shared, py, &awaits, number, raises(counter, round, expected))
    }

    /// Starts an await with this number for the same as [`Communicator::wait_for_credit`]; `None` if it holds.
    #[pyo3(signature = (peer, counter, round, awaits, number))]
    fn start_await_for_credit(
        &self,
        py: Python<'_>,
        peer: Peer,
        counter: u32,
        round: Option<Round>,
        awaits: PyRef<'_, Awaits>,
        number: u64,
    ) -> PyResult<Option<Await>> {
        let (counter, peer) = (CounterId::from_number(counter), Rank(peer.0));
        let round = round.map(|Round(round)| round);
        let condition = WatchCondition::Credited { counter, peer, round };
        awaits::start(&self.shared, py, &awaits, number, condition)
    }

    /// Raises by a peer in an open round; in the oldest if none is named.
    #[pyo3(signature = (counter, peer, round=None))]
    fn count(
        &self,
        py: Python<'_>,
        counter: u32,
        peer: Peer,
        round: Option<Round>,
    ) -> PyResult<u64> {
        self.shared.with(py, move |fabric| {
            let mut engine = fabric.engine();
            engine.progress();
            let (counter, peer) = (CounterId::from_number(counter), Rank(peer.0));
            Ok(match round {
                Some(Round(round)) => engine.count_in(counter, peer, round)?,
                None => engine.count(counter, peer)?,
            })
        })
    }

    /// Lanes that rose since the last call: counter, peer, raises since the last credit.
    fn raised(&self, py: Python<'_>) -> PyResult<Vec<PyRaised>> {
        self.shared.with(py, |fabric| {
            let raised = fabric.engine().raised();
            Ok(raised.into_iter().map(|r| (r.counter.number(), r.peer.0, r.count)).collect())
        })
    }

    /// Descriptor that becomes readable, once armed, when there is work.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.shared.with(py, |fabric| Ok(fabric.engine().descriptor().as_raw_fd()))
    }

    /// Arms the descriptor; true if there is no work, so that the caller may sleep on it.
    fn arm(&self, py: Python<'_>) -> PyResult<bool> {
        // A callback that is due runs with the next call.
        self.shared.with(py, |fabric| Ok(self.shared.callbacks.is_empty() && fabric.engine().arm()))
    }

    /// Disarms the descriptor.
    fn disarm(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.with(py, |fabric| {
            fabric.engine().disarm();
            Ok(())
        })
    }

    /// Credits that a peer has given on a counter.
    fn credits(&self, py: Python<'_>, counter: u32, peer: Peer) -> PyResult<u64> {
        self.shared.with(py, move |fabric| {
            let mut engine = fabric.engine();
            engine.progress();
            Ok(engine.credits(CounterId::from_number(counter), Rank(peer.0))?)
        })
    }

    /// Gives a peer credit for the round.
    fn credit(&self, py: Python<'_>, peer: Peer, counter: u32) -> PyResult<Request> {
        let id = self.shared.with(py, move |fabric| {
            Ok(fabric.engine().credit_now(Rank(peer.0), CounterId::from_number(counter))?)
        })?;
        Ok(Request { id, shared: self.shared.clone() })
    }

    /// By peer: rank, provider, payload bytes, parts, arrivals, errors.
    fn statistics(&self, py: Python<'_>) -> PyResult<Vec<PyTotals>> {
        self.shared.with(py, |fabric| Ok(traces::totals(&fabric.engine())))
    }

    /// Takes the trace records: writes (ns, peer, lane, value, bytes), arrivals (ns, peer, lane, value), phases
    /// (name, begin ns, end ns), and the number dropped for lack of room.
    fn take_trace(&self, py: Python<'_>) -> PyResult<PyTrace> {
        self.shared
            .with(py, |fabric| Ok(fabric.engine().trace().map(traces::take).unwrap_or_default()))
    }

    /// Raises the error that ended the group, if there is one.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.with(py, |fabric| Ok(fabric.engine().check()?))
    }

    /// Poisons the group at every rank.
    fn poison(&self, py: Python<'_>, detail: String) -> PyResult<()> {
        self.shared.with(py, |fabric| {
            let rank = Some(fabric.rank());
            fabric.poison(Poison { kind: Cause::User, rank, detail });
            Ok(())
        })
    }

    /// A new communicator with the survivors.
    fn reform(&self, py: Python<'_>, timeout: f64) -> PyResult<Communicator> {
        self.shared
            .with(py, |fabric| Ok(fabric.reform(duration(timeout))?))
            .map(|fabric| Communicator::wrap(fabric, self.shared.raised.clone()))
    }

    /// Ends all threads' waits; objects made on it can still be released.
    fn end_waits(&self, py: Python<'_>) {
        py.detach(|| self.shared.end_waits());
    }

    /// Leaves the group and frees its resources; waits on other threads end with an error. No effect in a forked
    /// child.
    fn close(&self, py: Python<'_>) {
        // A parent thread may hold any lock here, and no thread in this process releases it.
        if fork::is_child() {
            return;
        }
        py.detach(|| self.shared.close());
        // Callbacks for requests that the close ended.
        self.shared.callbacks.run(py);
    }
}

/// Condition for a wait on a counter.
fn raises(counter: u32, round: Option<Round>, expected: Vec<(Peer, Expected)>) -> WatchCondition {
    WatchCondition::Raised {
        counter: CounterId::from_number(counter),
        round: round.map(|Round(round)| round),
        expected: expected.into_iter().map(|(peer, raises)| (Rank(peer.0), raises.0)).collect(),
    }
}
