//! Ranks as threads or as processes; also used by other crates' tests.
#![allow(dead_code)] // Each test uses only some items.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};
use weft_fabric::Rank;

/// All-gather: returns each rank's message, in rank order.
pub type AllGather<'a> = dyn FnMut(Vec<u8>) -> Vec<Vec<u8>> + 'a;

/// Time limit for any expected event on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Time limits for ranks that are processes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For the whole run; a rank that has not ended by then is killed.
    pub total: Duration,
    /// For each gather, and for all ranks together once one has failed.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { total: 4 * PATIENCE, grace: PATIENCE }
    }
}

/// Each rank's messages so far, in order.
struct Gathering {
    said: Mutex<Vec<Vec<Vec<u8>>>>,
    changed: Condvar,
    patience: Duration,
    failed: AtomicBool,
}

impl Gathering {
    fn new(size: u32, patience: Duration) -> Gathering {
        let said = Mutex::new(vec![Vec::new(); size as usize]);
        Gathering { said, changed: Condvar::new(), patience, failed: AtomicBool::new(false) }
    }

    /// Fails if a rank sends no message, so that a failed rank does not block the others.
    fn gather(&self, rank: Rank, mine: Vec<u8>) -> Result<Vec<Vec<u8>>, String> {
        let mut said = self.said.lock().unwrap();
        let round = said[rank.0 as usize].len();
        said[rank.0 as usize].push(mine);
        self.changed.notify_all();
        let silent = |said: &mut Vec<Vec<Vec<u8>>>| said.iter().any(|of| of.len() <= round);
        let (said, _) = self.changed.wait_timeout_while(said, self.patience, silent).unwrap();
        let Some(late) = said.iter().position(|of| of.len() <= round) else {
            return Ok(said.iter().map(|of| of[round].clone()).collect());
        };
        self.failed.store(true, Relaxed);
        Err(format!("rank {late} did not come to gather {round}"))
    }
}

/// Runs `rank` on a thread for each of `size` ranks.
pub fn on_threads(size: u32, rank: impl Fn(Rank, &mut AllGather<'_>) + Send + Sync) {
    let gathering = Gathering::new(size, PATIENCE);
    std::thread::scope(|scope| {
        for me in (0..size).map(Rank) {
            let (gathering, rank) = (&gathering, &rank);
            scope.spawn(move || rank(me, &mut |mine| gathering.gather(me, mine).unwrap()));
        }
    });
}

const RANK_VARIABLE: &str = "WEFT_TEST_RANK";

/// Runs the test `name` in this binary as `size` processes, each with a rank in [`process_rank`]. Returns
/// each outcome.
pub fn on_processes(name: &str, size: u32) -> Vec<Result<(), String>> {
    on_processes_with(Limits::default(), &[], name, size)
}

/// Same as [`on_processes`], with time limits and additional environment variables.
pub fn on_processes_with(
    limits: Limits,
    variables: &[(&str, &str)],
    name: &str,
    size: u32,
) -> Vec<Result<(), String>> {
    let gathering = Gathering::new(size, limits.grace);
    std::thread::scope(|scope| {
        // Dropped before the scope joins the relays, which end with the processes.
        let mut ranks: Vec<RankProcess> = Vec::new();
        let mut relays = Vec::new();
        for rank in (0..size).map(Rank) {
            let (process, pipes) = RankProcess::start(rank, name, variables);
            ranks.push(process);
            let gathering = &gathering;
            relays.push(scope.spawn(move || relay(rank, pipes, gathering)));
        }
        wait_for(&mut ranks, limits, &gathering);
        let ended = ranks.iter_mut().map(|process| process.outcome.take().expect("ended"));
        ended.zip(relays).map(|(ended, relay)| relay.join().unwrap().and(ended)).collect()
    })
}

/// Rank process. Dropping it, also by a panic, kills and reaps it.
struct RankProcess {
    rank: Rank,
    child: Child,
    outcome: Option<Result<(), String>>,
}

impl RankProcess {
    fn start(rank: Rank, name: &str, variables: &[(&str, &str)]) -> (RankProcess, Pipes) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
            .env(RANK_VARIABLE, rank.0.to_string())
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pipes = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        (RankProcess { rank, child, outcome: None }, pipes)
    }

    /// Records how a process has ended.
    fn has_ended(&mut self) -> bool {
        if self.outcome.is_none() {
            self.outcome = self.child.try_wait().unwrap().map(|status| match status.signal() {
                _ if status.success() => Ok(()),
                Some(signal) => Err(format!("killed by {signal}")),
                None => Err(status.to_string()),
            });
        }
        self.outcome.is_some()
    }

    /// SIGKILL ends a stopped process too.
    fn kill(&mut self, after: Duration) {
        let (rank, seconds) = (self.rank, after.as_secs_f32());
        self.outcome = Some(Err(format!("{rank} was killed after {seconds:.1} s: it did not end")));
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        remove_files_of(self.child.id());
    }
}

/// Waits until all processes have ended. Kills the ones that are left at the limit.
fn wait_for(ranks: &mut [RankProcess], limits: Limits, gathering: &Gathering) {
    let begin = Instant::now();
    let mut end = begin + limits.total;
    loop {
        let running = ranks.iter_mut().filter_map(|rank| (!rank.has_ended()).then_some(()));
        if running.count() == 0 {
            return;
        }
        let failed = |rank: &RankProcess| matches!(rank.outcome, Some(Err(_)));
        if gathering.failed.load(Relaxed) || ranks.iter().any(failed) {
            end = end.min(Instant::now() + limits.grace);
        }
        if Instant::now() >= end {
            let running = ranks.iter_mut().filter(|rank| rank.outcome.is_none());
            return running.for_each(|rank| rank.kill(begin.elapsed()));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

type Pipes = (ChildStdin, ChildStdout);

/// Passes messages between a process and the gathering until the process closes the output.
fn relay(rank: Rank, (mut input, output): Pipes, gathering: &Gathering) -> Result<(), String> {
    for line in BufReader::new(output).lines() {
        let Ok(line) = line else { return Err(format!("the output of {rank} is no text")) };
        // libtest may have started the line with the test's name.
        let Some((_, mine)) = line.split_once('@') else { continue };
        let mut all = gathering.gather(rank, mine.as_bytes().to_vec())?.join(&b' ');
        all.push(b'\n');
        if input.write_all(&all).is_err() {
            break; // The process has ended; the status is the outcome.
        }
    }
    Ok(())
}

/// Removes files that libfabric's shm leaves behind for a killed process.
fn remove_files_of(process: u32) {
    let Ok(files) = std::fs::read_dir("/dev/shm") else { return };
    let prefix = format!("weft-{process}-");
    let is_its = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(&prefix);
    for file in files.flatten().filter(|file| is_its(&file.file_name())) {
        let _ = std::fs::remove_file(file.path());
    }
}

/// This process's rank, under [`on_processes`].
pub fn process_rank() -> Option<Rank> {
    std::env::var(RANK_VARIABLE).ok().map(|rank| Rank(rank.parse().unwrap()))
}

/// All-gather from this process, under [`on_processes`].
pub fn process_gather(mine: Vec<u8>) -> Vec<Vec<u8>> {
    let hex: String = mine.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("@{hex}");
    let mut line = String::new();
    assert!(std::io::stdin().read_line(&mut line).unwrap() > 0, "another rank did not gather");
    let byte = |at: &[u8]| u8::from_str_radix(std::str::from_utf8(at).unwrap(), 16).unwrap();
    line.trim_end_matches('\n')
        .split(' ')
        .map(|hex| hex.as_bytes().chunks(2).map(byte).collect())
        .collect()
}
