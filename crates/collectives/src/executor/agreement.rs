//! Agreement of all ranks on configuration, routes, and rank 0's measurements.

use super::config::{CollectivesConfig, GroupRoutes};
use super::driver::Executor;
use crate::run_error::RunError;
use crate::tuning::{Tuning, TuningFile, TuningKey, TuningSource};
use weft_fabric::{Communicator, Progress, ProviderKind, Rank, Route, Time};

/// Longest text of an error that is sent, or taken of a peer, in characters.
const MAX_DETAIL: usize = 2000;

/// State of rank 0's measurements in its record.
const NONE: u64 = 0;
const ENTRY: u64 = 1;
const FAILED: u64 = 2;

/// Values that are equal on all ranks.
pub(super) struct Agreement {
    pub routes: GroupRoutes,
    pub tuning: Option<Tuning>,
}

/// Compares the configurations of all ranks, collects the properties of their routes, and takes over the measurements
/// of rank 0.
pub(super) fn agree(
    communicator: &Communicator,
    config: &CollectivesConfig,
    tuning: Option<TuningSource<'_>>,
    deadline: Time,
) -> Result<Agreement, RunError> {
    let (mine, provider) = routes_of(communicator);
    let fields = [
        ("channels", u64::from(config.channels)),
        ("bytes of a channel", config.channel_bytes),
        ("bytes of inputs read in place", config.in_place_bytes),
        ("request for reproducible sums (1: yes)", config.reproducible.into()),
    ];
    let source = tuning.filter(|_| communicator.rank() == Rank(0));
    let entry = source.map(|source| entry_of(&source, provider, communicator.world_size()));
    let (state, text) = match &entry {
        None | Some(Ok(None)) => (NONE, String::new()),
        Some(Ok(Some(text))) => (ENTRY, text.clone()),
        Some(Err(error)) => (FAILED, error.to_string()),
    };
    let values = fields.iter().map(|(_, value)| *value);
    let of_routes = [mine.ordered, mine.one_host, mine.mapped, mine.reads].map(u64::from);
    let values = values.chain(of_routes).chain([state]);
    let mut record: Vec<u8> = values.flat_map(u64::to_le_bytes).collect();
    record.extend(text.as_bytes());
    let copies = vec![record; communicator.world_size() as usize];
    let records = communicator.exchange(&copies, deadline)?;
    if let Some(Err(error)) = entry {
        return Err(error);
    }
    let mut routes = mine;
    let mut tuning = None;
    for (peer, theirs) in (0..).map(Rank).zip(&records) {
        let (values, _) = theirs.as_chunks::<8>();
        let value = |index: usize| values.get(index).map_or(0, |bytes| u64::from_le_bytes(*bytes));
        for (index, (what, ours)) in fields.iter().enumerate() {
            let theirs = value(index);
            if theirs != *ours {
                return Err(RunError::Disagreement { peer, what, ours: *ours, theirs });
            }
        }
        routes.ordered &= value(fields.len()) != 0;
        routes.one_host &= value(fields.len() + 1) != 0;
        routes.mapped &= value(fields.len() + 2) != 0;
        routes.reads &= value(fields.len() + 3) != 0;
        if peer == Rank(0) {
            let text = theirs.get(8 * (fields.len() + 5)..).unwrap_or_default();
            let text = String::from_utf8_lossy(text);
            match value(fields.len() + 4) {
                ENTRY => {
                    let file = TuningFile::from_json(&format!("entry of {peer}"), &text)?;
                    tuning = file.first();
                }
                FAILED => {
                    return Err(RunError::PeerFailed {
                        peer,
                        detail: text.chars().take(MAX_DETAIL).collect(),
                    });
                }
                _ => {}
            }
        }
    }
    Ok(Agreement { routes, tuning })
}

/// Properties of this rank's routes, and the names of their providers.
fn routes_of(communicator: &Communicator) -> (GroupRoutes, String) {
    let engine = communicator.engine();
    let routes: Vec<_> = engine.peers().map(|peer| engine.route(peer)).collect();
    let all = |has: fn(Route) -> bool| routes.iter().all(|route| route.is_some_and(has));
    let one_host = all(|route| route.provider == ProviderKind::Shm);
    let mut providers: Vec<_> =
        routes.iter().flatten().map(|route| route.provider.name()).collect();
    providers.sort_unstable();
    providers.dedup();
    // An event loop does not sleep on mailboxes.
    let mapped = communicator.progress() != Progress::Epoll && all(|route| route.mapped);
    let ordered = all(|route| route.ordered);
    let reads = engine.peers().all(|peer| engine.memory_reader(peer).is_some());
    (GroupRoutes { ordered, one_host, mapped, reads }, providers.join("+"))
}

/// JSON of the entry for this group.
fn entry_of(
    source: &TuningSource<'_>,
    provider: String,
    ranks: u32,
) -> Result<Option<String>, RunError> {
    let file = TuningFile::from_json(source.name, source.text)?;
    let key = TuningKey { provider, ranks, machine: source.machine.to_owned() };
    let entry = file.entry(&key);
    if entry.is_none() {
        let TuningKey { provider, ranks, machine } = &key;
        log::debug!(
            target: "tuner",
            "{}: no measurements over {provider} with {ranks} ranks on {machine:?}",
            source.name
        );
    }
    Ok(entry)
}

/// Returns the executor if every rank has allocated its own. Otherwise releases it: no peer has a grant of it yet.
pub(super) fn made_by_all(
    communicator: &Communicator,
    made: Result<Executor, RunError>,
    deadline: Time,
) -> Result<Executor, RunError> {
    let text = |error: &RunError| error.to_string().chars().take(MAX_DETAIL).collect::<String>();
    let failure = made.as_ref().err().map(text).unwrap_or_default().into_bytes();
    let copies = vec![failure; communicator.world_size() as usize];
    let failures = communicator.exchange(&copies, deadline);
    let executor = made?;
    let failed = failures.map_err(RunError::from).and_then(|failures| {
        let failed = (0..).map(Rank).zip(failures).find(|(_, failure)| !failure.is_empty());
        failed.map_or(Ok(()), |(peer, failure)| {
            let detail = String::from_utf8_lossy(&failure).chars().take(MAX_DETAIL).collect();
            Err(RunError::PeerFailed { peer, detail })
        })
    });
    match failed {
        Ok(()) => Ok(executor),
        Err(error) => {
            executor.give_back(&mut communicator.engine());
            Err(error)
        }
    }
}
