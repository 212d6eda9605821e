//! Pair groups: formation time, idle pair cost, a burst of connecting processes.

use crate::{Outcome, Path};
use clap::Args;
use std::io::{BufRead as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use weft_control::pair::PairSettings;
use weft_fabric::pair::{Listener, PairConfig, connect};
use weft_fabric::{Communicator, Error, clock};

/// Time limit for any expected event on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Environment variable: task for a child process, `TASK COUNT ADDRESS`.
const WORK: &str = "WEFT_BENCH_PAIRS";
/// Pairs formed before the measurement.
const WARM: usize = 20;
/// Polls per measurement.
const POLLS: u32 = 100_000;

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Path between the processes
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Pairs formed one after another
    #[arg(long, default_value_t = 1000)]
    formed: usize,
    /// Idle pairs in one process
    #[arg(long, default_value_t = 1000)]
    idle: usize,
    /// Processes that connect at once
    #[arg(long, default_value_t = 200)]
    burst: usize,
    /// Seconds for which idle pairs' core share is measured
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// JSON line on standard output
    #[arg(long)]
    json: bool,
}

/// Cost for many idle pairs in one process.
struct Idle {
    kib_per_pair: f64,
    poll_ns: f64,
    poll_all_ns_per_pair: f64,
    percent_of_a_core: f64,
}

/// Runs the benchmark and prints the results.
pub fn run(options: &Options) -> Outcome<()> {
    if let Ok(work) = std::env::var(WORK) {
        return work_of_child(options, &work);
    }
    let (p50, p99) = forming(options)?;
    let idle = idle(options)?;
    let burst = burst(options)?;
    let (path, pairs) = (options.path.name(), options.idle);
    if options.json {
        let line = serde_json::json!({
            "benchmark": "pairs", "path": path,
            "formed": options.formed, "form_p50_us": p50 * 1e6, "form_p99_us": p99 * 1e6,
            "idle": pairs, "kib_per_pair": idle.kib_per_pair, "poll_ns": idle.poll_ns,
            "poll_all_ns_per_pair": idle.poll_all_ns_per_pair,
            "percent_of_a_core": idle.percent_of_a_core,
            "burst": options.burst, "burst_seconds": burst,
        });
        println!("{line}");
        return Ok(());
    }
    println!("Pairs over {path}:");
    println!("  forming             {:8.0} us p50, {:.0} us p99", p50 * 1e6, p99 * 1e6);
    println!("  resident memory     {:8.1} KiB per pair of {pairs}", idle.kib_per_pair);
    println!("  poll of one         {:8.0} ns beside {pairs} idle pairs", idle.poll_ns);
    println!("  poll of all         {:8.0} ns per pair", idle.poll_all_ns_per_pair);
    println!("  share of a core     {:8.3} % with {pairs} idle pairs", idle.percent_of_a_core);
    println!(
        "  burst               {:8.3} s until {} processes are connected",
        burst, options.burst
    );
    Ok(())
}

fn config(path: Path, address: &str) -> PairConfig {
    let mut config = PairConfig::new(PairSettings {
        address: address.into(),
        source: None,
        secret: None,
        host_id: "this host".into(),
        silence_timeout: Duration::from_secs(15),
        interrupt: None,
        tls: Default::default(),
    });
    config.providers = vec![path.provider()];
    config
}

fn accept(listener: &Listener, count: usize) -> Outcome<Vec<Communicator>> {
    let deadline = clock::now().after(PATIENCE);
    Ok((0..count).map(|_| listener.accept(deadline, &mut || false)).collect::<Result<_, _>>()?)
}

/// Starts a child process that connects `count` pairs for the task `work`.
fn start(listener: &Listener, work: &str, count: usize) -> Outcome<Child> {
    Ok(Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(WORK, format!("{work} {count} {}", listener.address()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?)
}

/// Lets a child process continue.
fn signal(child: &mut Child) -> Outcome<()> {
    let input = child.stdin.as_mut().ok_or("a process without an input")?;
    Ok(input.write_all(b"\n")?)
}

fn work_of_child(options: &Options, work: &str) -> Outcome<()> {
    let words: Vec<&str> = work.split(' ').collect();
    let &[work, count, address] = words.as_slice() else {
        return Err("malformed task of a child process".into());
    };
    let config = config(options.path, address);
    let dial = || connect(&config, clock::now().after(PATIENCE));
    let wait = || std::io::stdin().lock().read_line(&mut String::new());
    let count: usize = count.parse()?;
    if work == "form" {
        let mut seconds = Vec::new();
        for _ in 0..count {
            let since = Instant::now();
            let pair = dial()?;
            seconds.push(since.elapsed().as_secs_f64());
            drop(pair);
        }
        println!("{}", serde_json::to_string(&seconds)?);
        return Ok(());
    }
    if work == "burst" {
        println!("ready");
        wait()?;
    }
    let pairs = (0..count).map(|_| dial()).collect::<Result<Vec<_>, _>>()?;
    wait()?;
    drop(pairs);
    Ok(())
}

/// Seconds at the connecting end: median and 99th percentile.
fn forming(options: &Options) -> Outcome<(f64, f64)> {
    let listener = Listener::bind(config(options.path, "127.0.0.1:0"))?;
    let count = options.formed + WARM;
    let child = start(&listener, "form", count)?;
    for _ in 0..count {
        accept(&listener, 1)?;
    }
    let mut seconds: Vec<f64> = serde_json::from_slice(&child.wait_with_output()?.stdout)?;
    seconds.drain(..WARM);
    seconds.sort_by(f64::total_cmp);
    let at = |share: f64| seconds[((seconds.len() - 1) as f64 * share).round() as usize];
    Ok((at(0.5), at(0.99)))
}

fn idle(options: &Options) -> Outcome<Idle> {
    let listener = Listener::bind(config(options.path, "127.0.0.1:0"))?;
    let mut child = start(&listener, "hold", options.idle + 1)?;
    let first = accept(&listener, 1)?;
    let before = resident_kib()?;
    let pairs = accept(&listener, options.idle)?;
    let kib_per_pair = (resident_kib()? - before) / options.idle as f64;

    let one = &first[0];
    let since = Instant::now();
    for _ in 0..POLLS {
        one.engine().progress();
    }
    let poll_ns = since.elapsed().as_nanos() as f64 / f64::from(POLLS);
    let rounds = (POLLS as usize / pairs.len().max(1)).max(1);
    let since = Instant::now();
    for _ in 0..rounds {
        pairs.iter().for_each(|pair| pair.engine().progress());
    }
    let polled = (rounds * pairs.len().max(1)) as f64;
    let poll_all_ns_per_pair = since.elapsed().as_nanos() as f64 / polled;

    let (began, taken) = (Instant::now(), crate::idle::processor_time());
    let mut never = || false;
    let deadline = clock::now().after(Duration::from_secs(options.seconds));
    // The other end does not enter this barrier.
    match one.barrier(&mut one.wait_options(deadline, &mut never)) {
        Err(Error::Timeout { .. }) => {}
        Err(error) => return Err(error.into()),
        Ok(()) => return Err("a barrier ended that one end had entered".into()),
    }
    let share =
        (crate::idle::processor_time() - taken).as_secs_f64() / began.elapsed().as_secs_f64();
    signal(&mut child)?;
    child.wait()?;
    Ok(Idle { kib_per_pair, poll_ns, poll_all_ns_per_pair, percent_of_a_core: share * 100.0 })
}

/// Seconds from all processes' start signal until all pairs have formed.
fn burst(options: &Options) -> Outcome<f64> {
    let listener = Listener::bind(config(options.path, "127.0.0.1:0"))?;
    let started = (0..options.burst).map(|_| start(&listener, "burst", 1));
    let mut children = started.collect::<Outcome<Vec<_>>>()?;
    for child in &mut children {
        let output = child.stdout.as_mut().ok_or("a process without an output")?;
        std::io::BufReader::new(output).read_line(&mut String::new())?;
    }
    let since = Instant::now();
    children.iter_mut().try_for_each(signal)?;
    let pairs = accept(&listener, options.burst)?;
    let seconds = since.elapsed().as_secs_f64();
    children.iter_mut().try_for_each(signal)?;
    drop(pairs);
    for mut child in children {
        child.wait()?;
    }
    Ok(seconds)
}

/// This process's private memory in KiB: resident pages without shared mappings.
pub fn resident_kib() -> Outcome<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).ok_or("no VmRSS")?;
    Ok(kib.parse()?)
}
