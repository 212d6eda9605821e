//! Records the commit that the native module is built from, for `weft.build_info()`.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=WEFT_BUILD_COMMIT");
    // HEAD's log changes with every change to the commit that HEAD names, also within a branch.
    for path in ["HEAD", "logs/HEAD"].into_iter().filter_map(git_path) {
        println!("cargo::rerun-if-changed={path}");
    }
    let commit = env::var("WEFT_BUILD_COMMIT").ok().filter(|commit| !commit.is_empty());
    let commit = commit.or_else(|| git(&["rev-parse", "HEAD"])).unwrap_or("unknown".to_owned());
    println!("cargo::rustc-env=WEFT_BUILD_COMMIT={commit}");
    for name in ["TARGET", "PROFILE"] {
        let value = env::var(name).unwrap_or("unknown".to_owned());
        println!("cargo::rustc-env=WEFT_BUILD_{name}={value}");
    }
}

/// Path to git's file `name`, if this is a checkout and the file exists: a missing path would make
/// cargo run this script at every build.
fn git_path(name: &str) -> Option<String> {
    let path = git(&["rev-parse", "--path-format=absolute", "--git-path", name])?;
    std::path::Path::new(&path).exists().then_some(path)
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
