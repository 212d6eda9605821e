//! Layouts and constants compared with libfabric's headers.

use std::io::Write;
use std::process::{Command, Stdio};
use weft_fabric::providers::ofi::layout;

/// Offsets, sizes and constants of the bindings equal those that a C compiler finds in the headers.
#[test]
fn layouts_are_those_of_the_headers() {
    let lines = layout();
    let mut source = String::from(
        "#include <stddef.h>\n#include <rdma/fabric.h>\n#include <rdma/fi_cm.h>\n\
         #include <rdma/fi_domain.h>\n#include <rdma/fi_endpoint.h>\n#include <rdma/fi_eq.h>\n\
         #include <rdma/fi_errno.h>\n#include <rdma/fi_rma.h>\n",
    );
    for (expression, value) in &lines {
        let value = *value;
        source += &format!(
            "_Static_assert((unsigned long long)({expression}) == {value}ULL, \"{expression}\");\n"
        );
    }
    let has_headers = |source: &str| compile(source).map(|(ok, _)| ok);
    match has_headers("#include <rdma/fabric.h>\n") {
        Some(true) => {}
        _ => return println!("skipped: no rdma/fabric.h or no C compiler (Debian: libfabric-dev)"),
    }
    let (ok, errors) = compile(&source).unwrap();
    assert!(ok, "{errors}");
    assert!(lines.len() > 100, "{} lines", lines.len());
}

fn compile(source: &str) -> Option<(bool, String)> {
    let mut compiler = Command::new("cc")
        .args(["-std=c11", "-fsyntax-only", "-xc", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .ok()?;
    compiler.stdin.take()?.write_all(source.as_bytes()).ok()?;
    let output = compiler.wait_with_output().ok()?;
    Some((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}
