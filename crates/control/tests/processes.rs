//! Ranks as processes that are killed or stopped. The test binary starts itself for each rank.

use rustix::process::{Pid, Signal, WaitOptions, kill_process};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use weft_control::{Config, Control, Error, Overrides};

const SIZE: u32 = 3;
/// Loss detection time limit on a busy machine: shorter than the silence timeout and a forked child's life.
const IN_TIME: Duration = Duration::from_secs(6);

struct RankProcess {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl RankProcess {
    /// Next line from the rank to the test.
    fn line(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the rank ended");
            if let Some((_, report)) = line.split_once("rank reports: ") {
                return report.trim().to_string();
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(silence: &str) -> Vec<RankProcess> {
    start_with(silence, "")
}

/// Ranks where the last has a role, as in `this_is_a_rank`.
fn start_with(silence: &str, role: &str) -> Vec<RankProcess> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut ranks: Vec<RankProcess> = (0..SIZE)
        .map(|rank| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["this_is_a_rank", "--exact", "--ignored", "--nocapture"])
                .env("WEFT_RANK", rank.to_string())
                .env("WEFT_WORLD_SIZE", SIZE.to_string())
                .env("WEFT_ADDR", format!("127.0.0.1:{port}"))
                .env("WEFT_SILENCE_TIMEOUT", silence)
                .env("TEST_ROLE", role)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let output = BufReader::new(child.stdout.take().unwrap());
            RankProcess { child, output }
        })
        .collect();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "connected"));
    ranks
}

/// Program in each process; not a test.
#[test]
#[ignore = "started by the other tests of this file"]
fn this_is_a_rank() {
    let control = Control::connect(Config::from_env(Overrides::default()).unwrap()).unwrap();
    let wait = Duration::from_secs(30);
    if control.rank().0 == SIZE - 1 {
        match std::env::var("TEST_ROLE").as_deref() {
            Ok("lives on") => drop(fork(|| {
                loop {
                    std::thread::sleep(Duration::from_secs(1));
                }
            })),
            Ok("ends") => {
                let child = fork(|| {
                    let refused = control.barrier(wait).is_err_and(|e| matches!(e, Error::Forked));
                    control.leave();
                    drop(control.clone());
                    std::process::exit(if refused { 0 } else { 1 });
                });
                let ended = rustix::process::waitpid(Some(child), WaitOptions::empty()).unwrap();
                assert_eq!(ended.and_then(|(_, status)| status.exit_status()), Some(0));
            }
            _ => {}
        }
    }
    println!("rank reports: connected");
    if std::env::var("TEST_ROLE").as_deref() == Ok("ends") {
        control.barrier(wait).unwrap();
        println!("rank reports: {:?}", control.poisoned());
        return;
    }
    // The last rank never calls the barrier, so the others wait for it.
    if control.rank().0 == SIZE - 1 {
        while control.poisoned().is_none() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let Err(Error::Poisoned(poison)) = control.barrier(wait) else { panic!("no poison") };
    println!("rank reports: {:?} {:?}", poison.kind, poison.rank.map(|rank| rank.0));
    if control.rank().0 == 1 && std::env::var("TEST_ROLE").as_deref() == Ok("stops") {
        // SAFETY: no pointers. A signal to this thread, so it stops here and not a little later.
        unsafe { libc::raise(libc::SIGSTOP) };
    }
    match control.reform(wait) {
        Ok(next) => println!("rank reports: {} left", next.world_size()),
        Err(error) => println!("rank reports: {error}"),
    }
}

#[test]
fn a_killed_process_is_detected_in_time_and_the_others_continue() {
    let mut ranks = start("15");
    let start = Instant::now();
    ranks[2].signal(Signal::KILL);
    for survivor in &mut ranks[..2] {
        assert_eq!(survivor.line(), "Lost Some(2)");
        assert!(start.elapsed() < IN_TIME);
    }
    for survivor in &mut ranks[..2] {
        assert_eq!(survivor.line(), "2 left");
    }
}

/// Runs `work` in a child, which is killed after 8 s.
fn fork(work: impl FnOnce()) -> Pid {
    // SAFETY: the child has only this thread. It takes no lock that another thread may have held: the harness
    // waits for this test, and the control thread's locks are not used.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: no pointers; the default action ends the process.
            unsafe { libc::alarm(8) };
            work();
            std::process::exit(1);
        }
        child => Pid::from_raw(child).expect("a child"),
    }
}

/// The child has all sockets' copies, so the system does not close them.
#[test]
fn a_killed_process_whose_child_lives_on_is_detected_in_time() {
    let mut ranks = start_with("15", "lives on");
    let start = Instant::now();
    ranks[2].signal(Signal::KILL);
    for survivor in &mut ranks[..2] {
        assert_eq!(survivor.line(), "Lost Some(2)");
        assert!(start.elapsed() < IN_TIME);
    }
    for survivor in &mut ranks[..2] {
        assert_eq!(survivor.line(), "2 left");
    }
}

#[test]
fn a_forked_child_ends_at_once_and_disturbs_no_connection() {
    for rank in &mut start_with("15", "ends") {
        assert_eq!(rank.line(), "None");
    }
}

#[test]
fn a_process_that_stops_during_reform_is_excluded_in_the_same_call() {
    let mut ranks = start_with("0.5", "stops");
    let start = Instant::now();
    ranks[2].signal(Signal::KILL);
    for survivor in &mut ranks[..2] {
        assert_eq!(survivor.line(), "Lost Some(2)");
    }
    assert_eq!(ranks[0].line(), "1 left");
    assert!(start.elapsed() < IN_TIME);
    ranks[1].signal(Signal::CONT);
    let excluded = ranks[1].line();
    assert!(excluded.contains("without this rank"), "{excluded}");
}

#[test]
fn a_stopped_process_is_silent_and_excluded_once_it_resumes() {
    let mut ranks = start("0.5");
    let start = Instant::now();
    ranks[2].signal(Signal::STOP);
    for survivor in &mut ranks[..2] {
        assert_eq!(survivor.line(), "Silent Some(2)");
        assert_eq!(survivor.line(), "2 left");
    }
    assert!(start.elapsed() < IN_TIME);
    ranks[2].signal(Signal::CONT);
    assert_eq!(ranks[2].line(), "Silent Some(2)");
    let excluded = ranks[2].line();
    assert!(excluded.contains("without this rank"), "{excluded}");
}
