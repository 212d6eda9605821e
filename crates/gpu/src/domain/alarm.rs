//! How a rank learns that its group is dead, and how it tells the others.
//!
//! Two can find out: a kernel, which leaves a record, and the control plane, which calls. Both end up
//! here, where every call looks before it begins. Looking costs two loads, neither of them from a device.

use crate::error::{Error, Result};
use crate::watch::{Code, Families, Family, Record, Watch};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};
use weft_fabric::poison::PoisonFlag;
use weft_fabric::{Cause, Communicator, Poison, Rank};

/// One rank's records, abort word and knowledge of its peers.
pub struct Alarm {
    watch: Watch,
    rank: u32,
    families: RwLock<Families>,
    /// Whether there is anything below.
    rung: AtomicBool,
    cause: OnceLock<Poison>,
    /// Bit `r`: rank `r` has said goodbye.
    left: AtomicU64,
    /// One more than the rank that did so first, or 0.
    first_left: AtomicU32,
    /// Whom a wait that expired missed because it had left; found out when that is first looked at.
    missed: OnceLock<Option<u32>>,
}

/// Whom a rank tells that the group is dead.
pub enum Group {
    /// A communicator's. Not held: the flag holds the control plane, which leaves with its last handle.
    Fabric(Weak<PoisonFlag>),
    /// Ranks of this process alone.
    Local(Arc<OnceLock<Vec<Weak<Alarm>>>>),
}

impl Alarm {
    /// Of a rank, with the watch that its kernels write to.
    pub fn new(rank: u32, watch: Watch) -> Arc<Alarm> {
        Arc::new(Alarm {
            watch,
            rank,
            families: RwLock::default(),
            rung: AtomicBool::new(false),
            cause: OnceLock::new(),
            left: AtomicU64::new(0),
            first_left: AtomicU32::new(0),
            missed: OnceLock::new(),
        })
    }

    /// Listens to the control plane for as long as the alarm lives. The callbacks run on the control
    /// thread and touch host memory only: no call of CUDA, which could wait for a kernel that spins.
    pub fn listen(self: &Arc<Alarm>, communicator: &Communicator) -> Group {
        let told = Arc::downgrade(self);
        communicator.control().on_poison(Box::new(move |poison| {
            if let Some(alarm) = told.upgrade() {
                alarm.ring(poison);
            }
        }));
        let told = Arc::downgrade(self);
        communicator.control().on_peer_left(Box::new(move |rank| {
            if let Some(alarm) = told.upgrade() {
                alarm.peer_left(rank);
            }
        }));
        Group::Fabric(Arc::downgrade(communicator.engine().poison_flag()))
    }

    /// What kernels write to.
    pub fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Registers a family: its names and texts for records with its numbers.
    ///
    /// # Errors
    /// [`Error::Families`].
    pub fn register(&self, family: &'static Family) -> Result<()> {
        self.families.write().unwrap_or_else(PoisonError::into_inner).add(family)
    }

    fn error(&self, record: Record) -> Error {
        record.error(&self.families.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The group is dead: every kernel's wait ends, now and later.
    fn ring(&self, poison: &Poison) {
        // The first cause stays.
        let _ = self.cause.set(poison.clone());
        self.watch.abort();
        self.rung.store(true, Ordering::Release);
    }

    /// A peer has left. All that it ever wrote is here, so kernels that wait may still find it.
    fn peer_left(&self, rank: Rank) {
        self.left.fetch_or(1u64.checked_shl(rank.0).unwrap_or(0), Ordering::Relaxed);
        // Those that leave later may do so because of the first.
        let _ = self.first_left.compare_exchange(
            0,
            rank.0.saturating_add(1),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        self.rung.store(true, Ordering::Release);
    }

    fn has_left(&self, rank: u32) -> bool {
        self.left.load(Ordering::Relaxed) & 1u64.checked_shl(rank).unwrap_or(0) != 0
    }

    /// Whether the group lives, as far as this rank knows. What a kernel of this rank recorded is told
    /// to `group`.
    #[inline]
    pub fn look(&self, group: &Group) -> Result<()> {
        if !self.rung.load(Ordering::Acquire) && self.watch.fatal().is_none() {
            return Ok(());
        }
        self.look_closely(group)
    }

    #[cold]
    fn look_closely(&self, group: &Group) -> Result<()> {
        let (record, cause) = (self.watch.fatal(), self.cause.get());
        let Some(error) = self.failure(record, cause) else { return Ok(()) };
        if cause.is_none() {
            let (kind, rank) = (Cause::User, Some(Rank(self.rank)));
            group.poison(Poison { kind, rank, detail: error.to_string() });
        }
        Err(error)
    }

    /// Of what the device and the control plane say, what tells the user most.
    fn failure(&self, record: Option<Record>, cause: Option<&Poison>) -> Option<Error> {
        let poisoned = |cause: &Poison| weft_fabric::Error::Poisoned(cause.clone()).into();
        match (record, cause) {
            // A lost peer is the reason for whatever a kernel missed.
            (_, Some(cause)) if matches!(cause.kind, Cause::Lost | Cause::Silent | Cause::Left) => {
                Some(poisoned(cause))
            }
            (Some(record), _) if record.code == Code::Timeout => Some(self.timeout(record)),
            (Some(record), _) if record.code != Code::Aborted => Some(self.error(record)),
            (_, Some(cause)) => Some(poisoned(cause)),
            (Some(record), None) => Some(self.error(record)),
            (None, None) => None,
        }
    }

    /// A wait on the device that expired: because the peer had left, if it had. One that leaves once
    /// the group is dead is not the reason.
    fn timeout(&self, record: Record) -> Error {
        let missed = || record.peer.filter(|&peer| self.has_left(peer));
        self.missed
            .get_or_init(missed)
            .map_or_else(|| self.error(record), |peer| left(peer, self.error(record).to_string()))
    }

    /// Whether a round may begin: a peer that has left would be waited for in vain.
    #[inline]
    pub fn all_are_there(&self) -> Result<()> {
        match self.first_left.load(Ordering::Relaxed) {
            0 => Ok(()),
            next => Err(left(next - 1, "a round cannot begin without it".into())),
        }
    }

    /// As [`Alarm::look`], and then what the device remarked since this was last asked.
    pub fn check(&self, group: &Group) -> Result<()> {
        self.look(group)?;
        self.watch.take_notice().map_or(Ok(()), |notice| Err(self.error(notice)))
    }
}

fn left(rank: u32, detail: String) -> Error {
    let (kind, rank) = (Cause::Left, Some(Rank(rank)));
    weft_fabric::Error::Poisoned(Poison { kind, rank, detail }).into()
}

impl Group {
    /// Ranks of this process, to be named once all are there.
    pub fn local() -> Arc<OnceLock<Vec<Weak<Alarm>>>> {
        Arc::default()
    }

    /// Tells all ranks that the group is dead; the first cause wins.
    fn poison(&self, poison: Poison) {
        match self {
            Group::Fabric(flag) => {
                if let Some(flag) = flag.upgrade() {
                    flag.poison(poison);
                }
            }
            Group::Local(alarms) => {
                let alarms = alarms.get().into_iter().flatten();
                alarms.filter_map(Weak::upgrade).for_each(|alarm| alarm.ring(&poison));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::{Phase, Report, Severity};

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

    fn pair() -> [(Arc<Alarm>, Group); 2] {
        let alarms = [0, 1].map(|rank| Alarm::new(rank, Watch::on_host()));
        for alarm in &alarms {
            alarm.register(&FAMILY).unwrap();
        }
        let group = Group::local();
        group.set(alarms.iter().map(Arc::downgrade).collect()).unwrap();
        alarms.map(|alarm| (alarm, Group::Local(group.clone())))
    }

    fn poison(kind: Cause, rank: u32) -> Poison {
        Poison { kind, rank: Some(Rank(rank)), detail: "gone".into() }
    }

    #[test]
    fn a_record_of_one_rank_ends_the_waits_of_all_and_is_told_to_them() {
        let [(one, group), (other, others)] = pair();
        one.look(&group).unwrap();
        one.watch.report(Severity::Fatal, &record(Code::Timeout, 1));
        for _ in 0..2 {
            let error = one.look(&group).unwrap_err().to_string();
            assert!(error.starts_with("rank 0 waited for rank 1 in receive"), "{error}");
            // It was told, and has nothing left to do.
            one.peer_left(Rank(1));
        }
        assert!(one.watch.is_aborted() && other.watch.is_aborted());
        let error = other.look(&others).unwrap_err().to_string();
        assert!(
            error.starts_with("rank 0 poisoned the group: rank 0 waited for rank 1 in receive"),
            "{error}"
        );
    }

    #[test]
    fn a_lost_peer_is_named_whatever_kernels_missed() {
        for code in [Code::Aborted, Code::Timeout] {
            let [(alarm, group), _] = pair();
            alarm.watch.report(Severity::Fatal, &record(code, 1));
            alarm.ring(&poison(Cause::Lost, 1));
            let error = alarm.look(&group).unwrap_err().to_string();
            assert_eq!(error, "rank 1 was lost: gone");
        }
    }

    #[test]
    fn what_this_rank_saw_says_more_than_that_another_gave_up_on_it() {
        let [(alarm, group), _] = pair();
        alarm.watch.report(Severity::Fatal, &record(Code::OutOfOrder, 1));
        alarm.ring(&poison(Cause::User, 1));
        assert!(matches!(alarm.look(&group).unwrap_err(), Error::OutOfOrder { .. }));
    }

    #[test]
    fn a_peer_that_left_is_missed_only_by_who_needs_it() {
        let [(alarm, group), _] = pair();
        alarm.all_are_there().unwrap();
        alarm.peer_left(Rank(1));
        alarm.peer_left(Rank(0));
        // Its last answers are here: a round that has begun may end.
        alarm.look(&group).unwrap();
        assert!(!alarm.watch.is_aborted());
        let error = alarm.all_are_there().unwrap_err().to_string();
        assert!(error.starts_with("rank 1 left before the others were done"), "{error}");
        alarm.watch.report(Severity::Fatal, &record(Code::Timeout, 1));
        let error = alarm.look(&group).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 left before the others were done"), "{error}");
    }

    #[test]
    fn a_notice_is_raised_once_and_ends_nothing() {
        let [(alarm, group), (other, others)] = pair();
        alarm.watch.report(Severity::Notice, &record(Code::Own(5), 1));
        alarm.look(&group).unwrap();
        let error = alarm.check(&group).unwrap_err().to_string();
        assert_eq!(error, "rank 1 lacks 8");
        alarm.check(&group).unwrap();
        other.check(&others).unwrap();
    }
}
