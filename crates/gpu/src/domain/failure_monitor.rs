//! Failure monitor: detects that the group has failed, and reports it to the other ranks.
//!
//! Failures come from two sources: kernel records, and control plane callbacks. Each operation checks the monitor
//! before it starts, which costs two loads from host memory.

use crate::error::{Error, Result};
use crate::phase::is_proxy;
use crate::watch::{Code, Families, Family, Record, Watch};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};
use std::thread;
use std::time::Duration;
use weft_fabric::{Cause, Communicator, Poison, PoisonFlag, Rank};

/// One rank's records, abort word and peer states.
pub struct FailureMonitor {
    watch: Watch,
    rank: u32,
    families: RwLock<Families>,
    /// True if any field below is set.
    raised: AtomicBool,
    cause: OnceLock<Poison>,
    /// Bit `r`: rank `r` has left.
    departed: AtomicU64,
    /// First rank to leave, plus 1; 0: none.
    first_departed: AtomicU32,
    /// The peer, if an expired wait's peer had left before it; evaluated at the first check.
    departed_at_timeout: OnceLock<Option<u32>>,
    /// Operators that may wait for a rank that has left.
    waiting: RwLock<Vec<IsWaitingFor>>,
    /// Rank whose departure has ended all waits, plus 1; 0: none.
    ended_by: AtomicU32,
}

/// True if an operator has a call in progress that a rank which has left did not make.
pub type IsWaitingFor = Box<dyn Fn(Rank) -> bool + Send + Sync>;

/// Time that calls in progress have once a rank has left, as those on the CPU have.
const DEPARTURE_GRACE: Duration = Duration::from_secs(1);

/// Ranks that learn a rank's failures.
pub enum FailureGroup {
    /// Communicator ranks. Weak, since the flag holds the control plane, which leaves with the last handle.
    Fabric(Weak<PoisonFlag>),
    /// Only ranks in this process.
    Local(Arc<OnceLock<Vec<Weak<FailureMonitor>>>>),
}

impl FailureMonitor {
    /// A rank's monitor, with the watch that kernels write to.
    pub fn new(rank: u32, watch: Watch) -> Arc<FailureMonitor> {
        Arc::new(FailureMonitor {
            watch,
            rank,
            families: RwLock::default(),
            raised: AtomicBool::new(false),
            cause: OnceLock::new(),
            departed: AtomicU64::new(0),
            first_departed: AtomicU32::new(0),
            departed_at_timeout: OnceLock::new(),
            waiting: RwLock::default(),
            ended_by: AtomicU32::new(0),
        })
    }

    /// Subscribes to the control plane for as long as the monitor lives. The callbacks run on the control thread and
    /// touch host memory only: a CUDA call could wait for a kernel that spins.
    pub fn subscribe(self: &Arc<FailureMonitor>, communicator: &Communicator) -> FailureGroup {
        let weak = Arc::downgrade(self);
        communicator.control().on_poison(Box::new(move |poison| {
            if let Some(monitor) = weak.upgrade() {
                monitor.record_poison(poison);
            }
        }));
        let weak = Arc::downgrade(self);
        communicator.control().on_peer_left(Box::new(move |rank| {
            if let Some(monitor) = weak.upgrade() {
                monitor.record_departure(rank);
            }
        }));
        FailureGroup::Fabric(Arc::downgrade(communicator.engine().poison_flag()))
    }

    /// Ends all kernel waits also when another communicator fails. Its poison is not recorded, since it numbers ranks
    /// otherwise.
    pub fn end_waits_with(self: &Arc<FailureMonitor>, other: &Communicator) {
        let weak = Arc::downgrade(self);
        other.control().on_poison(Box::new(move |_| {
            if let Some(monitor) = weak.upgrade() {
                monitor.watch.abort();
            }
        }));
    }

    /// Watch that kernels write to.
    pub fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Registers an operator family, which explains errors in records.
    ///
    /// # Errors
    /// [`Error::Families`].
    pub fn register(&self, family: &'static Family) -> Result<()> {
        self.families.write().unwrap_or_else(PoisonError::into_inner).add(family)
    }

    /// Ends all kernel waits 1 s after a peer has left, if `is_waiting` then returns true for it. It runs on the
    /// monitor thread.
    pub fn end_hopeless_waits(&self, is_waiting: IsWaitingFor) {
        self.waiting.write().unwrap_or_else(PoisonError::into_inner).push(is_waiting);
    }

    fn error(&self, record: Record) -> Error {
        self.families.read().unwrap_or_else(PoisonError::into_inner).error(&record)
    }

    /// Records a group failure, and ends all present and future kernel waits.
    fn record_poison(&self, poison: &Poison) {
        // The first cause is kept.
        let _ = self.cause.set(poison.clone());
        self.watch.abort();
        self.raised.store(true, Ordering::Release);
    }

    /// Records that a peer has left. All its writes have arrived, so waiting kernels may still succeed.
    fn record_departure(self: &Arc<FailureMonitor>, rank: Rank) {
        self.departed.fetch_or(1u64.checked_shl(rank.0).unwrap_or(0), Ordering::Relaxed);
        // Later departures may be consequences.
        let _ = self.first_departed.compare_exchange(
            0,
            rank.0.saturating_add(1),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        self.raised.store(true, Ordering::Release);
        if self.waiting.read().unwrap_or_else(PoisonError::into_inner).is_empty() {
            return;
        }
        let weak = Arc::downgrade(self);
        let timer = move || {
            thread::sleep(DEPARTURE_GRACE);
            if let Some(monitor) = weak.upgrade() {
                monitor.end_waits(rank);
            }
        };
        let started = thread::Builder::new().name("weft-departure".into()).spawn(timer);
        if let Err(error) = started {
            log::warn!("waits for {rank}, which has left, end by the wait limit: {error}");
        }
    }

    /// Ends all present and future waits if one waits for a call that `rank`, which has left, did not make.
    fn end_waits(&self, rank: Rank) {
        let waiting = self.waiting.read().unwrap_or_else(PoisonError::into_inner);
        if waiting.iter().any(|is_waiting| is_waiting(rank)) {
            let named = rank.0.saturating_add(1);
            // The first one is kept.
            let _ = self.ended_by.compare_exchange(0, named, Ordering::Release, Ordering::Relaxed);
            self.watch.abort();
        }
    }

    fn has_departed(&self, rank: u32) -> bool {
        self.departed.load(Ordering::Relaxed) & 1u64.checked_shl(rank).unwrap_or(0) != 0
    }

    /// Checks for a fatal failure. The first record from this rank's kernels is reported to `group`.
    #[inline]
    pub fn check_fatal(&self, group: &FailureGroup) -> Result<()> {
        if !self.raised.load(Ordering::Acquire) && self.watch.fatal().is_none() {
            return Ok(());
        }
        self.report_fatal(group)
    }

    #[cold]
    fn report_fatal(&self, group: &FailureGroup) -> Result<()> {
        let (record, cause) = (self.watch.fatal(), self.cause.get());
        let Some(error) = self.failure(record, cause) else { return Ok(()) };
        if cause.is_none() {
            let (kind, rank) = (Cause::User, Some(Rank(self.rank)));
            group.poison(Poison { kind, rank, detail: error.to_string() });
        }
        Err(error)
    }

    /// The more specific failure: the device record or the control plane's cause.
    fn failure(&self, record: Option<Record>, cause: Option<&Poison>) -> Option<Error> {
        let poisoned = |cause: &Poison| weft_fabric::Error::Poisoned(cause.clone()).into();
        match (record, cause) {
            // A lost peer explains any expired wait.
            (_, Some(cause)) if matches!(cause.kind, Cause::Lost | Cause::Silent | Cause::Left) => {
                Some(poisoned(cause))
            }
            (Some(record), _) if record.code == Code::Timeout => Some(self.timeout(record)),
            (Some(record), _) if record.code != Code::Aborted => Some(self.error(record)),
            (Some(record), _) if self.ended_by.load(Ordering::Acquire) != 0 => {
                Some(self.ended(record))
            }
            (_, Some(cause)) => Some(poisoned(cause)),
            (Some(record), None) => Some(self.error(record)),
            (None, None) => None,
        }
    }

    /// Error for an expired wait; it says so if the peer had left. A departure after the failure is not the cause.
    fn timeout(&self, record: Record) -> Error {
        // Records of a proxy number ranks as its own group does.
        let departed_at_timeout = || {
            let own = !is_proxy(record.phase);
            record.peer.filter(|&peer| own && self.has_departed(peer))
        };
        self.departed_at_timeout.get_or_init(departed_at_timeout).map_or_else(
            || self.error(record),
            |peer| departed_error(peer, self.error(record).to_string()),
        )
    }

    /// Error for a wait that a departure has ended.
    fn ended(&self, record: Record) -> Error {
        let families = self.families.read().unwrap_or_else(PoisonError::into_inner);
        let phase = families.phase(record.phase);
        let peer = record.peer.map(|peer| format!(" for {}", Rank(peer))).unwrap_or_default();
        let waiting = Rank(record.rank);
        let detail = format!("{waiting} still waited{peer} in {phase}");
        departed_error(self.ended_by.load(Ordering::Acquire).saturating_sub(1), detail)
    }

    /// Checks that no peer has left, before a round starts.
    #[inline]
    pub fn check_peers_present(&self) -> Result<()> {
        match self.first_departed.load(Ordering::Relaxed) {
            0 => Ok(()),
            next => Err(departed_error(next - 1, "a round cannot start without it".into())),
        }
    }

    /// Checks for a fatal failure, then takes the pending notice.
    pub fn check(&self, group: &FailureGroup) -> Result<()> {
        self.check_fatal(group)?;
        self.watch.take_notice().map_or(Ok(()), |notice| Err(self.error(notice)))
    }
}

fn departed_error(rank: u32, detail: String) -> Error {
    let (kind, rank) = (Cause::Left, Some(Rank(rank)));
    weft_fabric::Error::Poisoned(Poison { kind, rank, detail }).into()
}

impl FailureGroup {
    /// Ranks in this process, to be set once all monitors exist.
    pub fn local() -> Arc<OnceLock<Vec<Weak<FailureMonitor>>>> {
        Arc::default()
    }

    /// Reports a failure to all ranks; the first cause is kept.
    fn poison(&self, poison: Poison) {
        match self {
            FailureGroup::Fabric(flag) => {
                if let Some(flag) = flag.upgrade() {
                    flag.poison(poison);
                }
            }
            FailureGroup::Local(monitors) => {
                let monitors = monitors.get().into_iter().flatten();
                monitors
                    .filter_map(Weak::upgrade)
                    .for_each(|monitor| monitor.record_poison(&poison));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phase::{Phase, Report};
    use crate::watch::Severity;

    fn explain(record: &Record, _: Phase) -> Report {
        let text = format!("rank 1 lacks {}", record.expected);
        Report { class: "CapacityError", rank: record.peer.map(Rank), text }
    }

    static FAMILY: Family = Family {
        name: "test",
        first_phase: 2,
        phases: &["send", "receive"],
        order: "send, receive",
        first_code: 5,
        codes: 1,
        explain,
    };

    fn record(code: Code, peer: u32) -> Record {
        let (rank, phase, peer, channel, slot) = (0, 3, Some(peer), 1, 2);
        Record { code, rank, phase, peer, channel, slot, expected: 8, seen: 7 }
    }

    fn pair() -> [(Arc<FailureMonitor>, FailureGroup); 2] {
        let monitors = [0, 1].map(|rank| FailureMonitor::new(rank, Watch::on_host()));
        for monitor in &monitors {
            monitor.register(&FAMILY).unwrap();
        }
        let group = FailureGroup::local();
        group.set(monitors.iter().map(Arc::downgrade).collect()).unwrap();
        monitors.map(|monitor| (monitor, FailureGroup::Local(group.clone())))
    }

    fn poison(kind: Cause, rank: u32) -> Poison {
        Poison { kind, rank: Some(Rank(rank)), detail: "gone".into() }
    }

    #[test]
    fn a_record_of_one_rank_ends_the_waits_of_all_and_is_reported_to_them() {
        let [(one, group), (other, others)] = pair();
        one.check_fatal(&group).unwrap();
        one.watch.report(Severity::Fatal, &record(Code::Timeout, 1));
        for _ in 0..2 {
            let error = one.check_fatal(&group).unwrap_err().to_string();
            assert!(error.starts_with("rank 0 waited for rank 1 in receive"), "{error}");
            // A departure after the failure changes no rank's error.
            one.record_departure(Rank(1));
        }
        assert!(one.watch.is_aborted() && other.watch.is_aborted());
        let error = other.check_fatal(&others).unwrap_err().to_string();
        assert!(
            error.starts_with("rank 0 poisoned the group: rank 0 waited for rank 1 in receive"),
            "{error}"
        );
    }

    #[test]
    fn a_lost_peer_takes_precedence_over_records() {
        for code in [Code::Aborted, Code::Timeout] {
            let [(monitor, group), _] = pair();
            monitor.watch.report(Severity::Fatal, &record(code, 1));
            monitor.record_poison(&poison(Cause::Lost, 1));
            let error = monitor.check_fatal(&group).unwrap_err().to_string();
            assert_eq!(error, "rank 1 was lost: gone");
        }
    }

    #[test]
    fn a_record_of_this_rank_takes_precedence_over_a_peers_poison() {
        let [(monitor, group), _] = pair();
        monitor.watch.report(Severity::Fatal, &record(Code::OutOfOrder, 1));
        monitor.record_poison(&poison(Cause::User, 1));
        assert!(matches!(monitor.check_fatal(&group).unwrap_err(), Error::OutOfOrder { .. }));
    }

    #[test]
    fn a_departure_fails_only_rounds_that_need_the_peer() {
        let [(monitor, group), _] = pair();
        monitor.check_peers_present().unwrap();
        monitor.record_departure(Rank(1));
        monitor.record_departure(Rank(0));
        // The last writes have arrived: a round in flight may complete.
        monitor.check_fatal(&group).unwrap();
        assert!(!monitor.watch.is_aborted());
        let error = monitor.check_peers_present().unwrap_err().to_string();
        assert!(error.starts_with("rank 1 left before the others were done"), "{error}");
        monitor.watch.report(Severity::Fatal, &record(Code::Timeout, 1));
        let error = monitor.check_fatal(&group).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 left before the others were done"), "{error}");
    }

    #[test]
    fn waits_that_outlast_a_departure_end_with_the_name_of_the_rank() {
        let [(monitor, group), (other, others)] = pair();
        // The first rank to leave made the call in progress, the second did not.
        monitor.end_hopeless_waits(Box::new(|rank| rank == Rank(1)));
        for (rank, ends) in [(0, false), (1, true)] {
            monitor.record_departure(Rank(rank));
            monitor.end_waits(Rank(rank));
            assert_eq!(monitor.watch.is_aborted(), ends);
        }
        // No kernel has recorded anything: the group is as before.
        monitor.check_fatal(&group).unwrap();
        other.check_fatal(&others).unwrap();
        monitor.watch.report(Severity::Fatal, &record(Code::Aborted, 1));
        let error = monitor.check_fatal(&group).unwrap_err().to_string();
        let expected =
            "rank 1 left before the others were done: rank 0 still waited for rank 1 in ";
        assert!(error.starts_with(expected), "{error}");
        // A peer that found the same reports it first.
        monitor.record_poison(&poison(Cause::User, 0));
        assert_eq!(monitor.check_fatal(&group).unwrap_err().to_string(), error);
    }

    #[test]
    fn operators_are_asked_a_grace_after_a_departure() {
        let [(monitor, _), (other, _)] = pair();
        monitor.end_hopeless_waits(Box::new(|_| true));
        for monitor in [&monitor, &other] {
            monitor.record_departure(Rank(1));
            assert!(!monitor.watch.is_aborted());
        }
        let end = std::time::Instant::now() + 30 * DEPARTURE_GRACE;
        while !monitor.watch.is_aborted() {
            assert!(std::time::Instant::now() < end, "no operator was asked");
            thread::yield_now();
        }
        assert!(!other.watch.is_aborted());
    }

    #[test]
    fn a_notice_is_raised_once_and_ends_nothing() {
        let [(monitor, group), (other, others)] = pair();
        monitor.watch.report(Severity::Notice, &record(Code::Family(5), 1));
        monitor.check_fatal(&group).unwrap();
        let error = monitor.check(&group).unwrap_err().to_string();
        assert_eq!(error, "rank 1 lacks 8");
        monitor.check(&group).unwrap();
        other.check(&others).unwrap();
    }
}
