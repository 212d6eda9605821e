//! Runs one seed after another on every core, and prints the command that replays a failure.
//!
//! `WEFT_SEED=n` replays one seed; `WEFT_SEEDS=n` runs n seeds, beginning at `WEFT_FIRST_SEED`, and
//! prints progress. For example, `WEFT_SEED=7 cargo test --test sim`.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Failures after which a run ends.
const MOST_FAILURES: usize = 10;
/// Seeds under miri, where a run takes seconds instead of milliseconds.
const MIRI_SEEDS: u64 = 2;
const PROGRESS: Duration = Duration::from_secs(5);

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Calls `run` with each requested seed: `default` seeds, unless the environment sets another number.
/// `test` names the test in the command that replays a failure.
///
/// # Panics
/// If `run` fails or panics for a seed.
pub fn each(test: &str, default: u64, run: impl Fn(u64) -> Result<(), String> + Sync) {
    let default = if cfg!(miri) { default.min(MIRI_SEEDS) } else { default };
    let (begin, count) = match number("WEFT_SEED") {
        Some(seed) => (seed, 1),
        None => (number("WEFT_FIRST_SEED").unwrap_or(0), number("WEFT_SEEDS").unwrap_or(default)),
    };
    let sweep = Sweep {
        next: AtomicU64::new(begin),
        end: begin + count,
        failures: Mutex::default(),
        shown: number("WEFT_SEEDS").map(|_| Mutex::new(Instant::now())),
    };
    let start = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(count as usize);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| sweep.work(&run, begin));
        }
    });
    let failures = sweep.failures.into_inner().unwrap_or_default();
    if sweep.shown.is_some() {
        let (seconds, failed) = (start.elapsed().as_secs_f64(), failures.len());
        println!(
            "outcome {{\"test\": \"{test}\", \"first_seed\": {begin}, \"seeds\": {count}, \
             \"failed\": {failed}, \"threads\": {threads}, \"seconds\": {seconds:.1}}}"
        );
    }
    // Cargo names the package whose tests it runs.
    let package = std::env::var("CARGO_PKG_NAME").map(|name| format!("-p {name} "));
    let package = package.unwrap_or_default();
    let lines: Vec<String> = failures
        .iter()
        .map(|(seed, wrong)| {
            format!("{wrong}\n  WEFT_SEED={seed} cargo test {package}--test sim {test}")
        })
        .collect();
    assert!(lines.is_empty(), "{}", lines.join("\n"));
}

struct Sweep {
    next: AtomicU64,
    end: u64,
    failures: Mutex<BTreeMap<u64, String>>,
    /// Time at which the last progress line was printed; `None` without progress lines.
    shown: Option<Mutex<Instant>>,
}

impl Sweep {
    fn work(&self, run: &impl Fn(u64) -> Result<(), String>, begin: u64) {
        loop {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if seed >= self.end {
                return;
            }
            let outcome = catch_unwind(AssertUnwindSafe(|| run(seed)))
                .unwrap_or_else(|panic| Err(format!("it panicked: {}", message(&*panic))));
            if let Err(wrong) = outcome {
                let mut failures = self.failures.lock().unwrap();
                failures.insert(seed, wrong);
                if failures.len() >= MOST_FAILURES {
                    self.next.store(self.end, Ordering::Relaxed);
                }
            }
            self.show(seed - begin);
        }
    }

    fn show(&self, done: u64) {
        let Some(shown) = &self.shown else { return };
        if let Ok(mut last) = shown.try_lock()
            && last.elapsed() >= PROGRESS
        {
            *last = Instant::now();
            println!("{done} seeds done");
        }
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("?")
}
