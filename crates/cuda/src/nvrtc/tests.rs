//! Tests that compile. They need NVRTC: in the folder `WEFT_NVRTC_DIR`, in this checkout's Python environment,
//! or in the library search path.

use super::{Source, add_search_path, compile, location, version};
use crate::error::Error;
use crate::module::check_cubin;
use std::path::{Path, PathBuf};

const HEADER: (&str, &str) =
    ("weft/sum.cuh", "__device__ int sum(int a, int b) { return a + b; }\n");
const KERNEL: &str = r#"#include "weft/sum.cuh"
struct Arguments { unsigned long long out; int count; };
extern "C" __global__ void add_up(const __grid_constant__ Arguments arguments) {
    auto out = reinterpret_cast<int *>(arguments.out);
    if (threadIdx.x < arguments.count) out[threadIdx.x] = sum(out[threadIdx.x], BLOCK);
}
"#;

/// True if NVRTC is available; otherwise reports the skip.
fn found() -> bool {
    for folder in folders() {
        add_search_path(folder);
    }
    match version() {
        Ok(_) => true,
        Err(error) => {
            eprintln!("skipped: {error}; or set WEFT_NVRTC_DIR to the folder that has it");
            false
        }
    }
}

fn folders() -> Vec<PathBuf> {
    let subfolders = |folder: PathBuf| {
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
    };
    let environment = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let packages = subfolders(environment)
        .flat_map(|python| subfolders(python.join("site-packages/nvidia")))
        .map(|package| package.join("lib"));
    std::env::var_os("WEFT_NVRTC_DIR").map(PathBuf::from).into_iter().chain(packages).collect()
}

fn source(text: &str) -> Source<'_> {
    Source { name: "add_up.cu", text, headers: &[HEADER] }
}

fn options(architecture: &str) -> Vec<String> {
    [&format!("--gpu-architecture={architecture}"), "--std=c++17", "-DBLOCK=64"]
        .map(ToString::to_string)
        .to_vec()
}

/// Error from compiling `text`.
fn refusal(text: &str, options: &[String]) -> Error {
    compile(&source(text), options).expect_err("it compiles")
}

#[test]
fn a_kernel_with_a_header_and_a_definition_becomes_a_cubin() {
    if !found() {
        return;
    }
    let (major, _) = version().unwrap();
    assert!((12..=13).contains(&major), "version {major}");
    assert!(location().unwrap().to_string_lossy().contains("libnvrtc.so."));
    let cubin = compile(&source(KERNEL), &options("sm_90a")).unwrap();
    check_cubin(&cubin).unwrap();
    assert!(check_cubin(&cubin[..cubin.len() / 2]).is_err());
    assert!(
        cubin.windows(6).any(|window| window == b"add_up"),
        "it contains the name of the kernel"
    );
    // Deterministic: results are cached by source.
    assert_eq!(compile(&source(KERNEL), &options("sm_90a")).unwrap(), cubin);
}

#[test]
fn an_error_in_the_source_comes_with_file_line_and_the_compilers_message() {
    if !found() {
        return;
    }
    let text = KERNEL.replace("sum(out", "som(out");
    let Error::Compile { name, log, .. } = refusal(&text, &options("sm_90a")) else {
        panic!("not a compile error")
    };
    assert_eq!(name, "add_up.cu");
    assert!(log.contains("add_up.cu(5)"), "{log}");
    assert!(log.contains("\"som\" is undefined"), "{log}");
    let shown = refusal(&text, &options("sm_90a")).to_string();
    assert!(shown.contains("--gpu-architecture=sm_90a"), "{shown}");
    assert!(shown.contains("NVRTC_ERROR_COMPILATION"), "{shown}");
}

#[test]
fn a_header_that_was_not_given_is_named() {
    if !found() {
        return;
    }
    let Error::Compile { log, .. } = refusal("#include <weft/none.cuh>\n", &options("sm_90a"))
    else {
        panic!("not a compile error")
    };
    assert!(log.contains("weft/none.cuh"), "{log}");
}

#[test]
fn an_unknown_option_is_named() {
    if !found() {
        return;
    }
    let error = refusal(KERNEL, &["--no-such-option".to_owned()]).to_string();
    assert!(error.contains("nvrtcCompileProgram"), "{error}");
    assert!(error.contains("NVRTC_ERROR_INVALID_OPTION"), "{error}");
    assert!(error.contains("no-such-option"), "{error}");
}

#[test]
fn a_virtual_architecture_is_an_error_with_the_remedy() {
    if !found() {
        return;
    }
    let Error::Compile { text, .. } = refusal(KERNEL, &options("compute_90a")) else {
        panic!("not a compile error")
    };
    assert!(text.contains("--gpu-architecture=sm_90a"), "{text}");
}

#[test]
fn threads_compile_at_once() {
    if !found() {
        return;
    }
    std::thread::scope(|scope| {
        let threads = ["sm_90", "sm_90a"]
            .map(|name| scope.spawn(move || compile(&source(KERNEL), &options(name)).unwrap()));
        let [first, second] = threads.map(|thread| thread.join().unwrap());
        assert_ne!(first, second);
    });
}

#[test]
fn text_with_a_nul_byte_is_refused() {
    if !found() {
        return;
    }
    let error = refusal("void f() {}\0", &options("sm_90a"));
    assert!(matches!(error, Error::Text { what: "the source", .. }), "{error}");
}
