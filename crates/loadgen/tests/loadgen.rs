//! Tests for every scenario with systems that answer at once, from a thread, falsely or not at all.
//!
//! They need the library that `make loadgen` builds, by the path in `WEFT_LOADGEN`. LoadGen keeps
//! global state, so they run sequentially.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use weft_loadgen::{
    Error, LoadGen, Mode, Response, Sample, SampleLibrary, Scenario, Summary, SystemUnderTest, Test,
};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Run a test's body with LoadGen and an empty directory.
fn with_loadgen(name: &str, body: impl FnOnce(LoadGen, PathBuf)) {
    let Some(path) = std::env::var_os("WEFT_LOADGEN") else {
        eprintln!(
            "skipped: WEFT_LOADGEN is not set; `make test-loadgen` builds the library and sets it"
        );
        return;
    };
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the variable names the library that `make loadgen` built.
    let loadgen =
        unsafe { LoadGen::load(PathBuf::from(path).as_path()) }.expect("the library loads");
    let directory =
        std::env::temp_dir().join(format!("weft-loadgen-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    body(loadgen, directory.clone());
    std::fs::remove_dir_all(&directory).expect("the directory can be removed");
}

/// One-byte samples that hold their index.
struct Samples {
    loaded: AtomicUsize,
    unloaded: AtomicUsize,
}

impl Samples {
    fn new() -> Self {
        Self { loaded: AtomicUsize::new(0), unloaded: AtomicUsize::new(0) }
    }
}

impl SampleLibrary for Samples {
    fn name(&self) -> String {
        "numbers".to_owned()
    }
    fn total(&self) -> usize {
        200
    }
    fn performance(&self) -> usize {
        50
    }
    fn load(&self, indices: &[usize]) {
        assert!(indices.iter().all(|&index| index < 200));
        self.loaded.fetch_add(indices.len(), Ordering::Relaxed);
    }
    fn unload(&self, indices: &[usize]) {
        self.unloaded.fetch_add(indices.len(), Ordering::Relaxed);
    }
}

/// Answers each sample with the index, in the call.
struct AtOnce {
    loadgen: LoadGen,
    issued: AtomicUsize,
    flushed: AtomicUsize,
}

impl AtOnce {
    fn new(loadgen: LoadGen) -> Self {
        Self { loadgen, issued: AtomicUsize::new(0), flushed: AtomicUsize::new(0) }
    }
}

impl SystemUnderTest for AtOnce {
    fn name(&self) -> String {
        "at once".to_owned()
    }
    fn issue(&self, samples: &[Sample]) {
        self.issued.fetch_add(samples.len(), Ordering::Relaxed);
        for sample in samples {
            let answer = [u8::try_from(sample.index).expect("fewer than 256 samples")];
            self.loadgen.complete(&[Response::new(sample.id, &answer)]);
        }
    }
    fn flush(&self) {
        self.flushed.fetch_add(1, Ordering::Relaxed);
    }
}

fn test(loadgen: LoadGen, scenario: Scenario, mode: Mode, directory: PathBuf) -> Test {
    let mut settings = loadgen.settings(scenario, mode);
    settings.min_duration_ms = 100;
    settings.min_query_count = 100;
    settings.max_query_count = 2000;
    settings.server_target_qps = 2000.0;
    settings.offline_expected_qps = 5000.0;
    Test {
        settings,
        model: "numbers".to_owned(),
        user_conf: None,
        audit_config: directory.join("audit.config"),
        log_directory: directory,
    }
}

#[test]
fn every_scenario_issues_its_samples_and_writes_a_result() {
    for scenario in
        [Scenario::SingleStream, Scenario::MultiStream, Scenario::Server, Scenario::Offline]
    {
        with_loadgen(&format!("{scenario:?}"), |loadgen, directory| {
            let (system, samples) = (AtOnce::new(loadgen), Samples::new());
            let test = test(loadgen, scenario, Mode::Performance, directory.clone());
            let summary = test.run(loadgen, &system, &samples).expect("the test runs");
            assert_eq!(summary.get("SUT name"), Some("at once"), "{:?}", summary.values());
            assert!(system.issued.load(Ordering::Relaxed) >= 100);
            assert!(system.flushed.load(Ordering::Relaxed) >= 1);
            // LoadGen loads a few more where a query has several samples.
            let loaded = samples.loaded.load(Ordering::Relaxed);
            assert!((50..58).contains(&loaded), "{loaded}");
            assert_eq!(samples.unloaded.load(Ordering::Relaxed), loaded);
            let detail =
                std::fs::read_to_string(directory.join("mlperf_log_detail.txt")).expect("a log");
            assert!(detail.contains(&format!("\"value\": \"{scenario:?}\"")), "{detail}");
        });
    }
}

#[test]
fn an_accuracy_run_logs_the_answer_of_every_sample() {
    with_loadgen("accuracy", |loadgen, directory| {
        let (system, samples) = (AtOnce::new(loadgen), Samples::new());
        let test = test(loadgen, Scenario::Offline, Mode::Accuracy, directory.clone());
        // An accuracy run has no performance result.
        let ended = test.run(loadgen, &system, &samples);
        assert!(matches!(ended, Err(Error::Summary { .. })), "{ended:?}");
        let log =
            std::fs::read_to_string(directory.join("mlperf_log_accuracy.json")).expect("a log");
        for index in 0..200 {
            assert!(
                log.contains(&format!("\"qsl_idx\" : {index}, \"data\" : \"{index:02X}\"")),
                "{index}: {log}"
            );
        }
    });
}

/// Answers from a second thread.
struct FromThread(Mutex<mpsc::Sender<Sample>>);

impl SystemUnderTest for FromThread {
    fn name(&self) -> String {
        "from a thread".to_owned()
    }
    fn issue(&self, samples: &[Sample]) {
        let sender = self.0.lock().unwrap();
        samples.iter().for_each(|&sample| sender.send(sample).expect("the thread lives"));
    }
    fn flush(&self) {}
}

#[test]
fn answers_may_come_from_another_thread() {
    with_loadgen("thread", |loadgen, directory| {
        let (sender, receiver) = mpsc::channel::<Sample>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for sample in receiver {
                    loadgen.complete(&[Response::new(sample.id, &[1]).with_tokens(1)]);
                }
            });
            let system = FromThread(Mutex::new(sender));
            let test = test(loadgen, Scenario::Server, Mode::Performance, directory);
            test.run(loadgen, &system, &Samples::new()).expect("the test runs");
        });
    });
}

/// Gives first tokens, then answers with a token count, or the first tokens after the answers.
struct InTokens {
    loadgen: LoadGen,
    tokens: u32,
    first_is_late: bool,
}

impl SystemUnderTest for InTokens {
    fn name(&self) -> String {
        "in tokens".to_owned()
    }
    fn issue(&self, samples: &[Sample]) {
        let (last, before) = samples.split_last().expect("a sample");
        let answer = |sample: &Sample| {
            self.loadgen.complete(&[Response::new(sample.id, &[1; 8]).with_tokens(self.tokens)]);
        };
        let first =
            |sample: &Sample| self.loadgen.first_token(&[Response::new(sample.id, &[1; 4])]);
        // The last sample keeps the query's others valid in LoadGen.
        for sample in before {
            if self.first_is_late {
                answer(sample);
                // LoadGen records on a separate thread.
                first(sample);
            } else {
                first(sample);
                answer(sample);
            }
        }
        first(last);
        answer(last);
    }
    fn flush(&self) {}
}

/// Errors in LoadGen's log for a test with token latencies, and the test summary.
fn in_tokens(loadgen: LoadGen, directory: PathBuf, tokens: u32, late: bool) -> (String, Summary) {
    let conf = directory.join("user.conf");
    std::fs::write(&conf, "*.*.use_token_latencies = 1\n*.*.min_duration = 20\n").unwrap();
    let mut test = test(loadgen, Scenario::MultiStream, Mode::Performance, directory.clone());
    test.user_conf = Some(conf);
    test.settings.max_query_count = 100;
    let system = InTokens { loadgen, tokens, first_is_late: late };
    let summary = test.run(loadgen, &system, &Samples::new()).expect("the test runs");
    let detail = std::fs::read_to_string(directory.join("mlperf_log_detail.txt")).expect("a log");
    let errors = detail.lines().filter(|line| {
        // Other errors are about the configuration, since this is no submission.
        line.contains("\"error_runtime") && line.contains("token")
    });
    (errors.collect::<Vec<_>>().join("\n"), summary)
}

#[test]
fn tokens_are_counted_and_their_latencies_are_in_the_summary() {
    with_loadgen("tokens", |loadgen, directory| {
        let (errors, summary) = in_tokens(loadgen, directory, 5, false);
        assert_eq!(errors, "");
        assert!(
            summary.values().keys().any(|key| key.to_lowercase().contains("token")),
            "{:?}",
            summary.values()
        );
    });
}

#[test]
fn a_wrong_number_of_tokens_and_a_late_first_token_are_refused() {
    for (tokens, late, expected) in [
        (0, false, "n_tokens argument missing"),
        (1, false, "Number of tokens need to be greater than 1"),
        (5, true, "before it's first token latency"),
        (5, true, "token latency after sample was completed"),
    ] {
        with_loadgen(&format!("tokens-{tokens}-{late}"), |loadgen, directory| {
            let (errors, _) = in_tokens(loadgen, directory, tokens, late);
            assert!(errors.contains(expected), "{expected}: {errors}");
        });
    }
}

/// Panics at a query.
struct Panics;

impl SystemUnderTest for Panics {
    fn name(&self) -> String {
        "panics".to_owned()
    }
    fn issue(&self, _: &[Sample]) {
        panic!("at the first query");
    }
    fn flush(&self) {}
}

#[test]
fn a_panic_in_a_callback_ends_the_process() {
    with_loadgen("panic", |loadgen, directory| {
        let inner = "WEFT_TEST_PANICS";
        if std::env::var_os(inner).is_some() {
            let _ = test(loadgen, Scenario::Offline, Mode::Performance, directory).run(
                loadgen,
                &Panics,
                &Samples::new(),
            );
            return;
        }
        let own = std::env::current_exe().expect("this test");
        let output = std::process::Command::new(own)
            .args(["--exact", "a_panic_in_a_callback_ends_the_process", "--nocapture"])
            .env(inner, "1")
            .output()
            .expect("it starts");
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(6), "{printed}");
        assert!(printed.contains("at the first query"), "{printed}");
    });
}

#[test]
fn what_cannot_run_is_refused_before_any_query() {
    with_loadgen("refused", |loadgen, directory| {
        let system = AtOnce::new(loadgen);
        let right = test(loadgen, Scenario::Offline, Mode::Performance, directory.clone());
        let gone = Test { log_directory: directory.join("gone"), ..right.clone() };
        let text = gone.run(loadgen, &system, &Samples::new()).unwrap_err().to_string();
        assert!(text.starts_with("log directory") && text.ends_with("no such file"), "{text}");
        let absent = Test { user_conf: Some(directory.join("user.conf")), ..right.clone() };
        let text = absent.run(loadgen, &system, &Samples::new()).unwrap_err().to_string();
        assert!(text.starts_with("user.conf"), "{text}");
        let endless = Test { user_conf: Some("/dev/zero".into()), ..right.clone() };
        let text = endless.run(loadgen, &system, &Samples::new()).unwrap_err().to_string();
        assert!(text.starts_with("user.conf /dev/zero"), "{text}");
        let zero = Test { model: "a\0b".to_owned(), ..right };
        let text = zero.run(loadgen, &system, &Samples::new()).unwrap_err().to_string();
        assert_eq!(text, "the name of the model contains a zero byte");
        assert_eq!(system.issued.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn a_user_conf_changes_settings() {
    with_loadgen("conf", |loadgen, directory| {
        let conf = directory.join("user.conf");
        std::fs::write(&conf, "*.Offline.target_qps = 777\n*.Offline.min_duration = 50\n").unwrap();
        let mut test = test(loadgen, Scenario::Offline, Mode::Performance, directory);
        test.user_conf = Some(conf);
        let summary =
            test.run(loadgen, &AtOnce::new(loadgen), &Samples::new()).expect("the test runs");
        assert_eq!(summary.number("target_qps"), Some(777.0), "{:?}", summary.values());
    });
}

#[test]
fn a_file_that_is_no_library_is_named() {
    let path = PathBuf::from("/nonexistent/libweft_loadgen.so");
    // SAFETY: there is no such file, so no code runs.
    let text = unsafe { LoadGen::load(&path) }.unwrap_err().to_string();
    assert!(
        text.contains("/nonexistent/libweft_loadgen.so") && text.contains("python -m weft.loadgen"),
        "{text}"
    );
}
