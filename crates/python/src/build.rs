//! This native module's build: version, commit, target, profile.

use pyo3::prelude::*;

/// The native module's version, commit, target and profile.
#[pyclass(frozen, get_all, module = "weft._native")]
pub struct BuildInfo {
    /// Weft's version.
    version: &'static str,
    /// The commit it was built from, or "unknown" outside a git checkout.
    commit: &'static str,
    /// The target triple it was built for.
    target: &'static str,
    /// The optimisation it was built with: "debug" or "release".
    profile: &'static str,
}

#[pymethods]
impl BuildInfo {
    fn __repr__(&self) -> String {
        let Self { version, commit, target, profile } = self;
        format!(
            "BuildInfo(version='{version}', commit='{commit}', target='{target}', profile='{profile}')"
        )
    }
}

/// The native module's version, commit, target and profile.
#[pyfunction]
pub fn build_info() -> BuildInfo {
    BuildInfo {
        version: env!("CARGO_PKG_VERSION"),
        commit: env!("WEFT_BUILD_COMMIT"),
        target: env!("WEFT_BUILD_TARGET"),
        profile: env!("WEFT_BUILD_PROFILE"),
    }
}
