//! Ranks as threads or as processes; used by tests of other crates too.
#![allow(dead_code)] // Each test uses its part.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Condvar, Mutex};
use std::time::Duration;
use weft_fabric::Rank;

/// All-gather: returns the message of each rank, in rank order.
pub type AllGather<'a> = dyn FnMut(Vec<u8>) -> Vec<Vec<u8>> + 'a;

/// Time limit for any expected event on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Messages of each rank so far, in order.
struct Gathering {
    said: Mutex<Vec<Vec<Vec<u8>>>>,
    changed: Condvar,
}

impl Gathering {
    fn new(size: u32) -> Gathering {
        Gathering { said: Mutex::new(vec![Vec::new(); size as usize]), changed: Condvar::new() }
    }

    /// Panics if a rank sends no message, so that a failed rank does not block the others.
    fn gather(&self, rank: Rank, mine: Vec<u8>) -> Vec<Vec<u8>> {
        let mut said = self.said.lock().unwrap();
        let round = said[rank.0 as usize].len();
        said[rank.0 as usize].push(mine);
        self.changed.notify_all();
        let silent = |said: &mut Vec<Vec<Vec<u8>>>| said.iter().any(|of| of.len() <= round);
        let (said, late) = self.changed.wait_timeout_while(said, PATIENCE, silent).unwrap();
        assert!(!late.timed_out(), "a rank did not come to gather {round}");
        said.iter().map(|of| of[round].clone()).collect()
    }
}

/// Runs `rank` on a thread for each of `size` ranks.
pub fn on_threads(size: u32, rank: impl Fn(Rank, &mut AllGather<'_>) + Send + Sync) {
    let gathering = Gathering::new(size);
    std::thread::scope(|scope| {
        for me in (0..size).map(Rank) {
            let (gathering, rank) = (&gathering, &rank);
            scope.spawn(move || rank(me, &mut |mine| gathering.gather(me, mine)));
        }
    });
}

const RANK_VARIABLE: &str = "WEFT_TEST_RANK";

/// Runs the test `name` of this binary as `size` processes, each with its rank in [`process_rank`]. Returns
/// the outcome of each.
pub fn on_processes(name: &str, size: u32) -> Vec<Result<(), String>> {
    on_processes_with(&[], name, size)
}

/// As [`on_processes`], with additional environment variables.
pub fn on_processes_with(
    variables: &[(&str, &str)],
    name: &str,
    size: u32,
) -> Vec<Result<(), String>> {
    let spawn = |number: u32| {
        Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
            .env(RANK_VARIABLE, number.to_string())
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<Child> = (0..size).map(spawn).collect();
    let gathering = Gathering::new(size);
    std::thread::scope(|scope| {
        let relay = |(number, child)| {
            let gathering = &gathering;
            scope.spawn(move || relay(Rank(number), child, gathering))
        };
        let relays: Vec<_> = (0..).zip(children).map(relay).collect();
        relays.into_iter().map(|relay| relay.join().unwrap()).collect()
    })
}

fn relay(rank: Rank, mut child: Child, gathering: &Gathering) -> Result<(), String> {
    let mut input = child.stdin.take().unwrap();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        // libtest may have started the line with the test's name.
        let Some((_, mine)) = line.split_once('@') else { continue };
        let all = gathering.gather(rank, mine.as_bytes().to_vec()).join(&b' ');
        input.write_all(&all).unwrap();
        input.write_all(b"\n").unwrap();
    }
    let status = child.wait().unwrap();
    remove_files_of(child.id());
    match status.signal() {
        _ if status.success() => Ok(()),
        Some(signal) => Err(format!("killed by {signal}")),
        None => Err(status.to_string()),
    }
}

/// Removes files of a killed process that libfabric's shm leaves behind.
fn remove_files_of(process: u32) {
    let Ok(files) = std::fs::read_dir("/dev/shm") else { return };
    let prefix = format!("weft-{process}-");
    let is_its = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(&prefix);
    for file in files.flatten().filter(|file| is_its(&file.file_name())) {
        let _ = std::fs::remove_file(file.path());
    }
}

/// Rank of this process, under [`on_processes`].
pub fn process_rank() -> Option<Rank> {
    std::env::var(RANK_VARIABLE).ok().map(|rank| Rank(rank.parse().unwrap()))
}

/// All-gather of this process, under [`on_processes`].
pub fn process_gather(mine: Vec<u8>) -> Vec<Vec<u8>> {
    let hex: String = mine.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("@{hex}");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let byte = |at: &[u8]| u8::from_str_radix(std::str::from_utf8(at).unwrap(), 16).unwrap();
    line.trim_end_matches('\n')
        .split(' ')
        .map(|hex| hex.as_bytes().chunks(2).map(byte).collect())
        .collect()
}
