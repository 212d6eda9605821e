//! Side `weft`: the query dispatch services at both ends.

use super::samples::{Samples, answer};
use super::{ANSWER, Measured, Options, start};
use crate::group::PATIENCE;
use crate::pairs::resident_kib;
use crate::{Outcome, Path};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use weft_control::pair::PairSettings;
use weft_dispatch::{
    AcceleratorConfig, AcceleratorService, Backend, Batch, Connection, FrontEndHandle,
    FrontEndService, Handler, Hello, Input, LedgerConfig, Query, Report, Reports, Role, Schema,
    ServiceConfig,
};
use weft_fabric::pair::{Listener, PairConfig, connect};
use weft_fabric::providers::OfiChoice;
use weft_fabric::{Time, clock};

/// Round trips with one query.
const TRIPS: u64 = 2000;

/// Backend that reads each query's first bytes.
pub(super) struct Answers;

impl Backend for Answers {
    fn run(&mut self, batch: &mut Batch<'_>) {
        for query in 0..batch.len() {
            let answer = answer(batch.input(query, 0));
            batch.output(query, 0).copy_from_slice(&answer);
        }
    }
}

/// State that the handler shares with the measuring thread.
#[derive(Default)]
struct Progress {
    answered: AtomicU64,
    /// Number of the first round-trip query, and the deadline for all.
    trips_from: OnceLock<(u64, Time, FrontEndHandle)>,
}

/// Counts and compares answers.
struct Check {
    samples: Arc<Samples>,
    progress: Arc<Progress>,
    wrong: u64,
    /// Submission time for the query in flight, and round-trip times.
    since: Option<Instant>,
    trips_ns: Vec<f64>,
}

impl Handler for Check {
    fn reports(&mut self, reports: &Reports<'_>) {
        for report in reports.iter() {
            let Report::Answered { token, answer, .. } = report else {
                self.wrong += 1;
                continue;
            };
            let right = answer.tensors().next() == Some(self.samples.answer(token));
            self.wrong += u64::from(!right);
            if let Some((first, until, handle)) = self.progress.trips_from.get()
                && token >= *first
            {
                let is_last = token >= first + TRIPS;
                let next = (!is_last).then(|| query(&self.samples, token + 1, *until));
                self.trips_ns.extend(self.since.map(|since| since.elapsed().as_nanos() as f64));
                self.since = Some(Instant::now());
                // Refused queries are missing from the answers.
                self.wrong += next.map_or(0, |next| u64::from(handle.submit(next).is_err()));
            }
        }
        self.progress.answered.fetch_add(reports.len() as u64, Ordering::Release);
    }
}

fn query(samples: &Samples, number: u64, until: Time) -> Query {
    let (offset, length) = (samples.offset(number) as u64, samples.bytes() as u64);
    Query::new(number, &[Input { memory: 0, offset, length }], until)
}

pub fn pair_config(options: &Options, bytes: usize, address: &str) -> Outcome<PairConfig> {
    let mut config = pair_config_over(options.path, options.slots(bytes), address);
    if options.tls {
        config.settings.tls = PairSettings::from_env(address)?.tls.with_payloads();
    }
    Ok(config)
}

pub fn pair_config_over(path: Path, slots: u32, address: &str) -> PairConfig {
    let mut config = PairConfig::new(PairSettings {
        address: address.into(),
        source: None,
        secret: None,
        host_id: "this host".into(),
        silence_timeout: PATIENCE,
        interrupt: None,
        tls: Default::default(),
    });
    config.providers = vec![path.provider()];
    config.ofi = Some(OfiChoice {
        provider: path.ofi_provider().map(str::to_owned),
        ..OfiChoice::default()
    });
    config.engine = Connection::engine_config(slots);
    config
}

pub(super) fn schema(bytes: usize) -> Schema {
    Schema::bytes(bytes as u64, ANSWER as u64)
}

fn hello(options: &Options, role: Role, bytes: usize) -> Hello {
    let (slots, name) = (options.slots(bytes), format!("{role:?}"));
    Hello { role, slots, checksum: false, name, schema: Some(schema(bytes)) }
}

pub fn deadline() -> Time {
    clock::now().after(PATIENCE)
}

/// Second process: serves until the front end leaves.
pub fn accelerator(options: &Options, bytes: usize, address: &str) -> Outcome<()> {
    let front_ends = options.connections.max(AcceleratorConfig::default().front_ends);
    let config = AcceleratorConfig { front_ends, ..AcceleratorConfig::default() };
    let service = AcceleratorService::start(options.service(), config, schema(bytes), Answers)?;
    for _ in 0..options.connections {
        let pair = connect(&pair_config(options, bytes, address)?, deadline())?;
        service.join(pair, &hello(options, Role::Accelerator, bytes), deadline())?;
    }
    while service.state()?.front_ends > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    service.stop(deadline())?;
    Ok(())
}

pub fn measure(options: &Options, samples: &Arc<Samples>, time: Duration) -> Outcome<Measured> {
    let (bytes, progress) = (samples.bytes(), Arc::<Progress>::default());
    let handler = Check {
        samples: samples.clone(),
        progress: progress.clone(),
        wrong: 0,
        since: None,
        trips_ns: Vec::with_capacity(TRIPS as usize),
    };
    let slots = options.slots(bytes);
    let (queries, nodes) = (2 * slots, options.connections);
    let ledger = LedgerConfig { queries, nodes, slots, ..LedgerConfig::default() };
    let config = ServiceConfig { submissions: slots as usize, ..options.service() };
    let memories = [samples.memory().clone()];
    let front_end = FrontEndService::start(config, ledger, schema(bytes), &memories, handler)?;
    let listener = Listener::bind(pair_config(options, bytes, "127.0.0.1:0")?)?;
    let mut child = start("weft", bytes, &listener.address().to_string())?;
    let before = resident_kib()?;
    for _ in 0..options.connections {
        let pair = listener.accept(deadline(), &mut || false)?;
        front_end.join(pair, &hello(options, Role::FrontEnd, bytes), deadline())?;
    }
    let resident_kib = Some(resident_kib()? - before);

    let load = Load { handle: front_end.handle(), samples, progress: &progress };
    let first = load.submit(0, time / 5)?;
    let since = Instant::now();
    let next = load.submit(first, time)?;
    let queries_per_s = (next - first) as f64 / since.elapsed().as_secs_f64();
    // The handler submits each further query, so that no third thread takes part.
    let until = deadline();
    let _ = progress.trips_from.set((next, until, front_end.handle()));
    front_end.handle().submit(query(samples, next, until))?;
    load.wait_for(next + TRIPS)?;
    let (check, counts) = front_end.stop(deadline())?;
    child.wait()?;
    let lost = counts.submitted - counts.answered;
    let (round_trips_ns, wrong) = (check.trips_ns, check.wrong + lost);
    Ok(Measured { queries_per_s, round_trips_ns, resident_kib, wrong })
}

struct Load<'a> {
    handle: FrontEndHandle,
    samples: &'a Samples,
    progress: &'a Progress,
}

impl Load<'_> {
    /// Submits queries from number `first` on for some time, and waits for the answers. Returns the next number.
    fn submit(&self, first: u64, time: Duration) -> Outcome<u64> {
        let (since, mut is_over, mut until) = (Instant::now(), false, deadline());
        // The clock is read for 32 queries at a time, as by the other sides.
        let queries = (first..).map_while(|number| {
            if number % 32 == 0 {
                is_over = since.elapsed() >= time;
                until = deadline();
            }
            (!is_over).then(|| query(self.samples, number, until))
        });
        let next = first + self.handle.submit_all(queries, deadline())?;
        self.wait_for(next)?;
        Ok(next)
    }

    fn wait_for(&self, number: u64) -> Outcome<()> {
        let until = deadline();
        while self.progress.answered.load(Ordering::Acquire) < number {
            if clock::now() > until {
                return Err("queries without an answer".into());
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}
