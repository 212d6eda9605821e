//! Binding layouts and constants, compared with a library's headers by a C compiler.

use std::io::Write;
use std::process::{Command, Stdio};

/// Compares each C expression with the value here. Skipped, with a message, without `headers`, the first
/// of which decides, or without a C compiler. `package`: Debian package, for the message.
pub fn assert_equal_to_headers(headers: &[&str], package: &str, lines: &[(String, u64)]) {
    let include = |header: &&str| format!("#include <{header}>\n");
    let includes: String = headers.iter().map(include).collect();
    let first = headers.first().expect("a header");
    let found = compile(&include(first)).map(|(ok, _)| ok);
    if found != Some(true) {
        return println!("skipped: no {first} or no C compiler (Debian: {package})");
    }
    let assertion = |(expression, value): &(String, u64)| {
        format!(
            "_Static_assert((unsigned long long)({expression}) == {value}ULL, \"{expression}\");\n"
        )
    };
    let assertions: String = lines.iter().map(assertion).collect();
    let source = format!("#include <stddef.h>\n{includes}{assertions}");
    let (ok, errors) = compile(&source).expect("it compiled the header");
    assert!(ok, "{errors}");
}

/// True if the source compiles, with the compiler's messages; `None` without a compiler.
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
