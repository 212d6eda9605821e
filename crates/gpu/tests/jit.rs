//! Compiled-kernel cache: damage, races, and NVRTC.

#[path = "../../fabric/tests/common/ranks.rs"]
mod ranks;

use proptest::prelude::*;
use ranks::{PATIENCE, on_processes, process_gather, process_rank};
use std::fs::{self, File, Permissions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use weft_fabric::Rank;
use weft_gpu::Result;
use weft_gpu::jit::{Cache, CompileRequest, Compiler, cubin, cubin_with, prepare, prepare_with};

/// Machine code for a kernel in these tests.
fn code(request: &CompileRequest<'_>) -> Vec<u8> {
    format!("code of {} with {:?}", request.name, request.arguments()).into_bytes()
}

/// Compiler that counts calls.
#[derive(Default)]
struct Counting {
    compiled: AtomicUsize,
    pause: Duration,
}

impl Counting {
    fn count(&self) -> usize {
        self.compiled.load(Ordering::Relaxed)
    }
}

impl Compiler for Counting {
    fn version(&self) -> Result<String> {
        Ok("counting".into())
    }

    fn compile(&self, request: &CompileRequest<'_>) -> Result<Vec<u8>> {
        self.compiled.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(self.pause);
        Ok(code(request))
    }
}

fn request(number: u32) -> CompileRequest<'static> {
    CompileRequest {
        name: "a.cu",
        files: &[("a.cu", "int a;")],
        defines: vec![("NUMBER".into(), number.to_string())],
        arch: "sm_90a".into(),
        options: Vec::new(),
    }
}

fn folder() -> TempDir {
    tempfile::Builder::new().prefix("weft-jit-").tempdir().unwrap()
}

/// Files in a folder with this suffix.
fn files(folder: &Path, suffix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = entries.filter(|p| p.to_str().unwrap().ends_with(suffix)).collect();
    found.sort();
    found
}

/// Folder entry for `request`, and the compiler that made it.
fn filled(folder: &TempDir, number: u32) -> (Cache, Counting, PathBuf) {
    let (cache, compiler) = (Cache::at(folder.path()), Counting::default());
    let before = files(folder.path(), ".cubin");
    let first = cubin_with(&request(number), &cache, &compiler).unwrap();
    assert!(!first.cached && first.cubin == code(&request(number)));
    let made = files(folder.path(), ".cubin").into_iter().find(|path| !before.contains(path));
    (cache, compiler, made.unwrap())
}

/// Checks that a damaged entry yields the right code, and comes from the cache the next time.
fn is_replaced(cache: &Cache, compiler: &Counting) {
    let before = compiler.count();
    for (cached, compiled) in [(false, 1), (true, 1)] {
        let got = cubin_with(&request(1), cache, compiler).unwrap();
        assert_eq!(got.cubin, code(&request(1)));
        assert_eq!((got.cached, compiler.count() - before), (cached, compiled));
    }
}

#[test]
fn the_second_request_comes_from_the_cache() {
    let folder = folder();
    let (cache, compiler, entry) = filled(&folder, 1);
    let second = cubin_with(&request(1), &cache, &compiler).unwrap();
    assert!(second.cached && second.cubin == code(&request(1)) && compiler.count() == 1);
    let other = cubin_with(&request(2), &cache, &compiler).unwrap();
    assert!(!other.cached && other.cubin == code(&request(2)));
    assert_eq!(files(folder.path(), ".cubin").len(), 2);
    assert!(files(folder.path(), ".tmp").is_empty());
    assert_eq!(entry.file_name().unwrap().len(), 64 + ".cubin".len());
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(100)
    })]

    #[test]
    fn a_truncated_entry_is_replaced(length: prop::sample::Index) {
        let folder = folder();
        let (cache, compiler, entry) = filled(&folder, 1);
        let bytes = fs::read(&entry).unwrap();
        fs::write(&entry, &bytes[..length.index(bytes.len())]).unwrap();
        is_replaced(&cache, &compiler);
    }

    #[test]
    fn an_entry_with_a_flipped_bit_is_replaced(at: prop::sample::Index, bit in 0..8) {
        let folder = folder();
        let (cache, compiler, entry) = filled(&folder, 1);
        let mut bytes = fs::read(&entry).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1u8 << bit;
        fs::write(&entry, bytes).unwrap();
        is_replaced(&cache, &compiler);
    }

    #[test]
    fn an_entry_of_arbitrary_bytes_is_replaced(bytes: Vec<u8>, behind: bool) {
        let folder = folder();
        let (cache, compiler, entry) = filled(&folder, 1);
        let mut file = File::options().write(true).append(behind).open(&entry).unwrap();
        file.write_all(&bytes).unwrap();
        file.write_all(b"!").unwrap();
        is_replaced(&cache, &compiler);
    }
}

#[test]
fn another_kernels_entry_is_replaced() {
    let folder = folder();
    let (cache, compiler, entry) = filled(&folder, 1);
    let (_, _, other) = filled(&folder, 2);
    fs::copy(&other, &entry).unwrap();
    is_replaced(&cache, &compiler);
}

#[test]
fn racing_threads_compile_once() {
    let folder = folder();
    let compiler = Counting { pause: Duration::from_millis(50), ..Counting::default() };
    let cached: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                // One cache per thread, as per rank.
                scope.spawn(|| {
                    let cache = Cache::at(folder.path());
                    let got = cubin_with(&request(1), &cache, &compiler).unwrap();
                    assert_eq!(got.cubin, code(&request(1)));
                    usize::from(got.cached)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!((compiler.count(), cached), (1, 7));
}

/// Compiler that appends a line to a file for each compilation, to count over processes; exits during the
/// compilation if `dies` is set.
struct Logged {
    log: PathBuf,
    dies: bool,
}

impl Compiler for Logged {
    fn version(&self) -> Result<String> {
        Ok("logged".into())
    }

    fn compile(&self, request: &CompileRequest<'_>) -> Result<Vec<u8>> {
        let mut log = File::options().create(true).append(true).open(&self.log).unwrap();
        log.write_all(b"compiled\n").unwrap();
        std::thread::sleep(Duration::from_millis(100));
        if self.dies {
            let myself = rustix::process::getpid();
            rustix::process::kill_process(myself, rustix::process::Signal::KILL).unwrap();
        }
        Ok(code(request))
    }
}

/// Common folder for all processes in a test; the first one removes it.
fn common_folder(rank: Rank) -> (Option<TempDir>, PathBuf) {
    let own = (rank == Rank(0)).then(folder);
    let path = own.as_ref().map(|own| own.path().to_str().unwrap().to_owned());
    let told = process_gather(path.unwrap_or_default().into_bytes());
    (own, PathBuf::from(String::from_utf8(told[0].clone()).unwrap()))
}

#[test]
fn racing_processes_compile_once() {
    let Some(rank) = process_rank() else {
        let ended = on_processes("racing_processes_compile_once", 4);
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        return;
    };
    let (_own, path) = common_folder(rank);
    let compiler = Logged { log: path.join("log"), dies: false };
    for number in 0..3 {
        let got = cubin_with(&request(number), &Cache::at(&path), &compiler).unwrap();
        assert_eq!(got.cubin, code(&request(number)));
        process_gather(Vec::new());
        let log = fs::read_to_string(&compiler.log).unwrap();
        assert_eq!(log.lines().count(), number as usize + 1, "{rank}");
        process_gather(Vec::new());
    }
}

#[test]
fn another_process_compiles_after_one_dies_compiling() {
    let Some(rank) = process_rank() else {
        let name = "another_process_compiles_after_one_dies_compiling";
        let ended = on_processes(name, 2);
        assert_eq!(ended, [Ok(()), Err("killed by 9".into())]);
        return;
    };
    let (_own, path) = common_folder(rank);
    let compiler = Logged { log: path.join("log"), dies: rank == Rank(1) };
    if rank == Rank(1) {
        let _ = cubin_with(&request(1), &Cache::at(&path), &compiler);
        unreachable!("it was killed");
    }
    let begin = Instant::now();
    while !compiler.log.exists() {
        assert!(begin.elapsed() < PATIENCE, "the other does not compile");
        std::thread::sleep(Duration::from_millis(1));
    }
    let got = cubin_with(&request(1), &Cache::at(&path), &compiler).unwrap();
    assert!(!got.cached && got.cubin == code(&request(1)));
    assert!(begin.elapsed() < PATIENCE);
}

#[test]
fn only_temporary_files_of_dead_writers_are_removed() {
    let folder = folder();
    let (cache, compiler, entry) = filled(&folder, 1);
    fs::remove_file(&entry).unwrap();
    let (left, others) = (entry.with_extension("7-0.tmp"), folder.path().join("other.7-0.tmp"));
    fs::write(&left, "half").unwrap();
    fs::write(&others, "half").unwrap();
    is_replaced(&cache, &compiler);
    assert!(!left.exists() && others.exists());
}

#[test]
fn a_lock_that_is_never_released_costs_only_time() {
    let folder = folder();
    let (cache, compiler, entry) = filled(&folder, 1);
    fs::remove_file(&entry).unwrap();
    let held = File::open(entry.with_extension("lock")).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let cache = cache.with_lock_timeout(Duration::from_millis(50));
    is_replaced(&cache, &compiler);
    drop(held);
}

/// Takes this thread's warnings since the last call.
fn warnings() -> Vec<String> {
    type Said = (std::thread::ThreadId, String);
    struct Logger(Mutex<Vec<Said>>);
    impl log::Log for Logger {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }
        fn log(&self, record: &log::Record<'_>) {
            if record.level() == log::Level::Warn {
                let said = (std::thread::current().id(), record.args().to_string());
                self.0.lock().unwrap().push(said);
            }
        }
        fn flush(&self) {}
    }
    static LOGGER: OnceLock<Logger> = OnceLock::new();
    let logger = LOGGER.get_or_init(|| Logger(Mutex::default()));
    if log::set_logger(logger).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
    let mut said = logger.0.lock().unwrap();
    let (mine, others) =
        said.drain(..).partition(|(thread, _)| *thread == std::thread::current().id());
    *said = others;
    mine.into_iter().map(|(_, text)| text).collect()
}

#[test]
fn an_unwritable_folder_only_warns() {
    warnings();
    let folder = folder();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let (cache, compiler) = (Cache::at(file.join("below")), Counting::default());
    for compiled in 1..3 {
        let got = cubin_with(&request(1), &cache, &compiler).unwrap();
        assert!(!got.cached && got.cubin == code(&request(1)) && compiler.count() == compiled);
    }
    let logged = warnings();
    let [one] = logged.as_slice() else { panic!("{logged:?}") };
    assert!(one.contains("WEFT_CACHE_DIR") && one.contains("below"), "{one}");
    let error = prepare_with(&[request(1)], &cache, &compiler).unwrap_err().to_string();
    assert!(error.contains("WEFT_CACHE_DIR"), "{error}");
}

#[test]
fn what_another_user_can_have_written_is_not_read() {
    warnings();
    let folder = folder();
    let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    let (cache, compiler, entry) = filled(&folder, 1);
    for open in [0o777, 0o1777, 0o770] {
        mode(folder.path(), open);
        let before = compiler.count();
        assert!(!cubin_with(&request(1), &cache, &compiler).unwrap().cached);
        assert_eq!(compiler.count(), before + 1);
    }
    let logged = warnings();
    let [one] = logged.as_slice() else { panic!("{logged:?}") };
    assert!(one.contains("other users can write it (mode 0777)"), "{one}");
    mode(folder.path(), 0o700);
    mode(&entry, 0o666);
    is_replaced(&cache, &compiler);
    // Only root gives files away.
    if std::os::unix::fs::chown(&entry, Some(65_534), None).is_ok() {
        is_replaced(&cache, &compiler);
    }
    let link = folder.path().join("link");
    fs::rename(&entry, &link).unwrap();
    std::os::unix::fs::symlink(&link, &entry).unwrap();
    is_replaced(&cache, &compiler);
}

#[test]
fn a_damaged_entry_is_warned_of() {
    warnings();
    let folder = folder();
    let (cache, compiler, entry) = filled(&folder, 1);
    fs::write(&entry, "nonsense").unwrap();
    is_replaced(&cache, &compiler);
    let logged = warnings();
    let [one] = logged.as_slice() else { panic!("{logged:?}") };
    assert!(one.contains("too short") && one.contains(entry.to_str().unwrap()), "{one}");
}

#[test]
fn prepared_requests_are_not_compiled_again() {
    let folder = folder();
    let (cache, compiler) = (Cache::at(folder.path().join("made/here")), Counting::default());
    let requests = [request(1), request(2), request(1)];
    let prepared = prepare_with(&requests, &cache, &compiler).unwrap();
    assert_eq!(compiler.count(), 2);
    let cached: Vec<bool> = prepared.iter().map(|one| one.cached).collect();
    assert_eq!(cached, [false, false, true]);
    assert!(prepared.iter().all(|one| one.name == "a.cu" && one.path.is_file()));
    assert!(cubin_with(&request(2), &cache, &compiler).unwrap().cached);
}

/// NVRTC, if present: in the `WEFT_NVRTC_DIR` folder, in the Python environment of this checkout or `PYO3_PYTHON`, or
/// in the system.
#[test]
fn nvrtc_compiles_once_for_a_gpu_that_is_not_here() {
    if let Some(folder) = std::env::var_os("WEFT_NVRTC_DIR") {
        weft_cuda::nvrtc::add_search_path(folder);
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv");
    let python = std::env::var_os("PYO3_PYTHON").map(PathBuf::from);
    let other = python.and_then(|python| Some(python.parent()?.parent()?.to_owned()));
    let subfolders =
        |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    for python in [Some(here), other].into_iter().flatten().flat_map(|e| subfolders(e.join("lib")))
    {
        for package in subfolders(python.join("site-packages/nvidia")) {
            weft_cuda::nvrtc::add_search_path(package.join("lib"));
        }
    }
    if let Err(error) = weft_cuda::nvrtc::version() {
        eprintln!("not tested: {error}; or set WEFT_NVRTC_DIR to the folder that has it");
        return;
    }
    const FILES: &[(&str, &str)] = &[
        (
            "kernels/add.cu",
            "#include \"weft/more.cuh\"\nextern \"C\" __global__ void add(int* x) \
             { *x += more(MORE); }",
        ),
        ("weft/more.cuh", "#pragma once\n__device__ int more(int x) { return x; }"),
    ];
    let request = |more: &str| CompileRequest {
        name: "kernels/add.cu",
        files: FILES,
        defines: vec![("MORE".into(), more.into())],
        arch: "sm_90a".into(),
        options: vec!["-lineinfo".into()],
    };
    let folder = folder();
    let cache = Cache::at(folder.path());
    let first = cubin(&request("3"), &cache).unwrap();
    assert!(!first.cached && first.cubin.starts_with(b"\x7fELF"));
    let second = cubin(&request("3"), &cache).unwrap();
    assert!(second.cached && second.cubin == first.cubin && second.seconds < first.seconds);
    assert!(cubin(&request("4"), &cache).unwrap().cubin != first.cubin);
    let prepared = prepare(&[request("4")], &cache).unwrap();
    let mut kept = Vec::new();
    File::open(&prepared[0].path).unwrap().read_to_end(&mut kept).unwrap();
    assert!(prepared[0].cached && kept.starts_with(b"\x7fELF"));
    let error = cubin(&request("nothing_of_this_name"), &cache).unwrap_err().to_string();
    assert!(error.contains("nothing_of_this_name") && error.contains("add.cu"), "{error}");
}
