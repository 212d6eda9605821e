//! Agreement among all ranks on configuration, routes, and rank 0's measurements and network.

use super::config::{CollectivesConfig, GroupRoutes};
use super::driver::Executor;
use crate::placement::{NetworkSource, Placement};
use crate::run_error::RunError;
use crate::tuning::{Tuning, TuningFile, TuningKey, TuningSource};
use weft_fabric::{Communicator, Progress, ProviderKind, Rank, Route, Time};

/// Maximum error text that is sent, or accepted from a peer, in characters.
const MAX_DETAIL: usize = 2000;
/// Value for input bytes read in place, if a rank leaves them to the routes.
const BY_ROUTES: u64 = u64::MAX;

/// Measurements and network for algorithm selection. Rank 0's decide.
#[derive(Clone, Copy, Debug, Default)]
pub struct SelectionSources<'a> {
    /// `weft tune` measurements.
    pub tuning: Option<TuningSource<'a>>,
    /// The group's network.
    pub network: Option<NetworkSource<'a>>,
    /// This rank's host name in the network; by default the host identity.
    pub host: Option<&'a str>,
}

/// Values that are equal on all ranks.
pub(super) struct Agreement {
    pub routes: GroupRoutes,
    pub tuning: Option<Tuning>,
    pub placement: Option<Placement>,
    /// Rank 0's network name and description.
    pub network: Option<(String, String)>,
}

/// Compares the configurations on all ranks, collects the route properties, and takes over rank 0's measurements and
/// network.
pub(super) fn agree(
    communicator: &Communicator,
    config: &CollectivesConfig,
    sources: &SelectionSources<'_>,
    deadline: Time,
) -> Result<Agreement, RunError> {
    let (mine, provider) = routes_of(communicator);
    let in_place = config.in_place_bytes.map_or(BY_ROUTES, |bytes| bytes.min(BY_ROUTES - 1));
    let fields = [
        ("channels", u64::from(config.channels)),
        ("bytes of a channel", config.channel_bytes),
        ("bytes of inputs read in place", in_place),
        ("request for reproducible sums (1: yes)", config.reproducible.into()),
    ];
    let texts = Texts::of(communicator, sources, provider);
    let mut record: Vec<u8> = fields
        .iter()
        .map(|(_, value)| *value)
        .chain([mine.ordered, mine.one_host, mine.mapped, mine.reads].map(u64::from))
        .flat_map(u64::to_le_bytes)
        .collect();
    texts.put(&mut record);
    let copies = vec![record; communicator.world_size() as usize];
    let records = communicator.exchange(&copies, deadline)?;
    if let Some(error) = texts.error {
        return Err(error);
    }
    let mut routes = mine;
    let mut first = None;
    let mut hosts = Vec::with_capacity(records.len());
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
        let [host, tuning, network, failure] =
            Texts::parse(theirs.get(8 * (fields.len() + 4)..).unwrap_or_default());
        if !failure.is_empty() {
            let detail = failure.chars().take(MAX_DETAIL).collect();
            return Err(RunError::PeerFailed { peer, detail });
        }
        hosts.push(host);
        first.get_or_insert((tuning, network));
    }
    let (tuning, network) = first.unwrap_or_default();
    let name = "entry of rank 0";
    let tuning = match tuning.as_str() {
        "" => None,
        text => TuningFile::from_json(name, text)?.first(),
    };
    let network = network.split_once('\n').map(|(name, text)| (name.to_owned(), text.to_owned()));
    let placement = match &network {
        None => None,
        Some((name, text)) => Some(Placement::new(&NetworkSource { name, text }, &hosts)?),
    };
    if let Some(placement) = placement.as_ref().filter(|_| communicator.rank() == Rank(0)) {
        match placement.order() {
            Ok(order) => log::debug!(target: "tuner", "hdrm with ranks in the order {order:?}"),
            Err(reason) => log::debug!(target: "tuner", "hdrm is not selected: {reason}"),
        }
    }
    Ok(Agreement { routes, tuning, placement, network })
}

/// Texts in a rank's record.
struct Texts {
    /// This rank's host.
    host: String,
    /// Measurement entry for this group; empty if there is none, and at all ranks but rank 0.
    tuning: String,
    /// Network name, a line break, and the description; empty likewise.
    network: String,
    error: Option<RunError>,
}

impl Texts {
    fn of(communicator: &Communicator, sources: &SelectionSources<'_>, provider: String) -> Texts {
        let member = communicator.control().members().get(communicator.rank().index());
        let identity = member.map_or("", |member| member.host_id.as_str());
        let host = sources.host.unwrap_or(identity).to_owned();
        let mut texts = Texts { host, tuning: String::new(), network: String::new(), error: None };
        if communicator.rank() != Rank(0) {
            return texts;
        }
        if let Some(source) = &sources.tuning {
            match entry_of(source, provider, communicator.world_size()) {
                Ok(entry) => texts.tuning = entry.unwrap_or_default(),
                Err(error) => texts.error = Some(error),
            }
        }
        if let Some(source) = &sources.network {
            texts.network = format!("{}\n{}", source.name.replace('\n', " "), source.text);
            texts.error = texts.error.or(source.parse().err());
        }
        texts
    }

    /// Appends each text behind its length.
    fn put(&self, record: &mut Vec<u8>) {
        let failure = self.error.as_ref().map(RunError::to_string).unwrap_or_default();
        for text in [&self.host, &self.tuning, &self.network, &failure] {
            record.extend((text.len() as u64).to_le_bytes());
            record.extend(text.as_bytes());
        }
    }

    /// Host, measurements, network, and error text.
    fn parse(mut record: &[u8]) -> [String; 4] {
        std::array::from_fn(|_| {
            let (length, rest) = record.split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
            let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
            let (text, rest) = rest.split_at(length.min(rest.len()));
            record = rest;
            String::from_utf8_lossy(text).into_owned()
        })
    }
}

/// Properties and provider names for this rank's routes.
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

/// JSON for this group's entry.
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

/// Returns the executor if every rank has allocated one. Otherwise releases it: no peer has a grant for it yet.
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
