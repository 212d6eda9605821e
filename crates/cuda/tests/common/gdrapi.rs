//! Stand-in for libgdrapi, compiled from `gdrapi.c`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiled stand-in with a log.
pub struct Gdrapi {
    folder: tempfile::TempDir,
}

impl Gdrapi {
    /// Compiles it with macros, for example `FAIL="gdr_map"`.
    pub fn compile(macros: &[&str]) -> Gdrapi {
        let found = Gdrapi { folder: tempfile::tempdir().unwrap() };
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda/tests/common/gdrapi.c");
        let log = format!("-DLOG=\"{}\"", found.log().display());
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
            .arg(found.library())
            .arg(log)
            .args(macros.iter().map(|text| format!("-D{text}")))
            .arg(source)
            .status()
            .expect("a C compiler, which these tests need");
        assert!(status.success());
        found
    }

    /// The library.
    pub fn library(&self) -> PathBuf {
        self.folder.path().join("libgdrapi.so.2")
    }

    /// Calls so far, in order.
    pub fn calls(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("calls")
    }
}
